"""The order of listings: what a server in byte order and a server that walks a tree give, made the same."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from async_rl.errors import StoreError
from async_rl.store.base import ObjectInfo
from async_rl.store.keys import check_prefix, in_byte_order, start_of_listing

# Few characters, on both sides of '/', so that names collide in every way.
SEGMENTS = st.text(alphabet="!-.0a", min_size=1, max_size=3).filter(lambda s: s not in (".", ".."))
KEYS = st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join)
RUNS = st.lists(KEYS, unique=True, max_size=12)
PARTIAL = st.one_of(KEYS, st.text(alphabet="!-.0a/", max_size=4), st.just(""))


def byte_order_server(keys: list[str], prefix: str, start: str) -> list[str]:
    return sorted(key for key in keys if key.startswith(prefix) and key > start)


def tree_server(keys: list[str], prefix: str, start: str) -> list[str]:
    """SeaweedFS as observed: components compared one by one; starting after `a` passes over all of `a/`."""

    def rank(key: str) -> list[str]:
        return key.split("/")

    def passed_over(key: str) -> bool:
        return bool(start) and (rank(key) <= rank(start) or key.startswith(start + "/"))

    return sorted((key for key in keys if key.startswith(prefix) and not passed_over(key)), key=rank)


@pytest.mark.parametrize("server", [byte_order_server, tree_server])
@given(keys=RUNS, prefix=PARTIAL, after=PARTIAL)
@example(keys=["c!", "c/3"], prefix="", after="c!")
@example(keys=["c.json", "c/x", "c0"], prefix="c", after="c.json")
def test_a_listing_misses_nothing_and_is_in_order_on_any_server(
    server: object, keys: list[str], prefix: str, after: str
) -> None:
    start = start_of_listing(prefix, after)
    answered = server(keys, prefix, start)  # type: ignore[operator]
    listed = [i.key for i in in_byte_order((ObjectInfo(key, 0, 0.0) for key in answered), prefix, after)]
    assert listed == sorted(key for key in keys if key.startswith(prefix) and key > after)


def test_listing_after_a_number_starts_within_ten_of_it() -> None:
    assert start_of_listing("versions/", "versions/0000000042.json") == "versions/000000004"
    assert start_of_listing("versions/", "") == ""
    assert start_of_listing("versions/", "versions/") == ""


def test_names_that_differ_early_are_passed_on_one_by_one() -> None:
    """A reader of the newest of a million versions must not wait for, or hold, the others."""
    taken = []

    def server() -> object:
        for n in range(1_000_000):
            taken.append(n)
            yield ObjectInfo(f"versions/{n:010d}.json", 0, 0.0)

    listing = in_byte_order(server(), "versions/", "")  # type: ignore[arg-type]
    assert next(listing).key == "versions/0000000000.json"
    assert len(taken) <= 2


@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "a/b."])
def test_a_prefix_may_be_cut_anywhere(prefix: str) -> None:
    assert check_prefix(prefix) == prefix


@pytest.mark.parametrize("prefix", ["/", "/a", "../a", "a//", "a/../b"])
def test_a_prefix_may_not_leave_the_run(prefix: str) -> None:
    with pytest.raises(StoreError):
        check_prefix(prefix)
