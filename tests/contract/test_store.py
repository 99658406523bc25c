"""What async_rl/store/base.py promises, held against every store: a folder, moto, SeaweedFS, and JuiceFS' gateway,
which ignores conditions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from async_rl.errors import AlreadyExists, NotFound, StoreError
from async_rl.store import ObjectStore, StoreConfig, open_store
from async_rl.store.base import BLOCK_BYTES
from tests.servers import S3Server

CONFIG = StoreConfig(part_bytes=5 << 20, retry_limit_s=30, settle_s=2)
LIMIT_S = 60.0
SERVERS = {"moto": "moto_s3", "seaweedfs": "seaweed", "juicefs": "juicefs"}
# Names on both sides of '/' in byte order, which a server that walks a tree lists differently.
AWKWARD = [
    *("a", "c!", "c-d", "c.x", "c/3-6.json", "c/3-6/q", "c/3-7-a", "c/3-7.json", "c/3-7/x", "c/3-7/y/z"),
    *("c/3-70", "c/3-71", "c0", "d", "é/ü", "z+ %?&=#"),
]


@pytest.fixture(params=["file", "moto", "seaweedfs", "juicefs"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectStore]:
    if request.param == "file":
        url = (tmp_path / "a run" / "100%").as_uri()
    else:
        server: S3Server = request.getfixturevalue(SERVERS[request.param])
        server.activate(monkeypatch)
        url = server.new_url()
    opened = open_store(url, CONFIG)
    if request.param == "juicefs":
        assert not opened.probe().conditional_put
    yield opened
    opened.close()


def keys(store: ObjectStore, prefix: str = "", after: str = "") -> list[str]:
    return [info.key for info in store.list_after(prefix, after)]


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 4099], ids=len)
def test_what_is_put_comes_back_whole_and_in_ranges(store: ObjectStore, data: bytes) -> None:
    store.put("k/object", data)
    size = len(data)
    assert store.get("k/object") == data
    assert store.head("k/object").size == size
    for start, length in [
        (0, size),
        (0, 0),
        (size, 0),
        (size, None),
        (size // 2, None),
        (size // 3, size // 3),
    ]:
        assert store.get("k/object", start, length) == data[start:][:length], (start, length)


def test_a_stream_brings_the_same_bytes_in_small_blocks(store: ObjectStore) -> None:
    data = bytes(range(256)) * 4099
    store.put("k", data)
    for start, length in [(0, len(data)), (0, 0), (1, 1), (len(data) // 3, len(data) // 2), (len(data), 0)]:
        blocks = list(store.stream("k", start, length))
        assert b"".join(blocks) == data[start:][:length], (start, length)
        assert all(0 < len(block) <= BLOCK_BYTES for block in blocks)


def test_a_stream_of_what_is_not_there_is_an_error_not_a_short_answer(store: ObjectStore) -> None:
    store.put("k", b"12345")
    for start, length in [(0, 6), (4, 2), (5, 1), (9, 3)]:
        with pytest.raises(StoreError, match="5 bytes"):
            list(store.stream("k", start, length))
    with pytest.raises(NotFound):
        list(store.stream("missing", 0, 1))


def test_a_stream_may_be_left_half_way(store: ObjectStore) -> None:
    data = bytes(range(256)) * 4099
    store.put("k", data)
    for _ in range(40):  # more often than there are connections
        next(iter(store.stream("k", 0, len(data))))
    assert store.get("k") == data


def test_a_memoryview_is_stored_like_bytes(store: ObjectStore) -> None:
    store.put("k", memoryview(b"0123456789")[2:5])
    store.put_if_absent("l.json", memoryview(b"0123456789")[5:])
    assert (store.get("k"), store.get("l.json")) == (b"234", b"56789")


def test_a_range_beyond_the_end_is_an_error_not_a_short_answer(store: ObjectStore) -> None:
    store.put("k", b"12345")
    for start, length in [(0, 6), (4, 2), (5, 1), (6, None), (6, 0), (9, 3)]:
        with pytest.raises(StoreError, match="5 bytes"):
            store.get("k", start, length)
    with pytest.raises(StoreError):
        store.get("k", -1)


def test_put_replaces(store: ObjectStore) -> None:
    store.put("k", b"old and longer")
    store.put("k", b"new")
    assert store.get("k") == b"new"


def test_put_if_absent_creates_once_and_changes_nothing_after(store: ObjectStore) -> None:
    store.put_if_absent("versions/1.json", b"first")
    with pytest.raises(AlreadyExists, match=r"versions/1\.json"):
        store.put_if_absent("versions/1.json", b"second")
    assert store.get("versions/1.json") == b"first"
    store.delete("versions/1.json")
    store.put_if_absent("versions/1.json", b"again")
    assert store.get("versions/1.json") == b"again"
    assert keys(store, "versions/") == ["versions/1.json"]
    assert keys(store, "versions/", "versions/1.json") == []
    assert store.head("versions/1.json").size == 5


def test_of_many_racing_creators_exactly_one_wins(
    store: ObjectStore, request: pytest.FixtureRequest
) -> None:
    if "moto" in request.node.name:
        pytest.skip("moto checks and writes in two steps: its conditional puts are not atomic")
    racers = 6
    for round_ in range(3):
        start = threading.Barrier(racers)

        def create(racer: int, key: str = f"race/{round_}.json", start: threading.Barrier = start) -> bool:
            start.wait(LIMIT_S)
            try:
                store.put_if_absent(key, b"%d" % racer)
                return store.settled(key, b"%d" % racer)
            except AlreadyExists:
                return False

        with ThreadPoolExecutor(racers) as pool:
            won = list(pool.map(create, range(racers), timeout=LIMIT_S))
        assert won.count(True) == 1
        assert store.get(f"race/{round_}.json") == b"%d" % won.index(True)


@pytest.mark.parametrize(
    "operation", [lambda s: s.get("no/such"), lambda s: s.get("no/such", 0, 0), lambda s: s.head("no/such")]
)
def test_reading_what_is_not_there_says_so(
    store: ObjectStore, operation: Callable[[ObjectStore], object]
) -> None:
    with pytest.raises(NotFound, match="no/such"):
        operation(store)


def test_a_store_that_was_never_written_to_lists_as_empty(store: ObjectStore) -> None:
    assert keys(store) == []
    assert keys(store, "versions/", "versions/1") == []


def test_a_folder_of_keys_is_no_object(store: ObjectStore) -> None:
    store.put("a/b/c", b"1")
    for operation in (store.get, store.head):
        with pytest.raises(NotFound):
            operation("a/b")
    store.delete("a/b")
    assert keys(store) == ["a/b/c"]


def test_deleting_twice_succeeds(store: ObjectStore) -> None:
    store.put("k", b"1")
    store.delete("k")
    store.delete("k")
    store.delete("never/was")
    assert keys(store) == []


@pytest.mark.parametrize("page", [1000, 3])
def test_listings_are_in_byte_order_whatever_the_names(
    store: ObjectStore, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.store.s3.PAGE_KEYS", page)
    for key in AWKWARD:
        store.put(key, key.encode())
    expected = sorted(AWKWARD, key=str.encode)
    assert keys(store) == expected
    for prefix in ("c", "c/", "c/3-7", "c/3-7/", "é", "x"):
        for after in (
            "",
            "c",
            "c/",
            "c/3-6/q",
            "c/3-7",
            "c/3-7.json",
            "c/3-7.x",
            "c/3-7/yy",
            "c!",
            "b",
            "zz",
        ):
            wanted = [k for k in expected if k.startswith(prefix) and k.encode() > after.encode()]
            assert keys(store, prefix, after) == wanted, (prefix, after)
    assert store.get("z+ %?&=#") == b"z+ %?&=#"


def test_a_listing_tells_size_and_time(store: ObjectStore) -> None:
    store.put("k", b"12345")
    (listed,) = store.list_after("")
    assert listed.size == 5
    assert abs(listed.modified - store.head("k").modified) <= 1.0
    assert listed.modified > 1.6e9


def test_more_keys_than_one_page_are_all_listed(store: ObjectStore, request: pytest.FixtureRequest) -> None:
    if "moto" in request.node.name or "juicefs" in request.node.name:
        pytest.skip("takes this server 9 s; its pages are covered by the awkward names, three at a time")
    names = [f"versions/{n:010d}.json" for n in range(1005)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: store.put(name, b"{}"), names, timeout=LIMIT_S))
    assert keys(store, "versions/") == names
    assert keys(store, "versions/", names[1000]) == names[1001:]


def test_an_upload_of_many_parts_arrives_whole(store: ObjectStore) -> None:
    pattern = bytes(range(251)) * 4177  # about 1 MiB, of a length that divides no part
    with store.upload("big") as upload:
        for _ in range(13):
            upload.write(pattern)
        upload.write(memoryview(pattern)[:7])
        upload.commit()
    whole = pattern * 13 + pattern[:7]
    assert store.head("big").size == len(whole)
    assert store.get("big") == whole
    assert store.get("big", 5 << 20, 100) == whole[5 << 20 :][:100]


@pytest.mark.parametrize("size", [0, 5, 5 << 20, 10 << 20])
def test_an_upload_of_any_size_works(store: ObjectStore, size: int) -> None:
    with store.upload("k") as upload:
        upload.write(bytes(size))
        upload.commit()
    assert store.get("k") == bytes(size)


def test_a_large_put_is_whole(store: ObjectStore) -> None:
    data = bytes(range(256)) * (45 << 10)
    store.put("k", data)
    assert store.get("k") == data


def test_an_upload_is_invisible_until_its_commit(store: ObjectStore) -> None:
    store.put("k", b"old")
    with store.upload("k") as upload:
        upload.write(bytes(11 << 20))
        assert store.get("k") == b"old"
        upload.commit()
    assert store.head("k").size == 11 << 20


@pytest.mark.parametrize("size", [10, 11 << 20])
def test_an_upload_left_without_commit_leaves_nothing(store: ObjectStore, size: int) -> None:
    with pytest.raises(ZeroDivisionError), store.upload("gone") as upload:
        upload.write(bytes(size))
        raise ZeroDivisionError
    with store.upload("left") as upload:
        upload.write(bytes(size))
    assert keys(store) == []
    assert unfinished(store) == []
    with pytest.raises(StoreError, match="ended"):
        upload.commit()


def unfinished(store: ObjectStore) -> list[str]:
    """What an aborted upload may have left behind, seen from below the protocol."""
    if root := getattr(store, "root", None):
        return [str(path) for path in (root / ".tmp").iterdir()]
    client, bucket, prefix = store._client, store.bucket, store.prefix  # type: ignore[attr-defined]
    return [
        u["Key"] for u in client.list_multipart_uploads(Bucket=bucket, Prefix=prefix).get("Uploads", ())
    ]


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\n", "a\0", "x" * 1025])
def test_keys_that_could_leave_the_run_are_refused(store: ObjectStore, key: str) -> None:
    for operation in (store.get, store.head, store.delete, store.upload, lambda k: store.put(k, b"")):
        with pytest.raises(StoreError, match="can't be an object's key"):
            operation(key)
    assert keys(store) == []


def test_a_probe_finds_whether_creation_is_enforced_and_leaves_nothing(
    store: ObjectStore, request: pytest.FixtureRequest
) -> None:
    assert store.probe().conditional_put is ("juicefs" not in request.node.name)
    assert keys(store) == []


def test_a_store_can_be_used_by_many_threads_at_once(store: ObjectStore) -> None:
    def round_trip(n: int) -> bytes:
        store.put(f"t/{n}", b"%d" % n * 1000)
        return store.get(f"t/{n}", 0, 1000)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trip, range(32), timeout=LIMIT_S)) == [
            (b"%d" % n * 1000)[:1000] for n in range(32)
        ]
    assert len(keys(store, "t/")) == 32
