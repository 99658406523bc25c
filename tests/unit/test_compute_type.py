"""Products are computed in bfloat16 where the processor can, and in float32 where it would emulate them."""

from __future__ import annotations

import pytest
import torch

from workers import compute_type
from workers.compute_type import compute_dtype, engine_dtype


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_trainer_and_engine_choose_alike_on_a_cpu(
    native: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_type, "_cpu_has_bfloat16", lambda: native)
    monkeypatch.setattr(compute_type, "_arm_has_bfloat16", lambda: False)
    assert compute_dtype("auto", torch.device("cpu")) is expected
    assert engine_dtype("auto", on_cpu=True) is expected


def test_on_a_gpu_it_is_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_type, "_cpu_has_bfloat16", lambda: False)
    assert compute_dtype("auto", torch.device("cuda", 0)) is torch.bfloat16
    assert engine_dtype("auto", on_cpu=False) is torch.bfloat16


def test_an_engine_uses_the_bfloat16_of_an_arm_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_type, "_cpu_has_bfloat16", lambda: False)
    monkeypatch.setattr(compute_type.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True}, raising=False)
    assert engine_dtype("auto", on_cpu=True) is torch.bfloat16
    assert compute_dtype("auto", torch.device("cpu")) is torch.float32


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_what_is_named_is_taken(name: str) -> None:
    assert engine_dtype(name, on_cpu=True) is getattr(torch, name)
