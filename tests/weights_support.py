"""What the tests of async_rl.weights share: a store that misbehaves on cue, a small model folder, a small
trainer."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from async_rl.errors import AlreadyExists, NotFound
from async_rl.store.base import Capabilities, ObjectInfo, ObjectStore, Upload
from async_rl.weights import full_tiles, lineage
from async_rl.weights.codec import TILE, Mode, digest_of, encode_tile
from async_rl.weights.deltas import DeltaPackWriter
from async_rl.weights.lineage import Claim, Manifest, Pack, Way
from async_rl.weights.packs import plan_packs
from async_rl.weights.run import RunInfo, ensure_run
from async_rl.weights.ways import FurtherWay, write_way


class MemoryStore:
    """Objects in a dict."""

    url = "memory://tests"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.times: dict[str, float] = {}
        self.now = 0.0  # the store's clock: what is written from now on has this time

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.objects[key] = bytes(data)
        self.times[key] = self.now

    def put_if_absent(self, key: str, data: bytes | memoryview) -> None:
        if self.objects.setdefault(key, data := bytes(data)) is not data:
            raise AlreadyExists(f"{key} exists")
        self.times[key] = self.now

    def settled(self, key: str, data: bytes | memoryview) -> bool:
        return True

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if key not in self.objects:
            raise NotFound(f"{key} does not exist")
        return self.objects[key][start : None if length is None else start + length]

    def stream(self, key: str, start: int, length: int) -> Iterator[bytes]:
        yield self.get(key, start, length)

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self.get(key)), self.times.get(key, 0.0))

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        for key in sorted(key for key in list(self.objects) if key.startswith(prefix) and key > after):
            yield self.head(key)

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def upload(self, key: str) -> Upload:
        return _MemoryUpload(self, key)

    def probe(self) -> Capabilities:
        return Capabilities(conditional_put=True)

    def close(self) -> None:
        pass


class _MemoryUpload:
    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store, self._key, self._data = store, key, bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._data += data

    def commit(self) -> None:
        self._store.put(self._key, bytes(self._data))

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class ScriptedStore:
    """Another store, with cues: `store.on("put_if_absent", "versions/", action)` runs `action` before the
    next such operation; what it raises the caller sees, and bytes that it returns are the answer. With
    `lost_answer` the operation is carried out before the action too: a retry after an answer that never
    came."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.calls: list[tuple[str, str]] = []
        self._cues: list[list[Any]] = []

    @property
    def url(self) -> str:
        return self.inner.url

    def on(
        self,
        operation: str,
        prefix: str,
        action: Callable[[], object],
        *,
        times: int = 1,
        lost_answer: bool = False,
    ) -> None:
        self._cues.append([operation, prefix, action, times, lost_answer])

    def _run(self, operation: str, key: str, perform: Callable[[], Any]) -> Any:
        self.calls.append((operation, key))
        for cue in self._cues:
            if cue[0] == operation and key.startswith(cue[1]) and cue[3] > 0:
                cue[3] -= 1
                if cue[4]:
                    perform()
                answer = cue[2]()
                if isinstance(answer, bytes):
                    return answer
        return perform()

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._run("put", key, lambda: self.inner.put(key, data))

    def put_if_absent(self, key: str, data: bytes | memoryview) -> None:
        self._run("put_if_absent", key, lambda: self.inner.put_if_absent(key, data))

    def settled(self, key: str, data: bytes | memoryview) -> bool:
        return self.inner.settled(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data: bytes = self._run("get", key, lambda: self.inner.get(key, start, length))
        return data

    def stream(self, key: str, start: int, length: int) -> Iterator[bytes]:
        """In one block, as a `get`: so that cues need to know nothing else."""
        yield self.get(key, start, length)

    def head(self, key: str) -> ObjectInfo:
        return self.inner.head(key)

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        found: list[ObjectInfo] = self._run(
            "list_after", prefix, lambda: list(self.inner.list_after(prefix, after))
        )
        return iter(found)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def upload(self, key: str) -> Upload:
        upload: Upload = self._run("upload", key, lambda: self.inner.upload(key))
        return upload

    def probe(self) -> Capabilities:
        return self.inner.probe()

    def close(self) -> None:
        self.inner.close()


def raises(error: BaseException) -> Callable[[], object]:
    def action() -> object:
        raise error

    return action


SHAPES = {"embed.weight": (9, 4), "layer.weight": (4, 6), "layer.bias": (5,), "norm.weight": (4,)}
"""Of a model that isn't one: enough for tables, packs and hashes."""


def write_model_dir(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "model_type": "toy",
        "vocab_size": 9,
        "hidden_size": 4,
        "tie_word_embeddings": True,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text('{"model": "characters"}')
    (folder / "model.safetensors").write_bytes(b"weights are not copied")
    return folder


def shapes(**changed: tuple[int, ...]) -> dict[str, Any]:
    """Something with the tensors' shapes, by name; `_` stands for the dots of a changed name."""
    table = {**SHAPES, **{name.replace("_", "."): shape for name, shape in changed.items()}}
    return {name: np.broadcast_to(np.int8(0), shape) for name, shape in table.items()}


State = dict[str, np.ndarray]
"""Tensor name -> its bits, uint16, in the tensor's shape."""


class History:
    """A run whose versions are written by hand, from states: no torch and no publisher.

        history = History(tmp_path)
        history.full(history.random(seed=1))            # version 0
        history.delta(history.changed(0.1, seed=2))     # version 1, from the newest one's state
        history.skip(0, 1), history.anchor(1)           # further ways

    `states` and `manifests` hold what was written, by version. `tile` elements make a tile (as small as a test
    likes: readers may assume nothing about it), `pack_tiles` tiles a delta pack.
    """

    def __init__(
        self,
        folder: Path,
        store: ObjectStore | None = None,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        *,
        tile: int = TILE,
        pack_tiles: int = 1 << 30,
        pack_bytes: int = 60,
        small: bool = False,
        tile_digests: bool = True,
    ) -> None:
        """Without `tile_digests`, full versions are as they were in runs before format 5."""
        self.tile_digests = tile_digests
        self.store: ObjectStore = MemoryStore() if store is None else store
        self.tile, self.pack_tiles, self.pack_bytes, self.small = tile, pack_tiles, pack_bytes, small
        table = {name: np.broadcast_to(np.int8(0), shape) for name, shape in shapes.items()}
        self.run: RunInfo = ensure_run(self.store, write_model_dir(folder / "history-model"), table)
        self.claim: Claim = lineage.claim(self.store)
        self.states: dict[int, State] = {}
        self.manifests: dict[int, Manifest] = {}
        self._next = 0

    @property
    def newest(self) -> int:
        return max(self.manifests)

    def random(self, seed: int = 0) -> State:
        """Any bits, NaNs and both zeros among them."""
        source = np.random.default_rng(seed)
        state = {spec.name: source.integers(0, 1 << 16, spec.shape, np.uint16) for spec in self.run.tensors}
        state[self.run.tensors[0].name].flat[:4] = (0x0000, 0x8000, 0x7FC1, 0xFF81)
        return state

    def changed(self, part: float, seed: int = 0, state: State | None = None) -> State:
        """About `part` of the elements of the newest state (or `state`) moved by small steps, at least one."""
        source = np.random.default_rng(seed)
        result = {name: bits.copy() for name, bits in (state or self.states[self.newest]).items()}
        for bits in result.values():
            places = np.flatnonzero(source.random(bits.size) < part)
            bits.flat[places] += source.choice(np.array([1, 2, 0xFFFF], np.uint16), len(places))
        first = next(iter(result.values()))
        first.flat[seed % first.size] ^= 1
        return result

    def full(self, state: State, **fields: Any) -> Manifest:
        return self.commit(state, lambda version: self._full_way(state, version, "0"), **fields)

    def delta(self, state: State, base: int | None = None, **fields: Any) -> Manifest:
        """From `base`, the newest version unless given."""
        start = self.newest if base is None else base
        return self.commit(
            state, lambda version: self._delta_way(self.states[start], state, start, version, "0"), **fields
        )

    def skip(self, base: int, version: int) -> str:
        """A further way between two versions; its key."""
        before, after = self.states[base], self.states[version]
        return self._further(
            version, self._delta_way(before, after, base, version, f"skip{version - base}")
        )

    def anchor(self, version: int) -> str:
        """A further way to `version`, full; its key."""
        return self._further(version, self._full_way(self.states[version], version, "anchor"))

    def digest(self, state: State) -> str:
        total, place = 0, 0
        for spec in self.run.tensors:
            total += digest_of(state[spec.name].reshape(-1), place)
            place += math.prod(spec.shape)
        return f"{total & ((1 << 64) - 1):016x}"

    def commit(self, state: State, make_way: Callable[[int], Way], **fields: Any) -> Manifest:
        """`fields` replace those of the manifest."""
        version = fields.get("version", self._next)
        manifest = Manifest(
            version=version,
            step=10 * version,
            incarnation=self.claim.incarnation,
            nonce=self.claim.nonce,
            parent=max((number for number in self.manifests if number < version), default=-1),
            dtype=self.run.dtype,
            way=make_way(version),
            digest=self.digest(state),
            created=0.0,
        )
        manifest = msgspec.structs.replace(manifest, **fields)
        self.store.put_if_absent(lineage.version_key(version), msgspec.json.encode(manifest))
        self.states[version] = {name: bits.copy() for name, bits in state.items()}
        self.manifests[version] = manifest
        self._next = version + 1
        return manifest

    def _further(self, version: int, way: Way) -> str:
        return write_way(self.store, FurtherWay(version, self.claim.incarnation, way, 0.0))

    def _key(self, version: int, rank: str, number: int) -> str:
        return f"packs/{version:010}-{self.claim.incarnation:08}-{rank}-{number}"

    def _full_way(self, state: State, version: int, rank: str) -> Way:
        packs: list[Pack] = []
        weight_map: dict[str, int] = {}
        for number, plan in enumerate(plan_packs(self.run.tensors, self.run.dtype, self.pack_bytes)):
            data = plan.header + b"".join(state[spec.name].tobytes() for spec in plan.tensors)
            packs.append(
                Pack(self._key(version, rank, number), len(data), hashlib.sha256(data).hexdigest())
            )
            weight_map |= {spec.name: number for spec in plan.tensors}
            self.store.put(packs[-1].key, data)
        digests = self._tile_digests(state) if self.tile_digests else msgspec.UNSET
        total = sum(pack.size for pack in packs)
        return Way(-1, tuple(packs), total, weight_map, tile_digests=digests)

    def _tile_digests(self, state: State) -> bytes:
        found, place = [], 0
        for spec in self.run.tensors:
            bits = state[spec.name].reshape(-1)
            tile = full_tiles.TILE  # type: ignore[attr-defined]  # what readers cut by
            found += [digest_of(bits[at : at + tile], place + at) for at in range(0, len(bits), tile)]
            place += len(bits)
        return np.array(found, "<u8").tobytes()

    def _delta_way(self, before: State, after: State, base: int, version: int, rank: str) -> Way:
        writers = [DeltaPackWriter()]
        place, tiles, small = 0, 0, False
        for index, spec in enumerate(self.run.tensors):
            size = math.prod(spec.shape)
            old, new = before[spec.name].reshape(-1), after[spec.name].reshape(-1)
            for start in range(0, size, self.tile):
                cut = slice(start, min(start + self.tile, size))
                coded = encode_tile(old[cut], new[cut], place + start, small=self.small)
                if coded is None:
                    continue
                if tiles and tiles % self.pack_tiles == 0:
                    writers.append(DeltaPackWriter())
                writers[-1].add(index, start, cut.stop - cut.start, coded)
                tiles += 1
                small |= coded.mode == Mode.SMALL
            place += size
        packs = []
        for number, writer in enumerate(writers if tiles else ()):
            pieces, pack = writer.finish(self._key(version, rank, number))
            self.store.put(pack.key, b"".join(pieces))
            packs.append(pack)
        changed = sum(writer.changed for writer in writers)
        return Way(base, tuple(packs), sum(pack.size for pack in packs), {}, changed, small)


def state_of(run: RunInfo, shards: list[Path]) -> State:
    """What a folder's safetensors files hold."""
    state = {}
    shapes = {spec.name: spec.shape for spec in run.tensors}
    for shard in shards:
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                state[name] = np.frombuffer(data[start:end], np.uint16).reshape(shapes[name])
    return state


def same_state(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def tiny_qwen3(folder: Path, tied: bool) -> tuple[Any, Path]:
    """A random Qwen3 in fp32 and its model folder (without weights), the same in every process. Its row
    counts are odd, so that shards are uneven."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=45,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(1)
    model_dir = folder / f"qwen3-{'tied' if tied else 'untied'}"
    model = Qwen3ForCausalLM(config)
    model.config.save_pretrained(model_dir)
    model.generation_config.save_pretrained(model_dir)
    return model, model_dir
