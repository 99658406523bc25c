"""Who may write which version, and which versions count: claims, manifests and the rules between them.

    incarnations/00000003.json   Claim      one life of a trainer, and the first version it may write
    versions/0000000042.json     Manifest   its existence *is* version 42

Both are created with put_if_absent and never changed. A trainer starts by claiming the next incarnation;
from then on older trainers are zombies. One may still be running (a partition, a scheduler that restarted
too early), so every writer looks for newer claims around its commit, and every reader ignores what a zombie
wrote:

    a manifest of incarnation i counts unless a claim of a newer incarnation begins at or before its version

Readers list the versions first and the claims after: a claim older than a zombie's commit is then always
seen. The rules are pure functions; the few lines that touch the store stand below them.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from async_rl.errors import AlreadyExists, Corrupt, Fenced, NotFound, WeightsError
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore

__all__ = [
    "NOTHING",
    "VERSIONS",
    "Claim",
    "Manifest",
    "Pack",
    "TableRef",
    "Verdict",
    "Way",
    "admissible",
    "check_not_fenced",
    "check_way",
    "claim",
    "decide",
    "fenced",
    "first_version",
    "list_versions",
    "newest_admissible",
    "read_claims",
    "read_manifest",
    "sealed",
    "version_key",
    "wanted_version",
]

log = get_logger(__name__)

INCARNATIONS = "incarnations/"
VERSIONS = "versions/"

NOTHING = -1
"""In the place of a version: what a full way begins with, and what a reader holds that holds none."""

_CLAIM_TRIES = 100  # each lost race means that somebody else claimed: a hundred in a row is a restart loop

Count = Annotated[int, Meta(ge=0)]
Record = TypeVar("Record", bound=Struct)
SealedRecord = TypeVar("SealedRecord", "Claim", "Manifest")


class Claim(Struct, frozen=True):
    incarnation: Count
    nonce: str  # tells our own retried put from another trainer's
    first_version: Count  # what this incarnation may write starts here
    created: float  # seconds since the epoch, by the trainer's clock: for people, never compared
    seal: str = ""  # see `sealed`


class TableRef(Struct, frozen=True):
    """Where a delta pack's table of tiles stands."""

    start: Count  # byte in the object
    size: Count  # bytes
    sha256: str


class Pack(Struct, frozen=True):
    """One immutable safetensors object."""

    key: str
    size: Count  # bytes
    sha256: str
    table: TableRef | None = None  # of delta packs


class Way(Struct, frozen=True):
    """How to get the state of a version: from that of `base`, or from nothing."""

    base: int  # the version a delta changes; NOTHING: full
    packs: tuple[Pack, ...]
    total_bytes: Count  # of the packs
    weight_map: dict[str, Count] = {}  # full: tensor name -> index into packs
    changed: Count = 0  # delta: weights that it changes
    small: bool = False  # delta: some tiles can't be read without the base's weights (codec.Mode.SMALL)
    tile_digests: bytes | UnsetType = UNSET  # full: see full_tiles.py; unset in runs of formats before 5

    @property
    def kind(self) -> str:
        return "full" if self.base < 0 else "delta"


class Manifest(Struct, frozen=True):
    """One policy version. All of its tensors have `dtype`; their names and shapes stand in run.json."""

    version: Count
    step: Count  # optimizer steps done
    incarnation: Count
    nonce: str  # of the claim
    parent: int  # the version this one followed on its branch, -1 for the first
    dtype: Literal["bfloat16", "float16"]
    way: Way  # the one it was published with; ways.py has the others
    digest: str  # of the whole state: codec/digest.py, 16 hex digits
    created: float
    seal: str = ""  # see `sealed`


class Verdict(Enum):
    """What a writer does when the number it wanted is taken."""

    DONE = "our own retried put had succeeded"
    SKIP = "the number is lost, take the next"
    FENCED = "a newer trainer owns the run"


# ---------------------------------------------------------------- rules


