"""A whole run with a real vLLM worker: the engine that users have, on the path that users take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.runs import LocalRun

START_S = 180.0


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_trainer_and_vllm_agree_on_every_step_of_a_synchronous_run(
    tmp_path: Path, s3_url: str, tiny_model: Path
):
    """With max_lag = 0 every token is trained by the version that sampled it, so pi and mu differ only by the
    arithmetic of two programs."""
    settings = {
        "sampling": {"group_size": 8, "max_tokens": 10},
        "orchestrator": {"max_lag": 0, "batch_groups": 8},
        "trainer": {"steps": 12},
        "eval": {"every": 0},
    }
    with LocalRun(tmp_path, s3_url, tiny_model, **settings) as run:
        trainer = run.start_trainer()
        # On one core: threads of an engine that wait for each other on shared ones take what everybody else needs.
        core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        worker = run.start_worker("vllm", "--set", f"rollout.cpu_bind={core}", engine="vllm")
        assert run.finish(trainer, 2 * START_S) == 0, run.logs()
        assert run.finish(worker, 60.0) == 0, run.logs()
        rows = [row for row in run.metrics() if "reward/mean" in row]
        assert [row["step"] for row in rows] == list(range(1, 13))
        for row in rows:
            assert row["lag/max"] == 0
            assert row["mismatch_lag0/tokens"] == row["tokens"] > 0
            assert row["mismatch_lag0/abs_logprob"] < 0.02, row
            assert row["mismatch_lag0/kl_k3"] < 0.01, row
            assert row["mismatch/abs_logprob"] == pytest.approx(row["mismatch_lag0/abs_logprob"])
        assert "quarantined" not in run.log("trainer"), "an honest engine is left alone"
