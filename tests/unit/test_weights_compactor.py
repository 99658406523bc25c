"""Skip deltas say exactly what the deltas between their ends say, and are made whenever they are due."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from async_rl.errors import Corrupt, StoreUnavailable
from async_rl.weights.compactor import Compactor, Skip, branch, cheapest_source, skips_wanted
from async_rl.weights.config import WeightsConfig
from async_rl.weights.garbage import Tombstone
from async_rl.weights.gc import tombstone_key
from async_rl.weights.layers import Piece, aligned, net_steps, open_layer, recode
from async_rl.weights.lineage import Manifest
from async_rl.weights.plan import NOTHING, Hop
from async_rl.weights.replay import FlatState
from async_rl.weights.ways import Edge, list_edges, read_way
from tests.weights_support import History, ScriptedStore, raises

CONFIG = WeightsConfig(skip_spans=(4, 16), delta_pack_bytes=1 << 20)
SHAPES = {"embed.weight": (60, 20), "layer.weight": (33, 9), "norm.weight": (7,)}


def run_of(tmp_path, versions: int = 17, part: float = 0.05, **fields: object) -> History:
    history = History(tmp_path, shapes=SHAPES, **fields)
    history.full(history.random())
    for number in range(1, versions):
        history.delta(history.changed(part, seed=number))
    return history


def compactor(history: History, tmp_path, config: WeightsConfig = CONFIG, **fields: object) -> Compactor:
    return Compactor(history.store, history.run, config, tmp_path / "scratch", **fields)


def state_at(history: History, tmp_path, version: int) -> FlatState:
    """The written state as a FlatState: what the manifest's own way says."""
    state = FlatState(history.store, history.run, tmp_path / f"state-{version}")
    parts = [history.states[version][spec.name].reshape(-1) for spec in history.run.tensors]
    state.values[:] = np.concatenate(parts)
    state.digest, state.version = int(history.manifests[version].digest, 16), version
    return state


def check_edge(history: History, tmp_path, edge: Edge) -> None:
    """The edge's packs turn the state at its base into the state at its version, bit for bit."""
    state = state_at(history, tmp_path, edge.base)
    way = read_way(history.store, edge).way
    state.go(Hop(edge.version, way, edge.key))
    state.check_digest(history.manifests[edge.version], edge.key)
    assert np.array_equal(state.values, state_at(history, tmp_path, edge.version).values)


# ---------------------------------------------------------------- what is wanted


def test_skips_lie_between_multiples_of_their_span():
    wanted = skips_wanted(range(18), (4, 16))
    assert wanted == [Skip(4, 0, 4), Skip(4, 4, 8), Skip(4, 8, 12), Skip(4, 12, 16), Skip(16, 0, 16)]


def test_a_chain_that_begins_in_the_middle_has_no_skip_to_before_it():
    assert skips_wanted(range(5, 18), (4, 16)) == [Skip(4, 8, 12), Skip(4, 12, 16)]


def test_numbers_that_the_chain_left_out_are_replaced_by_the_nearest_older_one():
    # A resume went on from 40 as version 57.
    chain = [*range(36, 41), *range(57, 66)]
    assert skips_wanted(chain, (4, 16)) == [
        Skip(4, 36, 40),
        Skip(4, 40, 60),
        Skip(4, 60, 64),
        Skip(16, 40, 64),
    ]


def test_only_skips_to_later_multiples_are_wanted():
    assert skips_wanted(range(18), (4, 16), after=12) == [Skip(4, 12, 16), Skip(16, 0, 16)]
    assert skips_wanted([0, 56, 57, 61], (4,), after=57) == [Skip(4, 56, 57)], "60 was not due at 57"


def test_a_zombies_versions_are_not_on_the_branch(tmp_path):
    history = run_of(tmp_path, 4)
    manifests = dict(history.manifests)
    manifests[4] = msgspec.structs.replace(manifests[3], version=4, parent=1)
    assert branch(manifests, 4) == [0, 1, 4]
    assert branch(manifests, 3) == [0, 1, 2, 3]
    assert branch(manifests, 9) == []


def test_parents_in_a_circle_end_the_branch(tmp_path):
    history = run_of(tmp_path, 3)
    manifests: dict[int, Manifest] = dict(history.manifests)
    manifests[1] = msgspec.structs.replace(manifests[1], parent=2)
    assert branch(manifests, 2) == [1, 2]


def test_a_skip_is_made_from_the_cheapest_deltas():
    ways = {(0, 1): 10, (1, 2): 10, (2, 3): 10, (3, 4): 10, (0, 3): 12, (0, 4): 1, (2, 4): 25}
    assert cheapest_source(ways, Skip(4, 0, 4), range(6)) == [(0, 3), (3, 4)]
    assert cheapest_source({(0, 1): 1, (2, 4): 1}, Skip(4, 0, 4), range(6)) is None


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize("fields", [{}, {"tile": 100}, {"tile": 64, "pack_tiles": 3}], ids=str)
@pytest.mark.parametrize("small", [False, True], ids=["default", "small"])
def test_every_skip_leads_to_the_same_bits_as_the_deltas_it_replaces(tmp_path, fields, small):
    history = run_of(tmp_path, small=small, **fields)
    written = compactor(history, tmp_path).run()
    assert [(w.span, w.base, w.version) for w in written] == list(skips_wanted(range(17), (4, 16)))
    assert all(w.kept and w.nbytes < w.replaces for w in written)
    edges = list(list_edges(history.store))
    assert {(edge.base, edge.version) for edge in edges} == {(w.base, w.version) for w in written}
    for edge in edges:
        check_edge(history, tmp_path, edge)


