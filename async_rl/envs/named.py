"""Users' own code, named in a run file as `module:name`: loading it, with errors that say what was there
instead."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from async_rl.errors import ConfigError, EnvironmentFailed

__all__ = ["choices", "construct", "load_named"]

T = TypeVar("T")


def load_named(name: str, *, what: str) -> Any:
    """The object `module:attribute`. The current folder counts as a place of modules, whatever the entry
    point.

    Raises ConfigError for a malformed name, a module that can't be imported, a missing or uncallable
    attribute.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(
            f"{what}: {name!r} is not of the form module:name", hint="for example my_task:reward"
        )
    module = _import(module_name, what)
    found = getattr(module, attribute, None)
    if not callable(found):
        problem = "is not callable" if hasattr(module, attribute) else "does not exist"
        raise ConfigError(
            f"{what}: {attribute!r} {problem} in module {module_name!r} ({module.__file__})",
            hint=choices(attribute, _callables(module)),
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


def choices(wrong: str, valid: Iterable[str]) -> str:
    """`did you mean …? valid: …`, as the configuration's own errors say it."""
    names = sorted(valid)
    close = difflib.get_close_matches(wrong, names, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"valid: {', '.join(names) or 'none'}"


def _callables(module: ModuleType) -> list[str]:
    """Its own ones: what it imports from elsewhere is no choice."""
    own = {
        name: value for name, value in vars(module).items() if not name.startswith("_") and callable(value)
    }
    return [name for name, value in own.items() if getattr(value, "__module__", "") == module.__name__]
