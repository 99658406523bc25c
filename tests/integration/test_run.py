"""Whole runs of real processes over ZeroMQ and a real bucket. The engine is the reference one, which starts
in seconds; test_run_vllm.py does the same with vLLM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from async_rl.procs import Child
from async_rl.store import open_store
from async_rl.store.local_server import free_ports
from async_rl.weights.lineage import list_versions, read_claims, read_manifest
from tests.runs import PACED, ROOT, START_S, LocalRun, assert_refused, cli
from tests.servers import S3Server
from tests.warm_start import WarmProcess, WarmStart

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def finished(
    seaweed: S3Server, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[LocalRun]:
    """A run of two ranks, from the first command to the end of everybody."""
    settings = {"trainer": {"steps": 4, "checkpoint_every": 4}, "eval": {"every": 2, "prompts": 8}}
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        seaweed.activate(patch)
        with LocalRun(folder, seaweed.new_url(), tiny_model, **settings) as run:
            trainer = run.start_trainer("--nproc-per-node", "2")
            worker = run.start_worker("w1")
            assert run.finish(trainer, 2 * START_S) == 0, run.logs()
            assert run.finish(worker, 30.0) == 0, "drained at the end: " + run.logs()
        yield run


def test_a_run_trains_publishes_and_finishes(finished: LocalRun, tmp_path: Path):
    """Two ranks: every step's metrics are there, every version is in the bucket, and the newest one, pulled,
    is bit-equal to the 16-bit weights of the trainer (read from its checkpoint)."""
    rows = [row for row in finished.metrics() if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["lag/max"] <= 2
        assert row["mismatch/abs_logprob"] >= 0 and row["mismatch/kl_k3"] >= 0
    evaluated = [row["eval/version"] for row in finished.metrics() if "eval/reward" in row]
    assert evaluated[0] == 0 and evaluated[-1] == 4
    store = open_store(finished.store_url)
    assert list_versions(store) == [0, 1, 2, 3, 4]
    assert [read_manifest(store, v).parent for v in range(5)] == [-1, 0, 1, 2, 3]

    policy = tmp_path / "policy"
    done = cli("weights", "pull", "newest", "--store", finished.store_url, "--out", str(policy))
    assert done.returncode == 0, done.stderr
    assert_equal_to_checkpoint(policy, finished.store_url, step=4)
    listed = cli("weights", "ls", "--store", finished.store_url, "--json")
    assert [json.loads(line)["step"] for line in listed.stdout.splitlines()] == [0, 1, 2, 3, 4]


def assert_equal_to_checkpoint(policy: Path, url: str, step: int) -> None:
    import torch
    from safetensors.torch import load
    from transformers import AutoModelForCausalLM

    store = open_store(url)
    prefix = f"checkpoints/{read_claims(store)[-1].incarnation:08d}-{step:010d}/"
    parts = [
        load(store.get(info.key)) for info in store.list_after(prefix) if info.key.endswith(".safetensors")
    ]
    assert len(parts) == 2, "one part per rank"
    loaded = AutoModelForCausalLM.from_pretrained(policy, dtype="auto")
    compared = 0
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == torch.bfloat16
        rows = [part[f"{name}/param"] for part in parts if f"{name}/param" in part]
        master = torch.cat(rows)
        assert torch.equal(parameter.view(torch.int16), master.to(torch.bfloat16).view(torch.int16)), name
        compared += 1
    assert compared > 10


@pytest.mark.usefixtures("forked_starts")
def test_workers_join_and_die_and_the_run_goes_on_until_ctrl_c_which_leaves_no_process_behind(
    tmp_path: Path, s3_url: str, tiny_model: Path
):
    """A second worker is used within one version of being ready; kill -9 of either does not end the run."""
    settings = {"trainer": {"steps": 400}, "orchestrator": {"heartbeat_s": 1.0}, "environment": PACED}
    with LocalRun(tmp_path, s3_url, tiny_model, **settings) as run:
        trainer = run.start_trainer()
        first = run.start_worker("first")
        run.wait("three steps", lambda: run.steps() >= 3, START_S, trainer, first)
        second = run.start_worker("second")
        ready = {}

        def used() -> bool:
            status = run.status()
            workers = {worker.worker: worker for worker in status.workers} if status else {}
            if "second" in workers and workers["second"].state == "serving":
                ready.setdefault("version", status.newest_version)
            if "second" not in workers or not workers["second"].leases:
                return False
            ready["used"] = status.newest_version
            return True

        run.wait("the second worker to hold a lease", used, START_S, trainer, first, second)
        assert run.status().newest_version - ready["version"] <= 1

        kill(run, first)
        steps_more(run, 3, trainer, second)
        kill(run, second)
        third = run.start_worker("third")
        steps_more(run, 3, trainer, third)
        status = run.status()
        assert status.lag_max <= status.max_lag
        families = [family(child.pid) for child in (trainer, third)]
        assert len(families[0]) >= 3, "the command, the orchestrator and a rank"
        for child in (trainer, third):
            child.process.send_signal(signal.SIGINT)
        for child in (trainer, third):
            run.finish(child, 60.0)
        run.wait("every process to be gone", lambda: not any(alive(p) for f in families for p in f), 10.0)


def kill(run: LocalRun, victim: Child) -> None:
    victim.signal_group(signal.SIGKILL)
    victim.process.wait(10)
    run.fleet.children.remove(victim)


def steps_more(run: LocalRun, count: int, *running: Child) -> None:
    goal = run.steps() + count
    run.wait(f"{count} more steps", lambda: run.steps() >= goal, START_S, *running)


@pytest.mark.usefixtures("forked_starts")
def test_of_two_trainers_exactly_one_goes_on(tmp_path: Path, s3_url: str, tiny_model: Path):
    with LocalRun(tmp_path, s3_url, tiny_model, trainer={"steps": 400}, environment=PACED) as run:
        older = run.start_trainer(name="older")
        worker = run.start_worker("w1")
        run.wait(
            "two versions", lambda: len(list_versions(open_store(s3_url))) >= 2, START_S, older, worker
        )
        newer = run.start_trainer(
            "--set",
            f"orchestrator.bind=tcp://127.0.0.1:{free_ports(1)[0]}",
            "--set",
            "trainer.out=out-newer",
            name="newer",
        )
        code = run.finish(older, START_S)
        assert code != 0
        assert "trainer incarnation 1 has taken the run" in run.log("older"), run.log("older")[-2000:]
        assert newer.running(), run.log("newer")[-2000:]
        claims = read_claims(open_store(s3_url))
        assert [c.incarnation for c in claims] == [claims[0].incarnation, claims[0].incarnation + 1]


def family(pid: int) -> list[int]:
    """`pid` and all that descend from it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in family(int(child)))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.usefixtures("forked_starts")
