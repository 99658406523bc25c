"""What a key may look like, and the order of listings. Pure functions, shared by every store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn

from async_rl.errors import StoreError
from async_rl.store.base import ObjectInfo

__all__ = [
    "check_key",
    "check_prefix",
    "check_range",
    "in_byte_order",
    "is_past",
    "past_the_end",
    "start_of_listing",
]

MAX_KEY_BYTES = 1024
"""S3's limit, on the key with the run's prefix before it."""


def check_key(key: str) -> str:
    """`key` itself, if every store can hold it under this name. Raises StoreError.

    Keys also come out of manifests that somebody else wrote: none may climb out of the run's folder.
    """
    if not key:
        _refuse(key, "it is empty")
    for segment in key.split("/"):
        if segment in ("", ".", ".."):
            _refuse(key, f"it has the segment {segment!r}")
    if any(ord(character) < 32 for character in key):
        _refuse(key, "it has a control character")
    if len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        _refuse(key, f"it is longer than {MAX_KEY_BYTES} bytes")
    return key


def check_prefix(prefix: str) -> str:
    """Like a key, but the last segment may be cut anywhere, also to nothing."""
    folders, _, last = prefix.rpartition("/")
    if folders or prefix.startswith("/"):
        check_key(folders)
    if last:
        check_key(last + "x")
    return prefix


def check_range(start: int, length: int | None) -> None:
    if start < 0 or (length is not None and length < 0):
        raise StoreError(f"a range from {start} of length {length} makes no sense")


def past_the_end(what: str, size: int, start: int, length: int | None) -> StoreError:
    """The error of a get that asks for more than there is: never a short answer."""
    wanted = f"from byte {start}" if length is None else f"bytes {start} to {start + length}"
    return StoreError(
        f"{what} has {size} bytes, {wanted} were asked for", hint="its writer recorded another size"
    )


def _refuse(key: str, why: str) -> NoReturn:
    raise StoreError(
        f"{key!r} can't be an object's key: {why}",
        hint="keys are relative, segments separated by single '/'",
    )


# Amazon and MinIO list keys in byte order. SeaweedFS walks a tree: it puts everything under `a/` before
# `a-b` and `a.json` (in byte order '-' and '.' come before '/'), and its StartAfter follows that order:
# listing after `a.json`, or after `a` itself, silently leaves out `a/b`. The two orders disagree only
# among keys that are equal up to a character <= '/'; call the part before it the stem. Keys of one stem
# stand together in both orders, and stems come in the same order in both. So: start before the stem of
# `after`, and sort the keys of each stem.


def stem(key: str, prefix: str) -> str:
    """`key` up to the first character <= '/' that follows `prefix`."""
    for at in range(len(prefix), len(key)):
        if key[at] <= "/":
            return key[:at]
    return key


def is_past(prefix: str, after: str) -> bool:
    """Whether no key that starts with `prefix` can be greater than `after`."""
    return not after.startswith(prefix) and _bytes(after) > _bytes(prefix)


def start_of_listing(prefix: str, after: str) -> str:
    """Where to start a listing (exclusive) so that it misses no key greater than `after`, in either order.

    "" is the beginning; anything else starts with `prefix`, which older servers of MinIO insist on. Numbered names
    begin up to ten too early: cheap, and in_byte_order drops them.
    """
    if not after.startswith(prefix):
        return ""
    start = stem(after, prefix)[:-1]
    return start if len(start) > len(prefix) else ""


def in_byte_order(objects: Iterable[ObjectInfo], prefix: str, after: str) -> Iterator[ObjectInfo]:
    """`objects` (in byte order or tree order) whose key is greater than `after`, in byte order.

    Holds back the objects of one stem at a time: memory stays small where a folder's names differ early.
    """
    group: list[ObjectInfo] = []
    current = ""
    for info in objects:
        its_stem = stem(info.key, prefix)
        if group and its_stem != current:
            yield from _sorted(group)
            group = []
        current = its_stem
        if _bytes(info.key) > _bytes(after):
            group.append(info)
    yield from _sorted(group)


def _sorted(group: list[ObjectInfo]) -> list[ObjectInfo]:
    return sorted(group, key=lambda info: _bytes(info.key))


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")
