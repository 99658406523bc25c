"""Every guard is missed: with it the named case goes well, without it the checker sees what must never happen.

Where two guards stand one behind the other, the case says which one was taken away before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from async_rl.weights import lineage
from async_rl.weights.ways import list_edges, read_way
from tests.chaos import toy
from tests.chaos.damage import flipped, region_of, swapped
from tests.chaos.forks import Forks
from tests.chaos.matrix import play_two_trainers, play_zombie
from tests.chaos.world import Trainer, World, Wrong
from tests.servers import S3Server

pytestmark = pytest.mark.slow


@pytest.fixture
def world(chaos_forks: Forks, seaweed: S3Server, tmp_path: Path) -> Iterator[World]:
    with World(seaweed, chaos_forks, tmp_path) as each:
        yield each


# ---------------------------------------------------------------- the reader


def damaged_pack_leaves_the_copy_alone(world: World, without: list[str]) -> None:
    """A bit flips in a delta's tile: nothing of it may reach the copy that the reader holds."""
    trainer = _follow(world, without)
    (version,) = trainer.publish(1)
    key = lineage.read_manifest(world.store, version).way.packs[0].key
    flipped(world.store, key, "", region_of(world.store.get(key), "tiles"))
    answer = world.ask("follow", "follower")
    if "version" in answer:
        world.check(answer, world.truth(), "the follower")
    held = world.ask("scrub", "follower")
    if held["held"] < 0 or not held["whole"]:
        raise Wrong(f"the copy was given up for a damaged pack: {held}, {answer}")


def damaged_tile_of_a_partial_reader(world: World, without: list[str]) -> None:
    """The same for a reader that needs one tensor only, and so reads no pack as a whole."""
    world.use_reader(without=without)
    trainer = world.trainer()
    trainer.publish(1)
    world.ask("follow", "partial", needs="embed.weight")
    (version,) = trainer.publish(1)
    key = lineage.read_manifest(world.store, version).way.packs[0].key
    flipped(world.store, key, "", region_of(world.store.get(key), "tiles"))
    world.ask("follow", "partial", needs="embed.weight")
    held = world.ask("scrub", "partial")
    if held["held"] < 0 or not held["whole"]:
        raise Wrong(f"the copy was given up for a damaged tile: {held}")


def damaged_full_version_of_a_partial_reader(world: World, without: list[str]) -> None:
    """A bit flips in a full version of which a reader needs, and reads, one tensor only."""
    world.use_reader(without=without)
    world.trainer().publish(1)
    world.truth()
    way = lineage.read_manifest(world.store, 0).way
    key = way.packs[way.weight_map["embed.weight"]].key
    flipped(world.store, key, "", region_of(world.store.get(key), "tiles"))
    _check_part(world, world.ask("read", "partial", version=0, needs="embed.weight"))


def part_of_the_way_of_another_version(world: World, without: list[str]) -> None:
    """Every tile is whole and right, only not this version's: who holds a part must see it too."""
    trainer = _follow(world, without)
    (version,) = trainer.publish(1)
    world.truth()
    _forge_way(world, version)
    _check_part(world, world.ask("follow", "partial", needs="embed.weight"))


def _check_part(world: World, answer: dict[str, Any]) -> None:
    """What was served, if anything, is the version's embedding, and holes."""
    if "version" not in answer:
        return
    state = world.state(answer["version"])
    held = {name: bits if name == "embed.weight" else np.zeros_like(bits) for name, bits in state.items()}
    if answer["hash"] != toy.hash_of(held):
        raise Wrong(f"WRONG BYTES were served as a part of version {answer['version']}")


def copy_damaged_under_a_living_reader(world: World, without: list[str]) -> None:
    """A bit of the held copy flips where the next delta changes it."""
    trainer = _follow(world, without)
    held = max(world.truth())
    (version,) = trainer.publish(1)
    truth = world.truth()
    before, after = world.state(held)["embed.weight"], world.state(version)["embed.weight"]
    world.flip_in_cache("follower", "embed.weight", int(np.flatnonzero(before.ravel() != after.ravel())[0]))
    answer = world.ask("follow", "follower")
    if world.check(answer, truth, "the follower") != version:
        raise Wrong(f"version {version} was not reached: {answer}")


