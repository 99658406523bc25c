"""What the tests of async_rl.weights share: a store that misbehaves on cue, a small model folder, a small
trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.errors import AlreadyExists, NotFound
from async_rl.store.base import Capabilities, ObjectInfo, ObjectStore, Upload


class MemoryStore:
    """Objects in a dict."""

    url = "memory://tests"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.objects[key] = bytes(data)

    def put_if_absent(self, key: str, data: bytes | memoryview) -> None:
        if self.objects.setdefault(key, data := bytes(data)) is not data:
            raise AlreadyExists(f"{key} exists")

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if key not in self.objects:
            raise NotFound(f"{key} does not exist")
        return self.objects[key][start : None if length is None else start + length]

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self.get(key)), 0.0)

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

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data: bytes = self._run("get", key, lambda: self.inner.get(key, start, length))
        return data

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