def admissible(manifest: Manifest, claims: Iterable[Claim]) -> bool:
    """Whether a manifest counts: false for a zombie's, and for one whose claim is somebody else's."""
    for each in claims:
        if each.incarnation > manifest.incarnation and each.first_version <= manifest.version:
            return False
        if each.incarnation == manifest.incarnation and each.nonce != manifest.nonce:
            return False
    return True


def newest_admissible(manifests: Iterable[Manifest], claims: Sequence[Claim]) -> Manifest | None:
    counting = (manifest for manifest in manifests if admissible(manifest, claims))
    return max(counting, key=lambda manifest: manifest.version, default=None)


def decide(ours: Claim, wanted: Manifest, found: Manifest) -> Verdict:
    """`wanted` met `found` under its own key. See architecture.md, 'Fencing'."""
    if found.nonce == ours.nonce:
        # Other packs under our nonce: an earlier publish of ours, given up, whose put had succeeded after
        # all.
        return Verdict.DONE if found.way == wanted.way else Verdict.SKIP
    if found.incarnation < ours.incarnation and found.version >= ours.first_version:
        return Verdict.SKIP
    # Also our own incarnation under another nonce (a store that doesn't enforce conditional puts let two
    # claim it) and a number below our first version, which was never ours to write: in doubt, the one who
    # stops is us.
    return Verdict.FENCED


def sealed(record: SealedRecord) -> SealedRecord:
    """With a hash of its other fields. The weights have digests and hashes of their own; a bit that flips in a step
    (lag is counted by it) or in a claim would go unnoticed without it."""
    return msgspec.structs.replace(record, seal=_seal_of(record))


def _seal_of(record: Claim | Manifest) -> str:
    plain = msgspec.structs.replace(record, seal="")
    return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()[:16]


# ---------------------------------------------------------------- in the store


def version_key(version: int) -> str:
    return f"{VERSIONS}{version:010}.json"


def claim_key(incarnation: int) -> str:
    return f"{INCARNATIONS}{incarnation:08}.json"


def claim(store: ObjectStore) -> Claim:
    """Become the run's newest incarnation: from now on, older trainers are fenced. Two that start at once
    both succeed, one after the other; the later one goes on. Waits for: `store.settled`."""
    nonce = uuid.uuid4().hex
    for _ in range(_CLAIM_TRIES):
        newest = max(_numbers(store, INCARNATIONS, -1), default=-1)
        first = max(_numbers(store, VERSIONS, -1), default=-1) + 1
        ours = sealed(Claim(newest + 1, nonce, first, time.time()))
        key, data = claim_key(ours.incarnation), msgspec.json.encode(ours)
        try:
            store.put_if_absent(key, data)
        except AlreadyExists:
            if _read_claim(store, ours.incarnation).nonce != nonce:
                continue
        if not store.settled(key, data):  # somebody else's came first, and showed only now
            continue
        log.info("incarnation claimed", incarnation=ours.incarnation, first_version=ours.first_version)
        return ours
    raise WeightsError(
        f"no incarnation of {store.url} could be claimed: others were faster {_CLAIM_TRIES} times",
        hint="look for trainers of this run that restart in a loop",
    )


def check_not_fenced(store: ObjectStore, ours: Claim) -> None:
    """Raises Fenced if a newer incarnation exists."""
    newer = max(_numbers(store, INCARNATIONS, ours.incarnation), default=-1)
    if newer > ours.incarnation:
        raise fenced(store, ours, newer)


def fenced(store: ObjectStore, ours: Claim, newer: int) -> Fenced:
    return Fenced(
        f"trainer incarnation {newer} has taken the run {store.url}: this one, incarnation "
        f"{ours.incarnation}, may publish no more",
        hint="only one trainer can own a run: let the newer one go on, or stop it and start this one again",
    )


def read_claims(store: ObjectStore, after: int = -1) -> list[Claim]:
    """Claims of incarnations newer than `after`, oldest first."""
    return [_read_claim(store, number) for number in _numbers(store, INCARNATIONS, after)]


