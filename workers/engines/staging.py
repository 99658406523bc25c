"""A second set of weights beside the one that serves: built while the model is used, flipped in without a copy.

    twin     a copy of the tree of modules, without copies of what it holds: only modules with weights get
             parameters of their own, empty ones, in the form the checkpoint is loaded in
    fill     the model's own loading code, run on the twin: what it may reach of the serving modules, it reads
    flip     into each serving module: its new parameters, and the attributes that the processing after the loading
             has set (packed weights among them). References change hands, nothing is copied, and the modules stay
             the same objects

Whoever keeps a parameter elsewhere than in a module (a tensor in a closure, a view of its storage) would go on with
the old weights after a flip. `kept_elsewhere` finds such keepers in the whole interpreter; with one, nothing may be
staged.

Nothing here knows vLLM; `vllm_staging.py` does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

__all__ = ["Flip", "Twin", "kept_elsewhere"]

TREE = frozenset({"_parameters", "_buffers", "_modules"})
"""What makes a module a part of the tree; the rest of its attributes are its own affair."""

Blank = Callable[[nn.Module, str, torch.Tensor], torch.Tensor]
"""(serving module, parameter's name, parameter) -> an empty one in the form it is loaded in, of the same class and
with the same attributes."""


class Twin:
    """The twin of `model`: `root` is what to load into.

    holds_weights: whether a module's parameters change from version to version. A module none of whose
    descendants (nor itself) does is not copied: the twin then holds the serving one.
    """

    def __init__(self, model: nn.Module, holds_weights: Callable[[nn.Module], bool], blank: Blank) -> None:
        self._pairs: list[tuple[nn.Module, nn.Module]] = []  # (serving, twin), of modules with weights
        self._copies: dict[int, nn.Module] = {}
        self._tensors: dict[int, torch.Tensor] = {}  # a tied parameter is one in the twin as well
        self._holds_weights = holds_weights
        self._blank = blank
        self.root = self._copy(model)

    def _copy(self, module: nn.Module) -> nn.Module:
        if (known := self._copies.get(id(module))) is not None:
            return known
        if not any(self._holds_weights(each) for each in module.modules()):
            self._copies[id(module)] = module
            return module
        copy = module.__class__.__new__(module.__class__)
        copy.__dict__.update(module.__dict__)
        self._copies[id(module)] = copy
        copy.__dict__["_parameters"] = dict(module._parameters)
        copy.__dict__["_buffers"] = dict(module._buffers)
        copy.__dict__["_modules"] = {
            name: child and self._copy(child) for name, child in module._modules.items()
        }
        if self._holds_weights(module):
            self._pairs.append((module, copy))
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    if id(tensor) not in self._tensors:
                        self._tensors[id(tensor)] = bind(self._blank(module, name, tensor), module, copy)
                    copy._parameters[name] = self._tensors[id(tensor)]  # type: ignore[assignment]
        return copy

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of all that must be loaded."""
        mine = {id(tensor) for tensor in self._tensors.values()}
        return ((name, each) for name, each in self.root.named_parameters() if id(each) in mine)

    def as_flip(self) -> Flip:
        """What puts its weights into the serving modules. After the twin was loaded and processed."""
        return Flip([_Move(serving, copy) for serving, copy in self._pairs])


class _Move:
    """What one serving module gets."""

    def __init__(self, serving: nn.Module, copy: nn.Module) -> None:
        self.module = serving
        self.parameters = {
            name: None if tensor is None else bind(tensor, copy, serving)
            for name, tensor in copy._parameters.items()
        }
        before = serving.__dict__
        self.attributes = {
            name: value
            for name, value in copy.__dict__.items()
            if name not in TREE and before.get(name, TREE) is not value
        }
        self.gone = [name for name in before if name not in copy.__dict__]


class Flip:
    """A set of weights ready to be put into the modules that serve."""

    def __init__(self, moves: list[_Move]) -> None:
        self._moves = moves

    def __call__(self) -> list[Any]:
        """Flip. Returns what was replaced: dropping it gives back its memory, which takes a moment."""
        old: list[Any] = []
        for move in self._moves:
            attributes = move.module.__dict__
            old.append(list(move.module._parameters.values()))
            old.append([attributes.get(name) for name in (*move.attributes, *move.gone)])
            move.module._parameters.clear()
            move.module._parameters.update(move.parameters)  # type: ignore[arg-type]
            attributes.update(move.attributes)
            for name in move.gone:
                attributes.pop(name, None)
        return old


def bind(tensor: torch.Tensor, old: nn.Module, new: nn.Module) -> torch.Tensor:
    """`tensor`, its attributes that are methods of `old` (a weight loader) made methods of `new`."""
    for name, value in tensor.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is old:
            tensor.__dict__[name] = MethodType(value.__func__, new)
    return tensor


def kept_elsewhere(model: nn.Module) -> str:
    """Who else keeps a parameter of `model`, or a tensor on the same storage: in words, or empty.

    Looks at every object the garbage collector knows (some 0.3 s in a process with vLLM), so once, before the
    model serves. vLLM freezes what its start has left, and what is frozen is not listed: it is thawed for the look.
    """
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    try:
        return _keeper(model)
    finally:
        if frozen:
            gc.freeze()


def _keeper(model: nn.Module) -> str:
    names = {id(each): name for name, each in model.named_parameters()}
    homes = {id(module._parameters) for module in model.modules()}
    storages = {
        each.untyped_storage().data_ptr(): name for name, each in model.named_parameters() if each.numel()
    }
    parameters = list(model.parameters())
    ours = {id(parameters)}
    for keeper in gc.get_referrers(*parameters):
        if id(keeper) not in homes | ours and not _is_frame(keeper):
            return f"a {type(keeper).__name__} besides the module keeps a parameter"
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and id(each) not in names:
            try:
                address = each.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):  # a sparse one, or one without memory
                continue
            if (name := storages.get(address)) is not None:
                return f"another tensor looks at the memory of {name}"
    return ""


def _is_frame(keeper: object) -> bool:
    return type(keeper).__name__ in ("frame", "generator", "list_iterator")