def manifest_with_the_way_of_another_version(world: World, without: list[str]) -> None:
    """Every pack is whole and right, only not this version's."""
    trainer = _follow(world, without)
    (version,) = trainer.publish(1)
    truth = world.truth()
    _forge_way(world, version)
    answer = world.ask("follow", "joiner")
    if "version" in answer:
        world.check(answer, truth, "a joiner")


def _forge_way(world: World, version: int) -> None:
    """Its own way becomes that of an older anchor."""
    manifest = lineage.read_manifest(world.store, version)
    other = next(edge for edge in list_edges(world.store) if edge.base < 0 and edge.version < version)
    way = read_way(world.store, other).way
    forged = lineage.sealed(msgspec.structs.replace(manifest, way=way))
    world.store.put(lineage.version_key(version), msgspec.json.encode(forged))


def cache_damaged_while_nobody_looks(world: World, without: list[str]) -> None:
    """A bit of the cache folder flips between two lives of a reader."""
    trainer = _follow(world, without)
    world.ask("close", "follower")
    world.flip_in_cache("follower", "head.weight", 5)
    (version,) = trainer.publish(1)
    if world.check(world.ask("follow", "follower"), world.truth(), "after a restart") != version:
        raise Wrong("the newest version was not reached")


def killed_while_a_tile_is_applied(world: World, without: list[str]) -> None:
    """The copy is torn; the next life must know."""
    trainer = _follow(world, without)
    world.ask("close", "follower")
    (version,) = trainer.publish(1)
    reader = world.reader("apply at 0: in", watch="follower", without=without)
    reader.link.tell({"do": "follow", "cache": "follower"})
    assert {"killed": "apply at 0: in"} in reader.story(), reader.stderr()
    assert reader.wait() == -9
    if world.check(world.ask("follow", "follower"), world.truth(), "after a restart") != version:
        raise Wrong("the newest version was not reached")


def manifest_swapped_with_an_older_one(world: World, without: list[str]) -> None:
    """The reader must not go back."""
    trainer = _follow(world, without)
    held = max(world.truth())
    (version,) = trainer.publish(1)
    truth = world.truth()
    swapped(world.store, lineage.version_key(version), lineage.version_key(held - 1), 0)
    answer = world.ask("follow", "follower")
    if "version" in answer and world.check(answer, truth, "the follower") < held:
        raise Wrong(f"version {answer['version']} was served after version {held}")


def step_changed_in_a_manifest(world: World, without: list[str]) -> None:
    """The weights are right, their place in the lineage is not."""
    trainer = _follow(world, without)
    (version,) = trainer.publish(1)
    truth = world.truth()
    key = lineage.version_key(version)
    world.store.put(key, world.store.get(key).replace(b'"step":7', b'"step":6'))
    answer = world.ask("follow", "follower")
    if "version" in answer:
        world.check(answer, truth, "the follower")


def zombie_reader(world: World, without: list[str]) -> None:
    play_zombie(world, reader_without=without)


# ---------------------------------------------------------------- the trainer


def killed_after_the_manifest(world: World, without: list[str]) -> None:
    """What has a manifest can be read."""
    _follow(world, [])
    trainer = world.live([{"do": "publish", "count": 2}], "PUT versions/+1.json: after", without=without)
    assert trainer.was_killed(), trainer.child.stderr()
    world.check_newest("killed after the manifest")


def version_given_up(world: World, without: list[str]) -> None:
    """The store takes the packs and refuses the manifest, until the version is given up: the next one carries both
    changes."""
    limits = {"retry_limit_s": 2.0}
    trainer = world.trainer(without=without, config={"publish_limit_s": 0.05}, store=limits)
    trainer.publish(2)
    world.check_newest("before")
    trainer.child.link.tell({"do": "lose", "refused": "PUT versions/"})
    while (message := trainer.hear()) is not None and "lost" not in message:
        pass
    assert message is not None, trainer.child.stderr()
    trainer.publish(1)
    world.check_newest("after a version was given up")


def stopped_before_the_manifest(world: World, without: list[str]) -> None:
    play_two_trainers(world, "PUT versions/+2.json: before", without=without)


def zombie_trainer(world: World, without: list[str]) -> None:
    play_zombie(world, without=without)


def collected_garbage(world: World, without: list[str]) -> None:
    """Whatever is deleted, the newest versions can be read from nothing."""
    trainer = world.trainer(without=without, config={"anchor_every": 1000})
    trainer.publish(6)
    for _ in range(2):
        trainer.child.link.tell({"do": "gc"})
    trainer.publish(1)
    world.check_newest("after garbage collection")


