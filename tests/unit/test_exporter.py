"""/metrics and /health over HTTP: what Prometheus reads, and what nothing that happens there may do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from async_rl import exporter, wire
from async_rl.cli.runfile import read_run_file
from async_rl.errors import ConfigError
from async_rl.exporter import Exporter, Health, address_of
from async_rl.gauges import METRICS, Reading, of_view, of_worker
from async_rl.view.model import WorkerView, of_status
from orchestrator.exported import ExportedStatus
from tests.orchestration import TRAINER, Play
from workers.exported_trainer import ExportedTrainer

LIMIT_S = 10.0
ROOT = Path(__file__).resolve().parents[2]
LINE = {
    "step": 3,
    "reward/mean": 0.5,
    "loss": -0.1,
    "grad_norm": 1.5,
    "entropy": None,
    "mismatch/kl_k3": 0.001,
    "mismatch/kl_k3_max": 0.5,
    "ratio/mean": 1.01,
    "ratio/max": 3.0,
    "ess/token": 0.9,
    "ess/sequence": 0.5,
    "chi_square": 0.02,
    "finish/length": 0.25,
    "length/mean": 12.5,
    "mfu": None,
    "alerts/low_ess": 2,
    "refused/total": 1,
    "tokens": 400,
    "dropped/lag": 2,
    "time/step_s": 2.0,
    "time/wait_batch_s": 0.5,
}


class Given:
    """A source that says what the test wants."""

    run = "r"

    def __init__(self, *readings: Reading, health: Health | None = None) -> None:
        self._readings, self._health = readings, health or Health(True)

    def readings(self):
        return self._readings

    def health(self):
        return self._health


def get(address, path):
    """Status and body."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scraped(source):
    """{name: {labels: value}} as Prometheus' own parser reads it."""
    with Exporter("0", source) as exporter:
        status, text = get(exporter.address, "/metrics")
    assert status == 200, text
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_page_of_names_is_the_table_in_the_code():
    page = (ROOT / "docs/metrics.md").read_text()
    listed = [line for line in page.splitlines() if line.startswith("| async_rl_")]
    assert listed == [
        f"| {m.name} | {m.kind} | {', '.join(m.labels)} | {m.by} | {m.help} |" for m in METRICS
    ]
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_the_orchestrators_readings_are_what_its_status_says_and_prometheus_reads_them():
    play = Play(max_lag=4)
    play.attach()
    worker = play.join(version=0)
    play.say(TRAINER, wire.Published(1, 1, 2))
    play.say(worker, wire.Heartbeat(0, "serving", tokens_per_s=80.0, cache_used=0.5))
    status = msgspec.structs.replace(play.status(), lag_counts={0: 3, 2: 1}, dropped={"lag": 2})
    found = scraped(Given(*of_view(of_status(status))))
    assert found["async_rl_version", "r"] == 1 and found["async_rl_step", "r"] == 2
    assert found["async_rl_worker_lag_steps", "here", "r", "w1"] == 2
    assert found["async_rl_worker_lag_versions", "here", "r", "w1"] == 1
    assert found["async_rl_worker_cache_used_ratio", "here", "r", "w1"] == 0.5
    assert found["async_rl_worker_state", "here", "r", "serving", "w1"] == 1
    assert found["async_rl_worker_state", "gone", "here", "r", "w1"] == 0
    assert found["async_rl_groups_dropped_total", "lag", "r"] == 2
    assert found["async_rl_trained_lag_steps_bucket", "1.0", "r"] == 3
    assert found["async_rl_trained_lag_steps_count", "r"] == 4
    assert found["async_rl_trained_lag_steps_sum", "r"] == 2
    assert not any(name == "async_rl_reward" for name, *_ in found), "there was no batch: absent, not nan"


def test_what_is_unknown_is_absent_and_a_worker_that_is_gone_serves_nothing():
    view = WorkerView(worker="w", cluster="c", state="gone", version=3, lag=9, last_seen_s=40.0)
    found = scraped(Given(*of_worker(view)))
    assert found["async_rl_worker_last_seen_seconds", "c", "r", "w"] == 40.0
    assert not any(name in ("async_rl_worker_version", "async_rl_worker_lag_steps") for name, *_ in found)


def test_all_processes_use_the_names_of_the_table():
    names = {metric.name for metric in METRICS}
    everything = WorkerView(
        worker="w",
        cluster="c",
        state="serving",
        **{
            name: 1
            for name in WorkerView.__struct_fields__
            if name not in ("worker", "cluster", "state", "why")
        },
    )
    trainer = ExportedTrainer("r", 1, 60.0, lambda: 0.0)
    trainer.step(LINE, [0, 1], 2)
    of_one = {reading.name for reading in of_worker(everything)}
    assert {name for name in names if "_worker_" in name} == of_one
    assert {reading.name for reading in trainer.readings()} <= names


