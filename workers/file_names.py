"""Under which names the trainer's tensors stand in the model's own files, and which part of a trained one each is.

Versions are published under the files' names, because those are what every engine loads. transformers may keep many
of a file's tensors in one parameter, or under other names (the experts of a mixture). It knows the way back, for
save_pretrained, so that way is asked, and no table of models stands here: each parameter goes through it as a tensor
without memory, and comes out as views of itself, under the files' names. A view's place, shape and strides say which
elements it holds. What is no view (computed, not cut) or crosses rows (weights/rows.py) can't be published.

What is found is then held against the files themselves: names, shapes, and of each part some rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.log import get_logger
from async_rl.weights.rows import Published, RowsOf
from workers.engines.shards import Table, find_shards, read_table

__all__ = ["FileNames", "find_names", "persistent_buffers"]

log = get_logger(__name__)

_BLOCK_ROWS = 1024
"""Compared at a time: some megabytes."""


class FileNames(NamedTuple):
    """Of a model, in the order in which its versions hold them."""

    # By the files' names: the trainer's name, and the part of that tensor.
    parts: dict[str, tuple[str, RowsOf]]
    refused: AsyncRLError | None = None  # why the model can't be published

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Published]:
        """The parts of `tensors`, by the trainer's names, wherever and however these lie now. Raises the refusal."""
        if self.refused is not None:
            raise self.refused
        return {name: _part_of(tensors[home], part) for name, (home, part) in self.parts.items()}

    def views(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """The same of a model that lies here whole, to be written into. Raises the refusal."""
        tensors = dict(model.named_parameters()) | persistent_buffers(model)
        found = self.of(tensors)
        return {n: each.shown() if isinstance(each, RowsOf) else each for n, each in found.items()}


def find_names(model: Any, folder: Path) -> FileNames:
    """Of a model of transformers as it was loaded from `folder`, before anything has changed or sharded it. A model
    that can't be published can still be trained: why stands in the result."""
    try:
        shards = find_shards(folder)
        table = read_table(shards)
        parts, guessed = _parts(model, folder, table)
        _compare(parts, guessed, shards)
        _tell_what_is_left(model, folder, table.keys() - parts.keys())
    except AsyncRLError as error:
        return FileNames({}, error)
    # Without the tensors: sharding puts others in their place.
    nowhere = torch.empty(0, device="meta")
    return FileNames({name: (home, replace(part, whole=nowhere)) for name, (home, part) in parts.items()})


def persistent_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """What a model's files hold besides its parameters, numbers only (a router's correction of its scores)."""
    kept = model.state_dict(keep_vars=True).keys()
    return {n: each for n, each in model.named_buffers() if n in kept and each.is_floating_point()}


def _part_of(tensor: Tensor, part: RowsOf) -> Published:
    whole = RowsOf.all_of(tensor)
    return tensor if _place(part) == _place(whole) else replace(part, whole=tensor)


def _place(part: RowsOf) -> tuple[object, ...]:
    return part.shape, part.first, part.count, part.inner, part.strides, part.offset


class _Found(NamedTuple):
    parts: dict[str, tuple[str, RowsOf]]
    guessed: set[
        str
    ]  # of these names: transformers has not said what they are, and so calls them as the files do


def _parts(model: Any, folder: Path, table: Table) -> _Found:
    parameters = dict(model.named_parameters())
    tensors = parameters | persistent_buffers(model)
    ways = _ways_back(model, tensors)
    found = _Found({}, set())
    unlike: list[str] = []
    for home, tensor in tensors.items():
        parts = _whole_cover(tensor, ways[home])
        if parts and all(_shape(table, name) == part.shape for name, part in parts.items()):
            found.parts.update({name: (home, part) for name, part in parts.items()})
        elif _shape(table, home) == tuple(tensor.shape) and not any(name in table for name in parts or ()):
            found.parts[home] = (home, RowsOf.all_of(tensor))
            found.guessed.add(home)
        elif home in parameters:
            unlike.append(home)
    if unlike:
        raise _refusal(folder, unlike, parameters, ways)
    return found


def _shape(table: Table, name: str) -> tuple[int, ...] | None:
    return table[name][1] if name in table else None


def _whole_cover(tensor: Tensor, views: Mapping[str, Tensor]) -> dict[str, RowsOf] | None:
    """In the order of the tensor's memory; None unless they are parts by rows that hold every element once."""
    parts: dict[str, RowsOf] = {}
    for name, view in views.items():
        part = RowsOf.of_view(tensor, tuple(view.shape), view.stride(), int(view.storage_offset()))
        if part is None:
            return None
        parts[name] = part
    if sum(math.prod(part.shape) for part in parts.values()) != tensor.numel():
        return None
    return dict(sorted(parts.items(), key=lambda item: (item[1].first, item[1].offset)))


# ---------------------------------------------------------------- transformers' way back


class _Shape(Tensor):
    """A tensor without memory, whose views stay views: no copy is made only to put its elements in order."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.contiguous, Tensor.clone):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _ways_back(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """By tensor: the names that save_pretrained gives to it or to its parts, and the views of it that they are.
    What is no view is left out, and everything where this transformers converts nothing (before 5)."""
    found: dict[str, dict[str, Tensor]] = {name: {} for name in tensors}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return found
    shapes = {
        name: torch.empty(each.shape, device="meta").as_subclass(_Shape) for name, each in tensors.items()
    }
    homes = {_memory(each): name for name, each in shapes.items()}
    try:
        back = revert_weight_conversion(model, dict(shapes))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
        log.debug("transformers' way back to the files' names needs numbers", reason=str(error))
        return found
    for name, view in back.items():
        home = homes.get(_memory(view))
        if home is not None:
            found[home][name] = view
    return found


def _memory(tensor: Tensor) -> int:
    """Equal for two views of one tensor, one without memory too."""
    return int(tensor.untyped_storage()._cdata)


# ---------------------------------------------------------------- the files


def _compare(parts: Mapping[str, tuple[str, RowsOf]], guessed: Set[str], shards: Sequence[Path]) -> None:
    """Raises ConfigError for a part that is not in the files what it is in memory, as far as four of its rows tell:
    where experts, or halves of them, were taken for one another, or rows were permuted, these differ. What is
    `guessed` is compared as a whole."""
    for path in shards:
        with safe_open(path, framework="pt") as file:
            for name in parts.keys() & set(file.keys()):
                home, part = parts[name]
                if not part.shape or not part.whole.numel() or not part.whole.is_contiguous():
                    continue
                ours, theirs, rows = part.shown(), file.get_slice(name), part.shape[0]
                some = {0, min(1, rows - 1), rows // 2, rows - 1}
                step = _BLOCK_ROWS if name in guessed else 1
                for at in range(0, rows, step) if name in guessed else some:
                    if not torch.equal(theirs[at : at + step].to(ours.dtype), ours[at : at + step]):
                        raise ConfigError(
                            f"{name} in {path} is not what transformers made of it in {home}, from row {at} on: a "
                            "version published under this name would be another model",
                            hint="the model can be trained, but not published; it may be stored quantised",
                        )


def _tell_what_is_left(model: Any, folder: Path, names: Set[str]) -> None:
    """Of the files; not the second names of tied tensors. Engines get what is published, and nothing else."""
    left = sorted(names - model.state_dict(keep_vars=True).keys())
    if left:
        log.warning(
            "the model's files hold tensors that are not trained: no version has them, and an engine must do without",
            folder=str(folder),
            tensors=len(left),
            first=left[0],
        )


def _refusal(
    folder: Path,
    unlike: Sequence[str],
    parameters: Mapping[str, Tensor],
    ways: Mapping[str, Mapping[str, Tensor]],
) -> ConfigError:
    covers = [_whole_cover(parameters[name], ways[name]) for name in unlike]
    written = next(iter(covers[0] or {}), "")
    if all(covers):
        hint = (
            f"transformers would write {written}: load the model once and save it into another folder "
            "(from_pretrained, save_pretrained; of the tokenizer, too), and give that as model.path"
        )
    else:
        hint = (
            "they are computed from several tensors of the files, not put together of rows: such a model can be "
            "trained, but not published"
        )
    return ConfigError(
        f"{len(unlike)} parameters of the model in {folder} have other names in memory than in its files, "
        f"{unlike[0]} is one: what is published under them no engine could load",
        hint=hint,
    )
