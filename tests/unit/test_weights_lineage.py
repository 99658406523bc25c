"""Claims, manifests, and who may write which version."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import Corrupt, Fenced
from async_rl.weights import lineage
from async_rl.weights.lineage import (
    Claim,
    Manifest,
    Pack,
    TableRef,
    Verdict,
    Way,
    admissible,
    decide,
    newest_admissible,
    read_claims,
    read_manifest,
    sealed,
)
from tests.weights_support import MemoryStore, ScriptedStore


def a_claim(incarnation: int, first_version: int, nonce: str = "") -> Claim:
    return Claim(incarnation, nonce or f"n{incarnation}", first_version, 0.0)


def a_manifest(version: int, incarnation: int, **changes: Any) -> Manifest:
    packs = changes.pop("packs", (Pack(f"packs/{version}-{incarnation}", 8, "00"),))
    base = Manifest(
        version=version,
        step=version,
        incarnation=incarnation,
        nonce=f"n{incarnation}",
        parent=version - 1,
        dtype="bfloat16",
        way=Way(base=-1, packs=packs, total_bytes=8, weight_map=changes.pop("weight_map", {"a": 0})),
        digest="",
        created=0.0,
    )
    return msgspec.structs.replace(base, **changes)


def commit(store: MemoryStore, manifest: Manifest) -> None:
    store.put_if_absent(lineage.version_key(manifest.version), msgspec.json.encode(manifest))


# ---------------------------------------------------------------- which versions count


def test_a_version_written_before_the_newer_claim_counts() -> None:
    assert admissible(a_manifest(4, 1), [a_claim(1, 0), a_claim(2, 5)])


def test_a_version_of_an_old_incarnation_at_or_past_the_newer_claim_is_a_zombies() -> None:
    assert not admissible(a_manifest(5, 1), [a_claim(1, 0), a_claim(2, 5)])
    assert not admissible(a_manifest(6, 1), [a_claim(1, 0), a_claim(2, 5)])


def test_a_version_under_another_trainers_incarnation_number_does_not_count() -> None:
    assert not admissible(a_manifest(5, 2, nonce="impostor"), [a_claim(2, 5)])


def test_the_newest_is_the_greatest_version_that_counts() -> None:
    manifests = [a_manifest(4, 1), a_manifest(5, 2), a_manifest(6, 1)]
    newest = newest_admissible(manifests, [a_claim(1, 0), a_claim(2, 5)])
    assert newest is not None and newest.version == 5
    assert newest_admissible([a_manifest(6, 1)], [a_claim(2, 5)]) is None


# ---------------------------------------------------------------- a number that is taken


def test_our_own_manifest_means_that_a_retried_put_had_succeeded() -> None:
    wanted = a_manifest(5, 2)
    assert decide(a_claim(2, 5), wanted, msgspec.structs.replace(wanted, created=9.0)) is Verdict.DONE


def test_an_earlier_publish_of_ours_that_was_given_up_costs_the_number() -> None:
    found = a_manifest(5, 2, packs=(Pack("packs/other", 8, "11"),))
    assert decide(a_claim(2, 5), a_manifest(5, 2), found) is Verdict.SKIP


def test_a_zombies_number_is_skipped() -> None:
    assert decide(a_claim(2, 5), a_manifest(5, 2), a_manifest(5, 1)) is Verdict.SKIP


def test_a_newer_incarnation_fences_us() -> None:
    assert decide(a_claim(2, 5), a_manifest(6, 2), a_manifest(6, 3)) is Verdict.FENCED


@pytest.mark.parametrize(
    "found",
    [a_manifest(5, 2, nonce="impostor"), a_manifest(4, 1)],
    ids=["same incarnation", "below our first"],
)
def test_in_doubt_we_stop(found: Manifest) -> None:
    assert decide(a_claim(2, 5), a_manifest(found.version, 2), found) is Verdict.FENCED


# ---------------------------------------------------------------- claims in the store


def test_the_first_claim_begins_at_version_0() -> None:
    store = MemoryStore()
    first = lineage.claim(store)
    assert (first.incarnation, first.first_version) == (0, 0)
    assert lineage.read_claims(store) == [first]


def test_a_later_claim_begins_after_the_newest_version() -> None:
    store = MemoryStore()
    ours = lineage.claim(store)
    commit(store, a_manifest(0, 0, nonce=ours.nonce))
    commit(store, a_manifest(1, 0, nonce=ours.nonce))
    later = lineage.claim(store)
    assert (later.incarnation, later.first_version) == (1, 2)
    lineage.check_not_fenced(store, later)
    with pytest.raises(Fenced, match="incarnation 1 has taken the run"):
        lineage.check_not_fenced(store, ours)


def test_of_two_trainers_that_claim_at_once_each_gets_a_number_of_its_own() -> None:
    store = ScriptedStore(MemoryStore())
    faster: list[Claim] = []
    store.on("put_if_absent", "incarnations/", lambda: faster.append(lineage.claim(store)))
    slower = lineage.claim(store)
    assert (faster[0].incarnation, slower.incarnation) == (0, 1)


def test_a_claim_whose_answer_was_lost_is_not_made_twice() -> None:
    store = ScriptedStore(MemoryStore())
    store.on(
        "put_if_absent", "incarnations/", lambda: None, lost_answer=True
    )  # then it arrives a second time
    assert lineage.claim(store).incarnation == 0
    assert len(lineage.read_claims(store)) == 1


def test_foreign_objects_among_the_versions_are_ignored() -> None:
    store = MemoryStore()
    for key in (
        "versions/readme.txt",
        "versions/5.json",
        "versions/0000000007.json.bak",
        "versions/00000000x7.json",
    ):
        store.put(key, b"")
    commit(store, a_manifest(3, 0))
    assert lineage.list_versions(store) == [3]
    assert lineage.list_versions(store, after=3) == []


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"{}",
        msgspec.json.encode(a_manifest(8, 0)),
        msgspec.json.encode(a_manifest(7, 0, weight_map={"a": 1})),
    ],
    ids=["cut off", "empty", "another version's", "pack out of range"],
)
def test_a_broken_manifest_is_corrupt(data: bytes) -> None:
    store = MemoryStore()
    store.put("versions/0000000007.json", data)
    with pytest.raises(Corrupt, match=r"versions/0000000007\.json"):
        lineage.read_manifest(store, 7)


def test_a_manifest_of_an_older_format_is_not_taken_for_an_edited_one() -> None:
    """As format 4 wrote it: its seal does not cover a field that it did not have."""
    store = MemoryStore()
    way = (
        '{"base":-1,"packs":[{"key":"packs/a","size":8,"sha256":"HASH","table":null}],"total_bytes":8,'
        '"weight_map":{"a":0},"changed":0,"small":false}'
    )
    data = (
        '{"version":0,"step":3,"incarnation":0,"nonce":"n","parent":-1,"dtype":"bfloat16","way":WAY,'
        '"digest":"0000000000000000","created":1.5,"seal":"a8924b8a30db6203"}'
    )
    data = data.replace("WAY", way).replace("HASH", "0" * 64)
    store.put("versions/0000000000.json", data.encode())
    assert read_manifest(store, 0).step == 3
    store.put("versions/0000000000.json", data.replace('"step":3', '"step":4').encode())
    with pytest.raises(Corrupt, match="its fields differ from its seal"):
        read_manifest(store, 0)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (Way(7, (), 0), "leads from version 7 to 7"),
        (Way(-2, (), 0), "leads from version -2"),
        (Way(6, (Pack("packs/7-0", 8, "00"),), 8), "no table"),
        (Way(6, (Pack("packs/7-0", 8, "00", TableRef(4, 4, "00")),), 9), "9 bytes"),
        (Way(6, (), 0, tile_digests=b""), "a delta with digests of the tiles of a full state"),
    ],
    ids=["to itself", "from nowhere", "no table", "other size", "a delta with tiles"],
)
def test_a_way_that_contradicts_itself_is_corrupt(way: Way, said: str) -> None:
    store = MemoryStore()
    commit(store, a_manifest(7, 0, way=way))
    with pytest.raises(Corrupt, match=said):
        lineage.read_manifest(store, 7)


@given(st.lists(st.tuples(st.sampled_from(["claim", "commit"]), st.integers(0, 3)), max_size=40))
def test_whatever_zombies_do_the_versions_that_count_form_one_history(
    events: list[tuple[str, int]],
) -> None:
    """Trainers claim and commit in any order, a commit without looking first (the look only makes it
    rarer)."""
    store = MemoryStore()
    claims: list[Claim] = []
    tops: dict[int, int] = {}  # incarnation -> next number it would write
    for event, who in events:
        if event == "claim":
            claims.append(lineage.claim(store))
            tops[claims[-1].incarnation] = claims[-1].first_version
        elif claims:
            ours = claims[-1 - who % len(claims)]
            newest = ours is claims[-1]
            while True:
                wanted = a_manifest(tops[ours.incarnation], ours.incarnation, nonce=ours.nonce)
                found = store.objects.get(lineage.version_key(wanted.version))
                if found is None:
                    commit(store, wanted)
                    tops[ours.incarnation] += 1
                    assert not newest or admissible(wanted, claims)  # the owner is never ignored
                    break
                verdict = decide(ours, wanted, lineage.read_manifest(store, wanted.version))
                assert not (newest and verdict is Verdict.FENCED)  # nor stopped
                if verdict is Verdict.FENCED:
                    break
                tops[ours.incarnation] += 1
    counting = [
        m for v in lineage.list_versions(store) if admissible(m := lineage.read_manifest(store, v), claims)
    ]
    assert [m.incarnation for m in counting] == sorted(m.incarnation for m in counting)


def test_a_record_whose_fields_differ_from_its_seal_is_refused() -> None:
    store = MemoryStore()
    lineage.claim(store)
    key = lineage.claim_key(0)
    store.put(key, store.get(key).replace(b'"first_version":0', b'"first_version":8'))
    with pytest.raises(Corrupt, match="seal"):
        read_claims(store)


def test_a_manifest_whose_step_was_changed_is_refused() -> None:
    store = MemoryStore()
    data = msgspec.json.encode(sealed(a_manifest(7, 0)))
    store.put(lineage.version_key(7), data)
    assert read_manifest(store, 7) == sealed(a_manifest(7, 0))
    store.put(lineage.version_key(7), data.replace(b'"step":7', b'"step":3'))
    with pytest.raises(Corrupt, match="seal"):
        read_manifest(store, 7)
