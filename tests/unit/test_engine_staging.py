"""Staged weights: what a flip changes in the modules that serve, and what staging leaves alone."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from async_rl.errors import EngineError
from workers.engines.staging import Twin, kept_elsewhere
from workers.engines.vllm_engine import VLLMEngine
from workers.engines.vllm_extension import PolicyExtension
from workers.rollout_settings import RolloutConfig

VOCAB, WIDTH = 11, 4


class Linear(nn.Module):
    """As vLLM's on a CPU: the processing packs the weight into a closure and leaves an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = blank_weight(self, WIDTH, WIDTH)
        self.bias = blank_weight(self, WIDTH)

    def load(self, parameter, tensor):
        parameter.data.copy_(tensor)
        self.loaded = True

    def process(self):
        packed = self.weight.data.t().contiguous()
        self.apply_packed = lambda x, bias: x @ packed + bias
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x):
        return self.apply_packed(x, self.bias)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = blank_weight(self, VOCAB, WIDTH)

    load = Linear.load

    def process(self):
        packed = self.weight.data.t().contiguous()
        self.logits = lambda x: x @ packed


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.arange(WIDTH), persistent=False)


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head, self.rotary = Embedding(), Embedding(), Rotary()
        self.layers = nn.ModuleList([Linear(), Linear()])
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = nn.functional.embedding(ids, self.embed.weight) + self.rotary.turns
        for layer in self.layers:
            x = layer(x)
        return self.head.logits(x)


def blank_weight(layer, *shape):
    weight = nn.Parameter(torch.empty(shape), requires_grad=False)
    weight.weight_loader = layer.load
    return weight


def holds_weights(module):
    return isinstance(module, Linear | Embedding)


def blank(module, name, parameter):
    """What stands for vLLM's record of the form before the packing."""
    fresh = blank_weight(module, *(parameter.shape if parameter.numel() else (WIDTH, WIDTH)))
    fresh.data.fill_(float("nan"))
    return fresh


def load(model, seed):
    random = torch.Generator().manual_seed(seed)
    for _, parameter in model.named_parameters():
        parameter.weight_loader(parameter, torch.randn(parameter.shape, generator=random))


def process(model):
    for module in model.modules():
        if holds_weights(module):
            module.process()


def started(tied, seed):
    model = Model(tied)
    load(model, seed)
    process(model)
    return model


def stage(model, seed):
    twin = Twin(model, holds_weights, blank)
    load(twin.root, seed)
    process(twin.root)
    return twin.as_flip()


IDS = torch.arange(VOCAB)


@pytest.mark.parametrize("tied", [True, False])
def test_after_a_flip_the_model_is_what_a_start_with_the_new_weights_makes(tied):
    model = started(tied, 1)
    modules = list(model.modules())
    for seed in (2, 3, 1):
        before = model(IDS)
        flip = stage(model, seed)
        assert torch.equal(model(IDS), before), "staging changed what serves"
        flip()
        assert torch.equal(model(IDS), started(tied, seed)(IDS))
    assert [*map(id, model.modules())] == [*map(id, modules)]
    assert (model.head.weight is model.embed.weight) == tied
    assert model.embed.weight.weight_loader.__self__ is model.embed


def test_a_staging_that_fails_half_way_leaves_no_trace():
    model = started(True, 1)
    before, state = model(IDS), {id(m): dict(m.__dict__) for m in model.modules()}
    twin = Twin(model, holds_weights, blank)
    for number, (_, parameter) in enumerate(twin.parameters()):
        if number == 2:
            break
        parameter.weight_loader(parameter, torch.zeros(parameter.shape))
    twin.root.embed.process()
    assert torch.equal(model(IDS), before)
    assert {id(m): dict(m.__dict__) for m in model.modules()} == state


def test_only_modules_with_weights_are_copied_and_tied_ones_are_loaded_once():
    model = started(True, 1)
    twin = Twin(model, holds_weights, blank)
    assert twin.root.rotary is model.rotary and twin.root.layers is not model.layers
    assert [name for name, _ in twin.parameters()] == [
        "embed.weight",
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
    ]
    assert not {id(each) for _, each in twin.parameters()} & {id(each) for each in model.parameters()}


def test_the_old_weights_go_when_what_the_flip_returned_is_dropped():
    model = started(False, 1)
    old = [weakref.ref(model.embed.weight), weakref.ref(model.layers[0].apply_packed)]
    replaced = stage(model, 2)()
    assert all(each() is not None for each in old), "given back while the model stands still"
    replaced.clear()
    assert [each() for each in old] == [None, None], "vLLM's processes hardly ever collect garbage"


def test_an_attribute_that_the_processing_takes_away_is_taken_away():
    model = started(False, 1)
    model.embed.once = "set by the last processing"
    twin = Twin(model, holds_weights, blank)
    load(twin.root, 2)
    del twin.root.embed.once
    process(twin.root)
    twin.as_flip()()
    assert not hasattr(model.embed, "once")


def test_who_keeps_a_parameter_besides_its_module_is_found():
    model = started(True, 1)
    assert kept_elsewhere(model) == ""
    keeper = {"sinks": model.layers[0].bias}
    assert "a dict" in kept_elsewhere(model)
    keeper.clear()
    view = model.embed.weight.data[2:]
    assert "embed.weight" in kept_elsewhere(model)
    del view


