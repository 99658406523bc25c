"""A run file says what is wrong with it, where, and what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta, Struct

from async_rl.config import load_toml, parse_overrides, read_sections
from async_rl.errors import ConfigError


class Inner(Struct, frozen=True, forbid_unknown_fields=True):
    depth: int = 1


class Left(Struct, frozen=True, forbid_unknown_fields=True):
    size: Annotated[int, Meta(ge=1)] = 4
    name: str = "a"
    inner: Inner = Inner()
    args: dict[str, int] = {}


class Right(Struct, frozen=True, forbid_unknown_fields=True):
    rate: float = 0.5


SECTIONS = {"left": Left, "right": Right}


def read(tables: dict, *overrides: str) -> dict:
    return read_sections(tables, parse_overrides(overrides), SECTIONS, "run.toml")


def test_defaults_then_file_then_overrides():
    sections = read(
        {"left": {"size": 5, "args": {"x": 1, "y": 2}}}, "left.name=b", "left.args.y=3", "right.rate=1"
    )
    assert sections["left"] == Left(size=5, name="b", args={"x": 1, "y": 3})
    assert sections["right"] == Right(rate=1.0)


@pytest.mark.parametrize(
    ("tables", "overrides", "said"),
    [
        ({"lefty": {}}, (), ["unknown section [lefty]", "did you mean 'left'?", "valid: left, right"]),
        ({"left": {"sise": 3}}, (), ["unknown key 'sise' in [left]", "did you mean 'size'?", "run.toml"]),
        ({"left": {"size": 0}}, (), ["left.size", ">= 1", "found 0"]),
        ({"left": {"size": "4"}}, (), ["left.size", "`int`", "found '4'"]),
        ({"left": 3}, (), ["[left] must be a table", "found 3"]),
        ({"left": {"inner": {"dept": 3}}}, (), ["left.inner", "dept"]),
        ({}, ("left.size=big",), ["--set", "left.size", "found 'big'"]),
        ({}, ("left.sise=3",), ["unknown key 'sise'"]),
        ({}, ("middle.size=3",), ["--set: unknown section [middle]"]),
        ({}, ("size=3",), ["section.key=value"]),
        ({}, ("left.size",), ["section.key=value"]),
        ({}, ("left.size=1", "left.size.deep=2"), ["it is no table"]),
    ],
)
def test_what_can_not_be_meant_is_refused_with_place_and_choices(tables, overrides, said):
    with pytest.raises(ConfigError) as caught:
        read(tables, *overrides)
    for words in said:
        assert words in str(caught.value)


def test_a_number_on_the_command_line_is_text_where_text_is_wanted():
    assert read({}, "left.name=1")["left"].name == "1"
    with pytest.raises(ConfigError, match=r"left.name: expected `str`, got `int`"):
        read({"left": {"name": 1}})


def test_override_values_are_toml_and_bare_words_are_strings():
    assert parse_overrides(["a.x=1", "a.y=1e-3", "a.z=true", "a.s=s3://b/c", 'a.q="1"', "a.l=[1, 2]"]) == {
        "a": {"x": 1, "y": 1e-3, "z": True, "s": "s3://b/c", "q": "1", "l": [1, 2]}
    }


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="missing.toml"):
        load_toml(tmp_path / "missing.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[run\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_toml(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_toml(bad)