def test_the_trainer_counts_its_steps_and_is_stuck_when_they_stop():
    now = [100.0]
    trainer = ExportedTrainer("r", 7, 60.0, lambda: now[0])
    trainer.attached(2, 4)
    for lags in ([0, 0, 1], [2]):
        now[0] += 10.0
        trainer.step(LINE, lags, 2)
    now[0] += 5.0
    found = scraped(trainer)
    assert found["async_rl_trained_tokens_total", "r"] == 800
    assert found["async_rl_trained_tokens_per_second", "r"] == 200
    assert found["async_rl_trainer_waited_seconds_total", "r"] == 1.0
    assert found["async_rl_trainer_up_seconds_total", "r"] == 25.0
    assert found["async_rl_checkpoint_age_seconds", "r"] == 15.0
    assert found["async_rl_trained_lag_steps_count", "r"] == 4
    assert found["async_rl_groups_dropped_total", "lag", "r"] == 2
    assert found["async_rl_incarnation", "r"] == 7 and found["async_rl_max_lag_steps", "r"] == 4
    assert ("async_rl_entropy", "r") not in found and ("async_rl_mfu_ratio", "r") not in found
    assert found["async_rl_ess_token_ratio", "r"] == 0.9 and found["async_rl_ratio_max", "r"] == 3.0
    assert found["async_rl_alerts_total", "low_ess", "r"] == 2
    assert trainer.health().ok
    now[0] += 60.0
    with Exporter("0", trainer) as exporter:
        status, body = get(exporter.address, "/health")
        assert status == 503 and "no step was finished for 65 s" in json.loads(body)["reason"]
        trainer.finished()
        assert get(exporter.address, "/health")[0] == 200, "the last evaluation has a limit of its own"


async def test_the_orchestrator_is_asked_in_its_loop_and_without_a_trainer_it_is_not_healthy():
    play = Play()
    threads = []

    def status():
        threads.append(threading.current_thread())
        return play.control.status(play.now)

    with Exporter("0", ExportedStatus(asyncio.get_running_loop(), status)) as exporter:
        code, body = await asyncio.to_thread(get, exporter.address, "/health")
        assert code == 503 and "no trainer" in json.loads(body)["reason"]
        play.attach()
        code, body = await asyncio.to_thread(get, exporter.address, "/health")
        assert code == 200 and json.loads(body)["trainer"] == "training"
        code, text = await asyncio.to_thread(get, exporter.address, "/metrics")
        assert code == 200 and 'async_rl_step{run="run"} 0.0' in text
    assert set(threads) == {threading.current_thread()}


def test_a_loop_that_hangs_is_not_healthy(monkeypatch):
    monkeypatch.setattr("orchestrator.exported.ANSWER_S", 0.05)
    loop = asyncio.new_event_loop()  # nobody runs it
    source = ExportedStatus(loop, lambda: pytest.fail("it hangs"))
    with Exporter("0", source) as exporter:
        code, body = get(exporter.address, "/health")
        assert code == 503 and "has not answered" in json.loads(body)["reason"]
        assert get(exporter.address, "/metrics")[0] == 503
    loop.close()


def test_what_goes_wrong_in_a_scrape_costs_one_answer():
    source = Given(Reading("async_rl_not_in_the_table", 1.0))
    with Exporter("0", source) as exporter:
        status, body = get(exporter.address, "/metrics")
        assert status == 503 and "not_in_the_table" in body
        assert get(exporter.address, "/health") == (200, '{"ok": true, "reason": ""}')
        assert get(exporter.address, "/other")[0] == 404


def test_a_taken_port_is_a_clear_error_and_a_port_alone_is_on_loopback():
    with Exporter("0", Given()) as first:
        assert first.address.startswith("127.0.0.1:")
        port = first.address.partition(":")[2]
        with pytest.raises(ConfigError, match=f"can't serve metrics at 127.0.0.1:{port}") as caught:
            Exporter(port, Given())
        assert "--metrics" in caught.value.hint
    assert address_of(":9100") == address_of("9100") == ("127.0.0.1", 9100)
    assert address_of("0.0.0.0:1") == ("0.0.0.0", 1) and address_of("[::1]:1") == ("::1", 1)
    for wrong in ("", "host", "host:http", "1:2:99999"):
        with pytest.raises(ConfigError):
            address_of(wrong)


def test_addresses_that_collide_and_a_limit_below_an_allowed_wait_are_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nstore = "s3://b/p"\n[model]\npath = "m"\n')
    assert read_run_file(path, ('metrics.trainer="1"', 'metrics.orchestrator="2"')).metrics.trainer == "1"
    with pytest.raises(ConfigError, match="same address"):
        read_run_file(path, ('metrics.trainer="9100"', 'metrics.orchestrator=":9100"'))
    with pytest.raises(ConfigError, match="is not longer than trainer.batch_wait_s"):
        read_run_file(path, ('metrics.trainer="1"', "metrics.stuck_s=600"))


def test_clients_that_send_a_byte_now_and_then_lose_their_places(monkeypatch):
    monkeypatch.setattr(exporter, "REQUEST_LIMIT_S", 0.3)
    ended = threading.Event()

    def trickle(client):
        with contextlib.suppress(OSError):
            while not ended.wait(0.02):
                client.sendall(b"x")

    with Exporter("0", Given()) as served:
        host, port = exporter.address_of(served.address)
        slow = [socket.create_connection((host, port), LIMIT_S) for _ in range(exporter.AT_ONCE)]
        senders = [threading.Thread(target=trickle, args=(client,)) for client in slow]
        for sender in senders:
            sender.start()
        try:
            for client in slow:
                with contextlib.suppress(ConnectionError):
                    assert client.recv(1) == b"", "it is told to go"
            assert get(served.address, "/health")[0] == 200
        finally:
            ended.set()
            for sender, client in zip(senders, slow, strict=True):
                sender.join()
                client.close()