def test_a_keeper_that_was_frozen_is_found_and_what_was_frozen_is_frozen_again():
    model = started(True, 1)
    keeper = {"sinks": model.layers[0].bias}
    gc.freeze()
    try:
        assert "a dict" in kept_elsewhere(model)
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
        keeper.clear()


# ------------------------------------------------------------------ what the engine makes of its processes' answers


class FakeVLLM:
    """`staged`: what each of two worker processes answers, question by question; the last answer stays."""

    def __init__(self, staged, *, begin="working", loaded=""):
        self.staged, self.begin, self.loaded = staged, begin, loaded
        self.calls: list[str] = []
        self.errored = False

    async def collective_rpc(self, method, args=()):
        self.calls.append(method)
        if method == "policy_staged":
            return self.staged.pop(0) if len(self.staged) > 1 else self.staged[0]
        if method == "policy_swap":
            return [{"counts": {}, "loaded": self.loaded}] * 2
        return [self.begin if method == "policy_stage" else None] * 2

    async def pause_generation(self, **_):
        self.calls.append("pause")

    async def resume_generation(self):
        self.calls.append("resume")


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr("workers.engines.vllm_engine.STAGED_POLL_S", 0.0)
    engine = VLLMEngine(RolloutConfig(stage="auto"))
    engine._version = 4
    return engine


def update(engine, version, llm):
    engine._llm = llm
    asyncio.run(engine.update(version, []))
    return llm.calls


STAGED = ["policy_stage", "policy_staged", "pause", "policy_swap", "resume", "policy_settle"]


def test_the_engine_stands_still_only_when_every_process_has_staged(engine):
    calls = update(
        engine,
        5,
        FakeVLLM([["working", "working"], ["ready", "working"], ["working", "ready"], ["ready", "ready"]]),
    )
    assert calls == ["policy_stage", *["policy_staged"] * 4, *STAGED[2:]]
    assert engine.version == 5


def test_what_is_staged_at_once_is_not_asked_for_again(engine):
    assert update(engine, 5, FakeVLLM([[]], begin="ready")) == ["policy_stage", *STAGED[2:]]


def test_files_that_cant_be_read_are_refused_before_the_pause_and_the_engine_goes_on(engine):
    llm = FakeVLLM([["ready", "unreadable: InvalidHeader"]])
    with pytest.raises(EngineError, match="version 5 can't be loaded, the engine serves 4.*InvalidHeader"):
        update(engine, 5, llm)
    assert llm.calls == STAGED[:2] and engine.version == 4 and not engine.failed
    assert update(engine, 5, FakeVLLM([["ready", "ready"]])) == STAGED


def test_a_model_that_fails_to_stage_is_loaded_in_the_pause_from_then_on(engine):
    assert update(engine, 5, FakeVLLM([["ready", "failed: KeyError"]])) == STAGED
    assert not engine.staging and engine.version == 5
    assert update(engine, 6, FakeVLLM([[]])) == ["pause", "policy_swap", "resume"]


def test_a_version_without_room_is_loaded_in_the_pause_and_the_next_one_is_tried_again(engine):
    llm = FakeVLLM([[]], begin="8 GB are free")
    assert update(engine, 5, llm) == [each for each in STAGED if each != "policy_staged"]
    assert update(engine, 6, FakeVLLM([["ready", "ready"]])) == STAGED


def test_a_staging_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr("workers.engines.vllm_engine.STAGED_POLL_S", 0.0)
    engine = VLLMEngine(RolloutConfig(start_timeout_s=1e-9))
    calls = update(engine, 5, FakeVLLM([["working", "ready"]]))
    assert calls == [each for each in STAGED if each != "policy_staged"] and engine.version == 5


def test_with_stage_off_nothing_is_staged():
    engine = VLLMEngine(RolloutConfig(stage="off"))
    assert update(engine, 0, FakeVLLM([[]])) == ["pause", "policy_swap", "resume"]


# ------------------------------------------------------------------ the swap in a worker process


class FakeRunner:
    def __init__(self) -> None:
        self.requests = {"r-12345678": SimpleNamespace(output_token_ids=[1, 2, 3])}
        self.loads = 0

    def reload_weights(self, weights_iterator):
        self.loads += 1

    def get_model(self):
        return nn.Module()


def worker_process(monkeypatch, flip):
    monkeypatch.setattr("workers.engines.vllm_extension.pack_tied_heads", lambda model: None)
    worker = PolicyExtension()
    worker.model_runner = FakeRunner()
    worker._policy_staging = SimpleNamespace(flip=flip, drop=lambda: None)
    return worker


def broken(version):
    raise RuntimeError("half way")


@pytest.mark.parametrize(
    ("flip", "loaded", "loads"),
    [
        (lambda version: version == 7, "", 0),
        (lambda version: version == 8, "not staged", 1),
        (broken, "the flip failed: RuntimeError: half way", 1),
    ],
)
def test_what_is_not_flipped_is_loaded(monkeypatch, flip, loaded, loads):
    worker = worker_process(monkeypatch, flip)
    assert worker.policy_swap(7, []) == {"counts": {"r-12345678": 3}, "loaded": loaded}
    assert worker.model_runner.loads == loads