def test_another_model_on_the_same_run_is_refused_and_the_run_stays_as_it_was(
    finished: LocalRun, tmp_path: Path, tiny_model: Path
):
    store = open_store(finished.store_url)
    before = [info for info in store.list_after("") if not info.key.startswith(".probe")]
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_theta"] = 12345.0
    (other / "config.json").write_text(json.dumps(config))
    with LocalRun(tmp_path, finished.store_url, other) as run:
        trainer = run.start_trainer()
        assert_refused(run.finish(trainer, START_S), run.log("trainer"), "config.json")
    assert [info for info in store.list_after("") if not info.key.startswith(".probe")] == before


def test_a_forked_process_is_what_the_command_line_starts(warm_start: WarmStart, tmp_path: Path):
    """What the other tests rely on: its own folder, environment, log, status, group and modules."""
    (tmp_path / "sitecustomize.py").write_text("import os\nprint('in', os.getcwd(), os.environ['WHO'])\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "WHO": "me"}

    def start(*words: str) -> WarmProcess:
        argv = [sys.executable, "-m", "async_rl", *words]
        return warm_start.start(argv, environment, tmp_path, tmp_path / "log")

    assert start("no-such-command").wait(60.0) == 2
    said = (tmp_path / "log").read_text()
    assert f"in {tmp_path} me" in said and "No such command 'no-such-command'" in said

    worker = ("rollout", "--store", f"file://{tmp_path}/nowhere", "--orchestrator", "tcp://127.0.0.1:1")
    stopped, killed = start(*worker), start(*worker)
    wait_until(lambda: (tmp_path / "log").read_text().count("there is no run yet") == 2)
    assert stopped.poll() is None and os.getpgid(stopped.pid) == stopped.pid != os.getpgid(killed.pid)
    stopped.send_signal(signal.SIGTERM)
    os.killpg(killed.pid, signal.SIGKILL)
    assert (stopped.wait(60.0), killed.wait(60.0)) == (0, -signal.SIGKILL)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + START_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.05)
