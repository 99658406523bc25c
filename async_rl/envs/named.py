"""Users' own code, named in a run file as `module:name`: loading it, with errors that say what was there
instead.

A worker gets these names from the orchestrator. They may lead to what was written for the purpose, not to any
callable there is: `subprocess:Popen` is no environment, `os:system` no reward.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from async_rl.config import choices
from async_rl.errors import ConfigError, EnvironmentFailed

__all__ = ["construct", "load_class", "load_function"]

T = TypeVar("T")


def load_class(name: str, *, methods: tuple[str, ...], what: str) -> type[Any]:
    """The class `module:Class`. The current folder counts as a place of modules, whatever the entry point.

    Raises ConfigError for a malformed name, a module that can't be imported, and where there is no class
    that has these methods.
    """

    def fits(found: Any) -> bool:
        return inspect.isclass(found) and all(callable(getattr(found, each, None)) for each in methods)

    kind = f"a class with the methods {' and '.join(methods)}"
    return _load(name, fits, kind=kind, what=what)  # type: ignore[no-any-return]


def load_function(name: str, *, what: str) -> Callable[..., Any]:
    """The function `module:function`, plain or async. Raises ConfigError as `load_class` does."""
    return _load(name, inspect.isfunction, kind="a function", what=what)  # type: ignore[no-any-return]


def _load(name: str, fits: Callable[[Any], bool], *, kind: str, what: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(
            f"{what}: {name!r} is not of the form module:name", hint="for example my_task:reward"
        )
    module = _import(module_name, what)
    found = getattr(module, attribute, None)
    if not fits(found):
        problem = f"is not {kind}" if hasattr(module, attribute) else "does not exist"
        raise ConfigError(
            f"{what}: {attribute!r} {problem} in module {module_name!r} ({_place(module)})",
            hint=choices(attribute, _own(module, fits)),
        )
    return found


def _import(name: str, what: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = "" if error.name == name else f" (it needs {error.name!r}, which is missing)"
        raise ConfigError(
            f"{what}: no module {name!r} can be imported{missing}",
            hint=f"it is looked for on PYTHONPATH and in the current folder {here}",
        ) from error
    except Exception as error:  # the edge to a user's module: whatever its import raises
        raise ConfigError(f"{what}: importing {name!r} raised {type(error).__name__}: {error}") from error


def construct(cls: type[T], args: Mapping[str, Any], *, where: str) -> T:
    """`cls(**args)`, the arguments checked against its signature first. Raises ConfigError,
    EnvironmentFailed."""
    signature = inspect.signature(cls)
    try:
        signature.bind(**args)
    except TypeError as error:
        valid = [name for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD]
        raise ConfigError(
            f"{where}: {error}", hint=f"valid arguments: {', '.join(valid) or 'none'}"
        ) from error
    try:
        return cls(**args)
    except ConfigError:
        raise
    except Exception as error:  # the edge to a user's class: whatever it raises
        raise EnvironmentFailed(f"{where}: could not be built: {type(error).__name__}: {error}") from error


def _own(module: ModuleType, fits: Callable[[Any], bool]) -> list[str]:
    """What would do, of its own: what it imports from elsewhere is no choice."""
    named = {
        name: value for name, value in vars(module).items() if not name.startswith("_") and fits(value)
    }
    return [name for name, value in named.items() if getattr(value, "__module__", "") == module.__name__]


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or "built in"