def test_deltas_cut_at_different_places_compose(tmp_path):
    """As after a resume with another number of ranks: no two versions cut the tensors alike."""
    history = run_of(tmp_path, 1)
    for number, tile in enumerate((50, 1 << 20, 77, 333), start=1):
        history.tile = tile
        history.delta(history.changed(0.1, seed=number))
    compactor(history, tmp_path).run()
    (edge,) = list_edges(history.store)
    check_edge(history, tmp_path, edge)


def test_overlapping_tiles_become_one_and_others_stay_apart(tmp_path):
    history = run_of(tmp_path, 1)
    for tile in (40, 60):
        history.tile = tile
        history.delta(history.changed(1.0, seed=tile))
    layers = [
        open_layer(history.store, history.run, history.manifests[v].way, tmp_path / "packs", CONFIG)
        for v in (1, 2)
    ]
    spans = [span for span in aligned(layers) if span.tensor == 0]
    assert [(span.start, span.elements) for span in spans] == [(n, 120) for n in range(0, 1200, 120)]
    assert [len(pieces) for pieces in spans[0].layers] == [3, 2]


def test_changes_that_are_taken_back_leave_nothing(tmp_path):
    history = run_of(tmp_path, 2)
    history.delta(history.states[0])
    history.delta(history.changed(0.05, seed=7))
    history.delta(history.states[0])
    (written,) = compactor(history, tmp_path).run()
    assert written.nbytes == 0
    (edge,) = list_edges(history.store)
    check_edge(history, tmp_path, edge)


def test_tiles_that_cancel_out_must_not_move_the_digest(tmp_path):
    history = run_of(tmp_path, 2)
    history.delta(history.states[0])
    layers = [
        open_layer(history.store, history.run, history.manifests[v].way, tmp_path / "packs", CONFIG)
        for v in (1, 2)
    ]
    span = next(iter(aligned(layers)))
    assert recode(span) is None
    ((piece,), later) = span.layers
    wrong = Piece(piece.tile._replace(moved=piece.tile.moved ^ 1), piece.data)
    with pytest.raises(Corrupt, match="cancel out"):
        recode(span._replace(layers=((wrong,), later)))


def test_empty_deltas_compose(tmp_path):
    history = run_of(tmp_path, 1)
    for _ in range(4):
        history.delta(history.states[0])
    (written,) = compactor(history, tmp_path).run()
    assert written.kept
    assert written.nbytes == 0


def test_packs_are_filled_to_about_the_size_that_is_set(tmp_path):
    history = run_of(tmp_path, 5, tile=50)
    config = msgspec.structs.replace(CONFIG, delta_pack_bytes=60)
    compactor(history, tmp_path, config).run()
    (edge,) = list_edges(history.store)
    packs = read_way(history.store, edge).way.packs
    assert len(packs) > 2
    assert len({pack.key for pack in packs}) == len(packs)
    assert all(pack.key.startswith("packs/0000000004-00000000-skip4-") for pack in packs)
    assert all(pack.key.endswith(pack.sha256[:12]) for pack in packs), "no two contents under one name"
    check_edge(history, tmp_path, edge)


def test_a_skip_that_saves_nothing_is_not_written(tmp_path):
    history = History(tmp_path, shapes={"embed.weight": (4000, 8)})
    history.full(history.random())
    for number in range(1, 5):  # every version changes other rows: nothing to merge
        state = {name: bits.copy() for name, bits in history.states[history.newest].items()}
        rows = slice(1000 * (number - 1), 1000 * number)
        state["embed.weight"][rows] = history.random(number)["embed.weight"][rows]
        history.delta(state)
    made = compactor(history, tmp_path)
    (written,) = made.run()
    assert not written.kept
    assert written.error == ""
    assert not list(list_edges(history.store))
    assert not [info for info in history.store.list_after("packs/") if "skip" in info.key]
    assert made.run() == [], "it is not tried again"


def test_a_second_compactor_finds_nothing_to_do(tmp_path):
    history = run_of(tmp_path)
    compactor(history, tmp_path).run()
    before = dict(history.store.objects)
    assert compactor(history, tmp_path).run() == []
    assert history.store.objects == before


def test_compactors_side_by_side_do_no_harm(tmp_path):
    """Another one makes everything while the first is about to upload its first pack."""
    history = run_of(tmp_path)
    store = ScriptedStore(history.store)
    other = Compactor(history.store, history.run, CONFIG, tmp_path / "other")
    store.on("upload", "packs/", other.run)
    Compactor(store, history.run, CONFIG, tmp_path / "scratch").run()
    for edge in list_edges(history.store):
        check_edge(history, tmp_path, edge)


