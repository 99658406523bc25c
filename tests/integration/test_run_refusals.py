"""What a run of real processes is told when something is wrong: the store, the port, the environment."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import pytest

from async_rl.store import open_store
from async_rl.store.local_server import free_ports
from async_rl.weights.lineage import list_versions
from tests.runs import START_S, LocalRun, assert_refused, cli

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

QUICK = ("--set", "store.retry_limit_s=2", "--set", "store.connect_timeout_s=1")


@pytest.mark.usefixtures("forked_starts")
def test_a_store_that_can_not_be_used_is_named_with_what_to_do(tmp_path, s3_url, tiny_model, monkeypatch):
    nowhere = f"http://127.0.0.1:{free_ports(1)[0]}"
    cases = [
        (s3_url, {"AWS_ENDPOINT_URL": nowhere}, (nowhere,)),
        ("s3://no-such-bucket/x", {}, ("no-such-bucket", "store mb")),
        (s3_url, {"AWS_SECRET_ACCESS_KEY": "wrong"}, ("AWS_SECRET_ACCESS_KEY",)),
    ]
    with ExitStack() as stack:
        started = []
        for number, (url, environment, said) in enumerate(cases):
            run = stack.enter_context(LocalRun(tmp_path / str(number), url, tiny_model))
            with monkeypatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                started.append((run, run.start_trainer(*QUICK), said))
                started.append((run, run.start_worker("w1", *QUICK, engine="vllm"), said))
        for run, child, said in started:
            assert_refused(run.finish(child, START_S), run.log(child.name), *said)


def test_a_port_that_is_taken_is_named(tmp_path, s3_url, tiny_model):
    run = LocalRun(tmp_path, s3_url, tiny_model)
    with LocalRun(tmp_path / "first", s3_url + "-first", tiny_model) as holder:
        holder.fleet.start(
            "orchestrator",
            [
                sys.executable,
                "-m",
                "async_rl",
                "orchestrator",
                str(run.run_file),
                "--set",
                f"orchestrator.spool={tmp_path / 'own'}",
            ],
            log_path=tmp_path / "holder.log",
        )
        holder.wait("the port to be taken", lambda: run.status() is not None, 60.0)
        done = cli("trainer", str(run.run_file), cwd=tmp_path)
        assert_refused(done.returncode, done.stdout + done.stderr, run.address)


RAISES = '''
class Environment:
    """Gives prompts, and has no reward for any answer."""
    name = "broken"
    reward_range = (0.0, 1.0)

    def prompt(self, split, ordinal):
        from async_rl.wire import Prompt
        return Prompt(text="abc", answer="cba")

    async def reward(self, prompt, completion):
        import asyncio
        await asyncio.sleep(0.5)  # or the worker fails as fast as the processors let it, until the trainer gives up
        raise RuntimeError("the judge is out of office")
'''


@pytest.mark.usefixtures("forked_starts")
def test_an_environment_that_raises_is_shown_and_loses_nothing(tmp_path, s3_url, tiny_model):
    settings = {
        "environment": {"name": "broken_judge:Environment"},
        "orchestrator": {"max_attempts": 2},
        "trainer": {"steps": 2, "batch_wait_s": 30.0},
    }
    with LocalRun(tmp_path, s3_url, tiny_model, **settings) as run:
        for folder in ("trainer", "w1"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "broken_judge.py").write_text(RAISES)
        trainer, worker = run.start_trainer(), run.start_worker("w1")
        letters: list[tuple[str, str]] = []

        def dead_letters() -> bool:
            status = run.status()
            letters[:] = status.dead_letters if status else []
            return bool(letters)

        run.wait("a dead letter", dead_letters, START_S, trainer, worker)
        assert "the judge is out of office" in letters[0][1]
        assert run.finish(trainer, 60.0) != 0
        assert "no batch for step 0" in run.log("trainer")
        assert list_versions(open_store(s3_url)) == [0]
