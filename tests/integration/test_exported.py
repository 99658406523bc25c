"""Live processes over HTTP, and a worker's word in the bucket as `async-rl lag --store` shows it."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from prometheus_client.parser import text_string_to_metric_families

from async_rl.exporter import Exporter, MetricsConfig
from async_rl.view.bucket import BucketWatch
from async_rl.wire import Announce
from tests.integration import test_trainer_loop as loop
from tests.integration.test_rollout_worker import lease, world  # noqa: F401
from tests.integration.test_trainer_loop import model  # noqa: F401
from tests.rollout_support import until
from tests.unit.test_exporter import get
from workers import lead, trainer
from workers.exported_worker import ExportedWorker


def values(text: str) -> dict[str, float]:
    families = text_string_to_metric_families(text)
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if "state" not in sample.labels
    }


async def test_a_worker_tells_what_it_serves_and_how_far_it_is_behind(world):  # noqa: F811
    async with world() as w:
        with Exporter("0", ExportedWorker(asyncio.get_running_loop(), w.worker)) as exporter:

            async def ask(path: str) -> tuple[int, str]:
                return await asyncio.to_thread(get, exporter.address, path)

            status, body = await ask("/health")
            assert status == 503 and "it does not serve: starting" in body
            await w.serve()
            status, body = await ask("/health")
            assert status == 200 and '"orchestrator": "connected"' in body
            await w.fulfil(lease())
            await w.orchestrator.say(Announce(0, 0))
            await until(lambda: w.worker.newest == (0, 0), "the announcement")
            status, text = await ask("/metrics")
            assert status == 200
            found = values(text)
            assert found["async_rl_worker_version"] == 0 and found["async_rl_worker_lag_steps"] == 0
            assert "async_rl_worker_lag_versions" not in found, "only the orchestrator knows"

            watch = BucketWatch(w.store, w.trainer.run)
            await until(
                lambda: [each.version for each in watch.look().workers] == [0], "its word in the bucket"
            )
            (seen,) = watch.look().workers
            assert (seen.worker, seen.state, seen.lag, seen.why) == ("w1", "serving", 0, "current")


def test_a_trainer_tells_its_steps_versions_and_waits(tmp_path, model, monkeypatch):  # noqa: F811
    answers = {}

    class AskedAtTheEnd(Exporter):
        def close(self) -> None:
            answers.update({path: get(self.address, path) for path in ("/metrics", "/health")})
            super().close()

    monkeypatch.setattr(lead, "Exporter", AskedAtTheEnd)
    monkeypatch.setattr(
        loop, "run_rank", partial(trainer.run_rank, metrics_config=MetricsConfig(trainer="0"))
    )
    with loop.orchestrator() as script:
        loop.train(tmp_path, model, script, steps=3, checkpoint_every=2)
    (status, text), (health, body) = answers["/metrics"], answers["/health"]
    assert (status, health) == (200, 200), body
    found, steps = values(text), [line for line in loop.metrics(tmp_path) if "reward/mean" in line]
    assert (found["async_rl_step"], found["async_rl_version"]) == (3, 3)
    assert found["async_rl_trained_tokens_total"] == sum(line["tokens"] for line in steps)
    assert found["async_rl_trained_lag_steps_count"] == sum(line["samples"] for line in steps)
    assert found["async_rl_loss"] == pytest.approx(steps[-1]["loss"], rel=1e-4)
    assert found["async_rl_published_bytes_total"] > 0 and found["async_rl_publish_seconds"] > 0
    assert found["async_rl_max_lag_steps"] == 1
