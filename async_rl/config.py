"""TOML -> frozen Structs. This file knows how to read sections; what stands in one is declared beside its reader.

A run file is one TOML file with a table per component. `read_sections` turns it into the Structs given for it,
with `--set section.key=value` laid on top, and refuses what it does not know: the error names the place, what
was found there and the valid choices. Nothing here imports a component.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from async_rl.errors import ConfigError

__all__ = [
    "Choice",
    "choices",
    "load_toml",
    "merge_tables",
    "parse_overrides",
    "read_section",
    "read_sections",
]

S = TypeVar("S", bound=msgspec.Struct)


class Choice(NamedTuple):
    """A section whose keys depend on one of them: what another choice reads is unknown here."""

    key: str
    classes: Mapping[str, type[msgspec.Struct]]
    pick: Callable[[Mapping[str, Any]], str]  # which of them a table means

    def of(self, table: Mapping[str, Any], name: str, where: str) -> type[msgspec.Struct]:
        """Raises ConfigError for a choice that there is not."""
        picked = self.pick(table)
        if picked not in self.classes:
            raise ConfigError(
                f"{where}: {name}.{self.key} = {picked!r} does not exist",
                hint=choices(picked, self.classes),
            )
        return self.classes[picked]


def load_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"can't read the run file {path}: {error.strerror}", hint="check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}", hint="a run file is TOML") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def parse_overrides(items: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`section.key=value` items, values in TOML syntax; a bare word counts as a string.

    A deeper key (`environment.args.min_length=3`) reaches into a table.
    """
    tables: dict[str, dict[str, Any]] = {}
    for item in items:
        name, equals, raw = item.partition("=")
        path = name.strip().split(".")
        if not equals or len(path) < 2 or not all(path):
            raise ConfigError(f"--set {item!r} is not of the form section.key=value")
        table: Any = tables
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {item!r}: {part!r} was already set to a value, it is no table")
        table[path[-1]] = _toml_value(raw.strip())
    return tables


def _toml_value(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw


def read_section(cls: type[S], name: str, table: object, where: str) -> S:
    """One table as `cls`. Raises ConfigError naming `where`, the key, what was found and what is valid."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: [{name}] must be a table, found {type(table).__name__} {table!r}")
    fields = {field.name: field for field in msgspec.structs.fields(cls)}
    for key in table:
        if key not in fields:
            raise ConfigError(f"{where}: unknown key {key!r} in [{name}]", hint=choices(key, fields))
    try:
        return msgspec.convert(table, cls)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        key = place.strip("`").removeprefix("$").lstrip(".")
        found = f", found {table[key]!r}" if key in table else ""
        at = f"{name}.{key}" if key else f"[{name}]"
        raise ConfigError(f"{where}: {at}: {reason[:1].lower()}{reason[1:]}{found}") from error


def read_sections(
    tables: Mapping[str, Any],
    overrides: Mapping[str, Mapping[str, Any]],
    sections: Mapping[str, type[msgspec.Struct] | Choice],
    where: str,
) -> dict[str, msgspec.Struct]:
    """Every section of a run: the file's tables, overrides on top, defaults below."""
    for source, names in ((where, tables), ("--set", overrides)):
        for name in names:
            if name not in sections:
                raise ConfigError(f"{source}: unknown section [{name}]", hint=choices(name, sections))
    result = {}
    for name, cls in sections.items():
        table = tables.get(name, {})
        if not isinstance(table, Mapping):
            raise ConfigError(f"{where}: [{name}] must be a table, found {table!r}")
        source = f"{where} with --set" if name in overrides else where
        laid_over = overrides.get(name, {})
        if isinstance(cls, Choice):
            cls = cls.of(merge_tables(table, laid_over), name, source)
        laid_over = _numbers_as_text(cls, laid_over)
        result[name] = read_section(cls, name, merge_tables(table, laid_over), source)
    return result


def _numbers_as_text(cls: type[msgspec.Struct], table: Mapping[str, Any]) -> dict[str, Any]:
    """On a command line quotes are the shell's: `--set rollout.cpu_bind=1` means text where text is wanted."""
    text = {field.name for field in msgspec.structs.fields(cls) if field.type is str}
    return {
        key: str(value) if key in text and type(value) is int else value for key, value in table.items()
    }


def merge_tables(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`top` laid over `base`, table by table; neither is changed."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        nested = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = merge_tables(old, value) if nested else value  # type: ignore[arg-type]
    return merged


def choices(wrong: str, valid: Iterable[str]) -> str:
    """The hint of an unknown name: `did you mean …? valid: …`."""
    names = sorted(valid)
    close = difflib.get_close_matches(wrong, names, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"valid: {', '.join(names) or 'none'}"