# ---------------------------------------------------------------- ranks


def packs_of_one_rank_refused(world: World, without: list[str]) -> None:
    """The store takes no packs of rank 1, until the version is given up: the next one carries both changes."""
    _given_up_by_ranks(world, without, ("PUT versions/no", "PUT packs/"))


def manifest_of_two_ranks_refused(world: World, without: list[str]) -> None:
    """All packs are whole, but the version is given up: no rank may go on from it."""
    _given_up_by_ranks(world, without, ("PUT versions/", "PUT versions/"))


def _given_up_by_ranks(world: World, without: list[str], refused: tuple[str, str]) -> None:
    """`refused`: the requests of each rank that meet no server."""
    options = {
        "without": without,
        "config": {"publish_limit_s": 0.05},
        "store": {"retry_limit_s": 2.0},
    }
    ranks = world.crew(options=(options, options))
    _together(ranks, {"do": "publish", "count": 2})
    for each, refusal in zip(ranks, refused, strict=True):
        each.child.link.tell({"do": "lose", "refused": refusal})
    _together(ranks, {"do": "publish"})
    for each in ranks:
        each.tell_all([])
        each.listen()
        if each.error:
            raise Wrong(f"a rank could not go on: {each.error}")
    if world.check_newest("after a version was given up") < 3:
        raise Wrong("the next version was not reached")


def _together(ranks: list[Trainer], order: dict[str, Any]) -> None:
    for each in ranks:
        each.child.link.tell(order)


def one_rank_killed(world: World, without: list[str]) -> None:
    """The other one ends by itself, and says why."""
    ranks = world.crew(("", "gather versions #2: before"), ({"without": without}, {"without": without}))
    for each in ranks:
        each.tell_all([{"do": "publish", "count": 2}])
        each.listen()
    assert ranks[1].was_killed(), ranks[1].child.stderr()
    if "RankLost" not in ranks[0].error or ranks[0].child.wait() != 0:
        raise Wrong(f"the other rank says: {ranks[0].error or ranks[0].child.stderr()}")


class Guard(NamedTuple):
    name: str
    case: Callable[[World, list[str]], None]
    first: tuple[str, ...] = ()  # taken away in both plays


GUARDS = [
    Guard("hash of a pack", damaged_pack_leaves_the_copy_alone),
    Guard("hash of a tile", damaged_tile_of_a_partial_reader),
    Guard("digest of a full tile", damaged_full_version_of_a_partial_reader),
    Guard("effect of a tile", copy_damaged_under_a_living_reader),
    Guard("digest of the state", manifest_with_the_way_of_another_version),
    Guard("digest of the state", part_of_the_way_of_another_version),
    Guard("rehash of the cache", cache_damaged_while_nobody_looks),
    Guard(
        "mark of a torn shadow", killed_while_a_tile_is_applied, ("rehash of the cache", "effect of a tile")
    ),
    Guard("number in a manifest", manifest_swapped_with_an_older_one),
    Guard("seal", step_changed_in_a_manifest),
    Guard("claims", zombie_reader),
    Guard("packs before the manifest", killed_after_the_manifest),
    Guard("promotion after the commit", version_given_up),
    Guard("conditional put", stopped_before_the_manifest),
    Guard("fence", zombie_trainer),
    Guard("kept paths", collected_garbage),
    Guard("everybody's packs", packs_of_one_rank_refused),
    Guard("word of rank 0", manifest_of_two_ranks_refused),
    Guard("word of a lost rank", one_rank_killed),
]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_guard_is_missed(
    guard: Guard, world: World, chaos_forks: Forks, seaweed: S3Server, tmp_path: Path
) -> None:
    guard.case(world, [*guard.first])

    (tmp_path / "without").mkdir()
    with World(seaweed, chaos_forks, tmp_path / "without") as unguarded, pytest.raises(Wrong):
        guard.case(unguarded, [*guard.first, guard.name])


def _follow(world: World, without: list[str]) -> Trainer:
    """A trainer with some versions, and a reader that holds the newest."""
    world.use_reader(without=without)
    trainer = world.trainer()
    trainer.publish(6)
    world.check_newest("before")
    return trainer
