"""What a run is: run.json and the model's files, created once, never changed.

A trainer calls `ensure_run`: the first one creates the run from its model folder, every later one is
checked against it. A worker calls `find_run` and `fetch_model_files` and needs nothing else. The files lie
under `model/<hash>/<name>`: two trainers that start at once with different models can't mix their files,
and the one whose run.json comes second is refused.

    run.json    created last, by put_if_absent: a run exists whole or not at all
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct

from async_rl.errors import (
    AlreadyExists,
    ConfigError,
    Corrupt,
    ModelMismatch,
    NotFound,
    WeightsError,
)
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.weights.files import write_whole
from async_rl.weights.packs import TensorSpec

__all__ = [
    "FORMAT",
    "READABLE",
    "TILES_SINCE",
    "ModelFile",
    "RunInfo",
    "Shaped",
    "ensure_run",
    "fetch_model_file",
    "fetch_model_files",
    "find_run",
    "open_run",
    "tensor_table",
]

log = get_logger(__name__)

FORMAT = 5
"""Of run.json and everything it implies: what a new run gets."""

READABLE = (4, FORMAT)
"""Formats that are read, and gone on with as they are. Another number is refused: its objects would seem to be
damaged. 4 has no Way.tile_digests: who reads that would take a manifest with them for one that was edited."""

TILES_SINCE = 5
"""The format from which on full ways have digests of their tiles (full_tiles.py)."""

RUN_KEY = "run.json"
MODEL_PREFIX = "model/"

Dtype = Literal["bfloat16", "float16"]

# Weights travel as versions; documents and licences change without the model changing.
_LEFT_OUT = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".npz",
    ".ot",
}
_LEFT_OUT |= {".md", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".svg"}
_INDEXES = (".safetensors.index.json", ".bin.index.json")
_SUBFOLDERS = ("additional_chat_templates",)  # the only folder a tokenizer reads below its own

# Keys of config.json that say nothing about what the weights mean.
_VOLATILE = {"transformers_version", "dtype", "torch_dtype", "use_cache", "_name_or_path", "_commit_hash"}


class Shaped(Protocol):
    """A tensor, as far as the table is concerned; a DTensor's shape is the whole tensor's."""

    @property
    def shape(self) -> Any: ...


class ModelFile(Struct, frozen=True):
    name: str  # relative to the model folder, `/`-separated
    key: str
    size: int  # bytes
    sha256: str


class RunInfo(Struct, frozen=True):
    format: int
    run: str  # id: tells runs apart, also when one takes another's URL
    created: float  # seconds since the epoch, by the creating trainer's clock
    fingerprint: str  # SHA-256 over config essentials, tensor table and dtype
    dtype: Dtype  # of every published tensor
    vocab_size: int
    tensors: tuple[TensorSpec, ...]  # Hugging Face names, in the order of the model; tied ones once
    model_files: tuple[ModelFile, ...]
    seal: str = ""  # hash of the other fields


class _Format(Struct, frozen=True):
    format: int


# ---------------------------------------------------------------- the trainer's side


def ensure_run(
    store: ObjectStore, model_dir: Path, tensors: Mapping[str, Shaped], dtype: Dtype = "bfloat16"
) -> RunInfo:
    """Create the run from `model_dir` and the trainer's parameters, or check that it is the same model's.

    `tensors` maps Hugging Face names to parameters (or anything with a whole tensor's shape). Raises
    ConfigError for a folder that holds no model, ModelMismatch with what differs, and StoreErrors.
    """
    contents = _read_model_dir(model_dir, dtype)
    config = json.loads(contents["config.json"])
    table = tensor_table(tensors, tied=bool(config.get("tie_word_embeddings", True)))
    wanted = RunInfo(
        format=FORMAT,
        run=uuid.uuid4().hex,
        created=time.time(),
        fingerprint=_fingerprint(config, table, dtype),
        dtype=dtype,
        vocab_size=_vocab_size(config, model_dir),
        tensors=table,
        model_files=tuple(_model_file(name, data) for name, data in sorted(contents.items())),
    )
    wanted = msgspec.structs.replace(wanted, seal=_seal_of(wanted))
    try:
        found = _read_run(store)
    except NotFound:
        for file in wanted.model_files:
            store.put(file.key, contents[file.name])
        data = msgspec.json.format(msgspec.json.encode(wanted), indent=1)
        try:
            store.put_if_absent(RUN_KEY, data)
            ours = store.settled(RUN_KEY, data)
        except AlreadyExists:  # another trainer was faster, or our own retried put had succeeded
            ours = False
        if not ours:
            found = _read_run(store)
        else:
            log.info("run created", url=store.url, run=wanted.run, tensors=len(table), dtype=dtype)
            return wanted
    differences = _differences(store, found, wanted, config)
    if differences:
        listed = "\n  ".join(differences)
        raise ModelMismatch(
            f"the model in {model_dir} is not the model of the run {store.url}:\n  {listed}\n",
            hint="start from the run's model (async-rl weights pull) or give this one a run URL of its own",
        )
    return found


def tensor_table(tensors: Mapping[str, Shaped], tied: bool) -> tuple[TensorSpec, ...]:
    """Names and shapes in the order given. Where `tied`, a parameter under two names stands once, under the
    first: the name save_pretrained keeps (the embedding's) and from_pretrained ties the other to."""
    seen: set[object] = set()
    table = []
    for name, tensor in tensors.items():
        place = _memory_of(tensor)
        if tied and place in seen:
            continue
        seen.add(place)
        table.append(TensorSpec(name, tuple(int(size) for size in tensor.shape)))
    return tuple(table)


def _memory_of(tensor: Any) -> object:
    """Equal for two names of one parameter. state_dict() wraps one in two tensors: there the address
    decides."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    address = local.data_ptr() if hasattr(local, "data_ptr") else 0
    return (address, tuple(tensor.shape)) if address else id(tensor)


def _read_model_dir(model_dir: Path, dtype: Dtype) -> dict[str, bytes]:
    """Every file of the folder but weights and documents, by relative name."""
    if not (model_dir / "config.json").is_file():
        raise ConfigError(
            f"{model_dir} is no model folder: it has no config.json",
            hint="give a local folder written by save_pretrained (or by async-rl model tiny)",
        )
    contents = {
        path.relative_to(model_dir).as_posix(): path.read_bytes() for path in _model_paths(model_dir)
    }
    contents["config.json"] = _with_dtype(contents["config.json"], dtype, model_dir)
    return contents


def _model_paths(model_dir: Path) -> Iterator[Path]:
    for folder in (model_dir, *(model_dir / name for name in _SUBFOLDERS)):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            hidden, index = path.name.startswith("."), path.name.endswith(_INDEXES)
            if path.is_file() and not hidden and not index and path.suffix.lower() not in _LEFT_OUT:
                yield path


def _with_dtype(data: bytes, dtype: Dtype, model_dir: Path) -> bytes:
    """config.json saying the dtype of the published weights. The folder's own may say float32 (the
    masters'), and an engine that goes by it would load 16-bit weights as something else than what the
    trainer computes with."""
    try:
        config = json.loads(data)
    except ValueError as error:
        raise ConfigError(f"{model_dir / 'config.json'} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{model_dir / 'config.json'} is no JSON object")
    config["dtype"] = dtype
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        part.update({key: dtype for key in ("dtype", "torch_dtype") if key in part})
    return (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _model_file(name: str, data: bytes) -> ModelFile:
    sha256 = hashlib.sha256(data).hexdigest()
    return ModelFile(name, f"{MODEL_PREFIX}{sha256[:16]}/{name}", len(data), sha256)


def _vocab_size(config: Mapping[str, Any], model_dir: Path) -> int:
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    if not isinstance(size, int) or size < 1:
        raise ConfigError(
            f"{model_dir / 'config.json'} has no vocab_size", hint="only language models can be trained"
        )
    return size


def _fingerprint(config: Mapping[str, Any], table: tuple[TensorSpec, ...], dtype: Dtype) -> str:
    content = {
        "config": _essentials(config),
        "tensors": [[tensor.name, list(tensor.shape)] for tensor in table],
        "dtype": dtype,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _essentials(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _VOLATILE}


def _differences(store: ObjectStore, run: RunInfo, mine: RunInfo, config: Mapping[str, Any]) -> list[str]:
    """Sentences, most telling first; empty for the same model."""
    result = []
    if run.dtype != mine.dtype:
        result.append(f"dtype: the run publishes {run.dtype}, this trainer {mine.dtype}")
    if run.vocab_size != mine.vocab_size:
        result.append(f"vocabulary: {run.vocab_size} tokens in the run, {mine.vocab_size} here")
    result += _table_differences(run.tensors, mine.tensors)
    theirs, ours = ({file.name: file for file in info.model_files} for info in (run, mine))
    for name in sorted(theirs.keys() | ours.keys()):
        if name not in ours:
            result.append(f"{name}: the run has it, the folder doesn't")
        elif name not in theirs:
            result.append(f"{name}: the folder has it, the run doesn't")
        elif name == "config.json":
            result += _config_differences(fetch_model_file(store, theirs[name]), config)
        elif theirs[name].sha256 != ours[name].sha256:
            result.append(
                f"{name}: SHA-256 {theirs[name].sha256[:16]}… in the run, {ours[name].sha256[:16]}… here"
            )
    return result


def _table_differences(run: tuple[TensorSpec, ...], mine: tuple[TensorSpec, ...]) -> list[str]:
    theirs, ours = ({tensor.name: tensor.shape for tensor in table} for table in (run, mine))
    result = []
    for title, names in (
        ("tensors only in the run", theirs.keys() - ours.keys()),
        ("tensors only here", ours.keys() - theirs.keys()),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            result.append(f"{title}: {', '.join(sorted(names)[:3])}{more}")
    changed = [name for name in theirs if name in ours and theirs[name] != ours[name]]
    result += [
        f"{name}: shape {list(theirs[name])} in the run, {list(ours[name])} here" for name in changed[:3]
    ]
    if len(changed) > 3:
        result.append(f"{len(changed) - 3} more tensors of other shapes")
    return result


def _config_differences(data: bytes, config: Mapping[str, Any]) -> list[str]:
    theirs, ours = _essentials(json.loads(data)), _essentials(config)
    return [
        f"config.json: {key} is {theirs.get(key)!r} in the run, {ours.get(key)!r} here"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key)
    ]


# ---------------------------------------------------------------- everybody's side


def find_run(store: ObjectStore) -> RunInfo | None:
    """None where no run has begun. Raises WeightsError for one of another format, Corrupt for a broken
    run.json."""
    try:
        return _read_run(store)
    except NotFound:
        return None


def open_run(store: ObjectStore) -> RunInfo:
    """Like find_run, where there must be a run. Raises WeightsError where there is none."""
    run = find_run(store)
    if run is None:
        raise WeightsError(
            f"there is no run at {store.url}",
            hint="check the URL; a run begins when its trainer starts for the first time",
        )
    return run


def fetch_model_files(store: ObjectStore, run: RunInfo, folder: Path) -> None:
    """Put config, tokenizer and the rest into `folder`, each verified by its hash; what is there and right
    stays."""
    for file in run.model_files:
        if PurePosixPath(file.name).is_absolute() or ".." in PurePosixPath(file.name).parts:
            raise Corrupt(f"{RUN_KEY} in {store.url} names a file outside the model folder: {file.name!r}")
        path = folder / file.name
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256:
            continue
        write_whole(path, fetch_model_file(store, file))


def fetch_model_file(store: ObjectStore, file: ModelFile) -> bytes:
    """Raises Corrupt, StoreErrors."""
    for _ in range(2):  # a second try tells a torn read from a damaged object
        data = store.get(file.key)
        if hashlib.sha256(data).hexdigest() == file.sha256:
            return data
    raise Corrupt(
        f"{file.key} in {store.url} is not what {RUN_KEY} recorded: {len(data)} bytes of other content",
        hint="the object was changed or damaged: restore it from the model folder the run was started with",
    )


def _read_run(store: ObjectStore) -> RunInfo:
    data = store.get(RUN_KEY)
    try:
        number = msgspec.json.decode(data, type=_Format).format
        if number not in READABLE:
            raise WeightsError(
                f"the run {store.url} is of format {number}, this async-rl reads formats "
                f"{READABLE[0]} to {FORMAT}",
                hint="upgrade async-rl on this machine to the trainer's version"
                if number > FORMAT
                else "read it with the async-rl that its trainer had, or begin a new run at another URL",
            )
        run = msgspec.json.decode(data, type=RunInfo)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Corrupt(f"{RUN_KEY} in {store.url} is not valid: {error}") from error
    if run.seal not in ("", _seal_of(run)):
        raise Corrupt(
            f"{RUN_KEY} in {store.url} is not what was written: its fields differ from its seal",
            hint="the object was damaged or edited: restore it; nothing of the run can be read without it",
        )
    return run


def _seal_of(run: RunInfo) -> str:
    plain = msgspec.structs.replace(run, seal="")
    return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()[:16]