def _read_claim(store: ObjectStore, incarnation: int) -> Claim:
    key = claim_key(incarnation)
    found = _read(store, key, Claim)
    if found.incarnation != incarnation:  # then a zombie's versions might count
        raise Corrupt(
            f"{key} in {store.url} says it is incarnation {found.incarnation}",
            hint="restore the object: while it is wrong, nobody can tell which versions count",
        )
    return found


def list_versions(store: ObjectStore, after: int = -1) -> list[int]:
    """Numbers with a manifest, ascending; some may be a zombie's."""
    return list(_numbers(store, VERSIONS, after))


def first_version(store: ObjectStore) -> int | None:
    """The oldest number with a manifest; one list request."""
    return next(_numbers(store, VERSIONS, -1), None)


def read_manifest(store: ObjectStore, version: int) -> Manifest:
    """Raises NotFound, Corrupt."""
    key = version_key(version)
    manifest = _read(store, key, Manifest)
    if manifest.version != version:
        raise Corrupt(f"{key} in {store.url} says it is version {manifest.version}")
    check_way(manifest.way, version, f"{key} in {store.url}")
    return manifest


def wanted_version(store: ObjectStore, version: int | None) -> Manifest:
    """The manifest of `version`, or of the newest that counts (None). Raises WeightsError, Corrupt, StoreErrors."""
    if version is None:
        numbers = list_versions(store)
        claims = read_claims(store)  # after the versions, see above
        for number in reversed(numbers):
            manifest = read_manifest(store, number)
            if admissible(manifest, claims):
                return manifest
        raise WeightsError(f"the run {store.url} has no version yet", hint="wait for its trainer's first")
    try:
        manifest = read_manifest(store, version)
    except NotFound as error:
        numbers = list_versions(store)
        there = f"it has {numbers[0]} to {numbers[-1]}" if numbers else "it has none yet"
        raise WeightsError(f"the run {store.url} has no version {version}", hint=there) from error
    if not admissible(manifest, read_claims(store)):
        raise WeightsError(
            f"version {version} does not count: trainer incarnation {manifest.incarnation} wrote it "
            "when a newer one already owned the run",
            hint="choose another version",
        )
    return manifest


def check_way(way: Way, version: int, what: str) -> None:
    """Raises Corrupt, naming `what`, for a way that contradicts itself."""
    if any(index >= len(way.packs) for index in way.weight_map.values()):
        raise Corrupt(f"{what} places tensors in packs it does not list")
    if way.base < -1 or way.base >= version:
        raise Corrupt(f"{what} leads from version {way.base} to {version}")
    if way.base >= 0 and any(pack.table is None for pack in way.packs):
        raise Corrupt(f"{what} is a delta with a pack that has no table")
    if way.base >= 0 and way.tile_digests is not UNSET:
        raise Corrupt(f"{what} is a delta with digests of the tiles of a full state")
    if sum(pack.size for pack in way.packs) != way.total_bytes:
        raise Corrupt(f"{what} gives {way.total_bytes} bytes for packs of another size")


def _numbers(store: ObjectStore, prefix: str, after: int) -> Iterator[int]:
    """The numbers in keys like `versions/0000000042.json`, ascending; anything else under the prefix is
    ignored."""
    digits = 8 if prefix == INCARNATIONS else 10
    start = f"{prefix}{after:0{digits}}.json" if after >= 0 else ""
    for info in store.list_after(prefix, start):
        stem, dot, suffix = info.key.removeprefix(prefix).partition(".")
        if len(stem) == digits and stem.isdecimal() and dot + suffix == ".json":
            yield int(stem)


def _read(store: ObjectStore, key: str, kind: type[Record]) -> Record:
    data = store.get(key)
    try:
        record = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Corrupt(f"{key} in {store.url} is not a valid {kind.__name__.lower()}: {error}") from error
    if isinstance(record, Claim | Manifest) and record.seal not in ("", _seal_of(record)):
        raise Corrupt(
            f"{key} in {store.url} is not what was written: its fields differ from its seal",
            hint="the object was damaged or edited; `async-rl weights verify` tells what else is",
        )
    return record