def test_packs_stand_before_the_record_that_names_them(tmp_path):
    history = run_of(tmp_path, 5)
    store = ScriptedStore(history.store)
    store.on("put", "ways/", raises(StoreUnavailable("away")))
    made = Compactor(store, history.run, CONFIG, tmp_path / "scratch")
    with pytest.raises(StoreUnavailable):
        made.run()
    assert not list(list_edges(history.store))
    assert [info for info in history.store.list_after("packs/") if "skip" in info.key]
    assert [w.kept for w in made.run()] == [True]


def test_a_damaged_source_is_named_and_the_other_skips_are_made(tmp_path):
    history = run_of(tmp_path, 9)
    key = history.manifests[2].way.packs[0].key
    data = bytearray(history.store.get(key))
    data[len(data) // 2] ^= 1
    history.store.put(key, bytes(data))
    first, second = compactor(history, tmp_path).run()
    assert key in first.error
    assert second.kept
    assert {(edge.base, edge.version) for edge in list_edges(history.store)} == {(4, 8)}


def test_sources_that_do_not_lead_to_the_versions_digest_are_refused(tmp_path):
    history = run_of(tmp_path, 4)
    history.delta(history.changed(0.05, seed=4), digest="0" * 16)
    (written,) = compactor(history, tmp_path).run()
    assert "digest" in written.error
    assert not list(list_edges(history.store))


def test_skips_do_not_cross_a_full_version(tmp_path):
    history = run_of(tmp_path, 3)
    history.full(history.random(9))
    for number in range(4, 9):
        history.delta(history.changed(0.05, seed=number))
    assert [(w.base, w.version) for w in compactor(history, tmp_path).run()] == [(4, 8)]


def test_a_zombies_version_gets_no_skip(tmp_path):
    history = run_of(tmp_path, 8)
    stolen = history._delta_way(history.states[7], history.states[6], 7, 8, "0")
    history.commit(history.states[6], lambda _: stolen, version=8, nonce="somebody else's")
    written = compactor(history, tmp_path).run()
    assert [(w.base, w.version) for w in written] == [(0, 4)]


def test_what_was_given_up_as_garbage_is_not_made_again(tmp_path):
    """Its sources are all there; a tombstone says that nobody needs it."""
    history = run_of(tmp_path, 9)
    tombstone = Tombstone(0, edges=((0, 4),))
    history.store.put(tombstone_key(0), msgspec.json.encode(tombstone))
    assert [(w.base, w.version) for w in compactor(history, tmp_path).run()] == [(4, 8)]


def test_a_stop_is_heard_between_tiles_and_leaves_no_record(tmp_path):
    history = run_of(tmp_path, 9, tile=50)
    done: list[int] = []
    made = compactor(
        history,
        tmp_path,
        stopping=lambda: len(done) >= 3,
        report=lambda skip, so_far, of: done.append(so_far),
    )
    assert made.run() == []
    assert done == [1, 2, 3]
    assert not list(list_edges(history.store))


def test_the_store_is_not_asked_when_no_skip_can_be_due(tmp_path):
    history = run_of(tmp_path, 8)
    store = ScriptedStore(history.store)
    made = Compactor(store, history.run, CONFIG, tmp_path / "scratch")
    assert made.run(after=4, newest=history.manifests[7]) == []
    assert store.calls == []


def test_scratch_is_empty_afterwards(tmp_path):
    history = run_of(tmp_path, 9)
    compactor(history, tmp_path).run()
    assert list((tmp_path / "scratch").iterdir()) == []


# ---------------------------------------------------------------- replay


def test_the_state_is_put_together_from_nothing_and_moved_on(tmp_path):
    history = run_of(tmp_path, 9)
    compactor(history, tmp_path).run()
    state = FlatState(history.store, history.run, tmp_path / "state")
    assert state.go_to(history.manifests[3]).start == NOTHING
    assert np.array_equal(state.values, state_at(history, tmp_path, 3).values)
    assert state.go_to(history.manifests[8]).start == 3
    assert np.array_equal(state.values, state_at(history, tmp_path, 8).values)


def test_a_state_with_another_digest_than_the_manifests_is_refused(tmp_path):
    history = run_of(tmp_path, 2)
    history.delta(history.changed(0.05, seed=3), digest="0" * 16)
    state = FlatState(history.store, history.run, tmp_path / "state")
    with pytest.raises(Corrupt, match="digest"):
        state.go_to(history.manifests[2])
    assert state.version == NOTHING


def test_net_steps_are_those_between_the_ends(tmp_path):
    history = run_of(tmp_path, 4, tile=111)
    layers = [
        open_layer(history.store, history.run, history.manifests[v].way, tmp_path / "packs", CONFIG)
        for v in (1, 2, 3)
    ]
    changed = sum(len(net_steps(span)[0]) for span in aligned(layers))
    first, last = history.states[0], history.states[3]
    assert changed == sum(int((first[name] != last[name]).sum()) for name in first)
    assert changed < math.fsum(layer.changed for layer in layers) + 1
