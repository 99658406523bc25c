"""Creating once where the store does not enforce it, with a server in memory whose stamps and delays are scripted."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from botocore.exceptions import ClientError

from async_rl.errors import AlreadyExists, NotFound
from async_rl.store.base import ObjectInfo, StoreConfig
from async_rl.store.candidates import first_of, merged, plain_key
from async_rl.store.s3 import S3Store
from async_rl.weights import lineage


class OldServer:
    """As much of boto3's client as a store needs, over a dict: conditions are ignored, as an old server does.

    `clock` is what it stamps; the answer to the next put is lost if `lose_next`."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.clock = 100.0
        self.lose_next = False

    def put_object(self, Bucket: str, Key: str, Body: io.BytesIO, IfNoneMatch: str = "") -> dict[str, Any]:
        self.objects[Key] = (Body.read(), self.clock)
        if self.lose_next:
            self.lose_next = False
            raise ConnectionResetError("scripted")
        return {}

    def get_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        if Key not in self.objects:
            raise ClientError({"Error": {"Code": "NoSuchKey"}}, "GetObject")
        data = self.objects[Key][0]
        return {"Body": io.BytesIO(data), "ContentLength": len(data)}

    def list_objects_v2(
        self, Bucket: str, Prefix: str, MaxKeys: int, StartAfter: str = ""
    ) -> dict[str, Any]:
        found = sorted(key for key in self.objects if key.startswith(Prefix) and key > StartAfter)
        contents = [
            {
                "Key": key,
                "Size": len(self.objects[key][0]),
                "LastModified": datetime.fromtimestamp(self.objects[key][1], UTC),
            }
            for key in found
        ]
        return {"IsTruncated": False, "Contents": contents}

    def delete_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        self.objects.pop(Key, None)
        return {}


class Waiting:
    """In the place of the store's own clock: what happens while somebody waits for a claim to settle."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.meanwhile, self.waited = meanwhile, 0.0

    def wait(self, seconds: float) -> bool:
        self.waited += seconds
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return False


def store_on(server: OldServer, meanwhile: Callable[[], object] = lambda: None) -> S3Store:
    store = S3Store("s3://bucket/run", StoreConfig(endpoint_url="http://127.0.0.1:9", settle_s=7.0))
    store._client = server
    store._closed = Waiting(meanwhile)  # type: ignore[assignment]
    assert not store.probe().conditional_put
    return store


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")


def test_who_does_not_probe_such_a_server_replaces_what_is_there() -> None:
    """What all of this is for: so the tests below can fail."""
    store = S3Store("s3://bucket/run", StoreConfig(endpoint_url="http://127.0.0.1:9"))
    store._client = OldServer()
    store.put_if_absent("versions/1.json", b"first")
    store.put_if_absent("versions/1.json", b"second")
    assert store.get("versions/1.json") == b"second"


def test_a_candidate_that_comes_late_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = OldServer()
    ours, late = store_on(server), store_on(server)
    looks = [lambda key: None, late._first]  # it looked, found nothing, and slept before its put
    monkeypatch.setattr(late, "_first", lambda key: looks.pop(0)(key))
    ours.put_if_absent("versions/1.json", b"ours")
    assert ours.settled("versions/1.json", b"ours")
    server.clock += 50.0
    with pytest.raises(AlreadyExists):
        late.put_if_absent("versions/1.json", b"late")
    monkeypatch.undo()
    assert len(server.objects) == 2  # nothing was replaced
    assert ours.get("versions/1.json") == late.get("versions/1.json") == b"ours"
    assert [info.key for info in ours.list_after("versions/")] == ["versions/1.json"]


def test_who_was_stamped_first_but_shows_late_wins_and_the_other_learns_it_by_waiting() -> None:
    server = OldServer()
    slow = {"run/gc/1.json~slow": (b"slow", 100.0)}  # on its way
    server.clock = 101.0
    store = store_on(server, meanwhile=lambda: server.objects.update(slow))
    store.put_if_absent("gc/1.json", b"quick")
    assert store.get("gc/1.json") == b"quick"
    assert not store.settled("gc/1.json", b"quick")
    assert store.get("gc/1.json") == b"slow"


def test_two_claims_stamped_alike_become_two_incarnations() -> None:
    """Each sees only its own at first. One finds out when it has waited, and takes the next number."""
    server = OldServer()
    first: list[lineage.Claim] = []
    rival = store_on(server)

    def at_the_same_time() -> None:
        # The rival looked before our claim showed: it has incarnation 0 as well, with the same stamp.
        claim = lineage.sealed(lineage.Claim(0, "rival", 0, 0.0))
        server.objects[f"run/{lineage.claim_key(0)}~0"] = (msgspec.json.encode(claim), 100.0)
        first.append(claim)

    claimed = lineage.claim(store_on(server, meanwhile=at_the_same_time))
    assert first and claimed.incarnation == 1  # "~0" comes before every other nonce
    claims = lineage.read_claims(rival)
    assert [(each.incarnation, each.nonce) for each in claims] == [(0, "rival"), (1, claimed.nonce)]


def test_a_claim_waits_out_the_delay_on_such_a_store() -> None:
    store = store_on(OldServer())
    lineage.claim(store)
    assert store._closed.waited == 7.0  # type: ignore[attr-defined]


def test_a_lost_answer_is_no_conflict_with_oneself() -> None:
    server = OldServer()
    store = store_on(server)
    server.lose_next = True
    store.put_if_absent("versions/1.json", b"ours")
    assert store.settled("versions/1.json", b"ours")
    assert lineage.claim(store).incarnation == 0


def test_deleting_takes_all_candidates() -> None:
    server = OldServer()
    store = store_on(server)
    store.put_if_absent("checkpoints/1.json", b"x")
    server.objects["run/checkpoints/1.json~other"] = (b"y", 200.0)
    server.objects["run/checkpoints/1.jsonl"] = (b"y", 200.0)
    store.delete("checkpoints/1.json")
    assert list(server.objects) == ["run/checkpoints/1.jsonl"]
    with pytest.raises(NotFound):
        store.get("checkpoints/1.json")


def test_a_store_that_learned_conditions_later_goes_on_with_what_is_there() -> None:
    infos = [
        ObjectInfo("v/1.json", 1, 9.0),
        ObjectInfo("v/1.json~a", 2, 5.0),
        ObjectInfo("v/2.json~b", 3, 7.0),
        ObjectInfo("v/2.json~c", 4, 6.0),
        ObjectInfo("v/3", 5, 1.0),
    ]
    assert [(info.key, info.size) for info in merged(infos)] == [
        ("v/1.json", 1),
        ("v/2.json", 4),
        ("v/3", 5),
    ]
    assert [info.key for info in merged(infos, "v/1.json")] == ["v/2.json", "v/3"]
    assert first_of("v/9.json", infos) is None


@pytest.mark.parametrize(
    ("key", "plain"),
    [
        ("a/1.json~x", "a/1.json"),
        ("a/1.json", "a/1.json"),
        ("a/1.json~", "a/1.json~"),
        ("a.json~x/b", "a.json~x/b"),
        ("a~b", "a~b"),
    ],
)
def test_only_a_record_with_a_nonce_is_a_candidate(key: str, plain: str) -> None:
    assert plain_key(key) == plain
