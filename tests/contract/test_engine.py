"""What every rollout engine promises (workers/engines/base.py). One start of each engine serves the whole file."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from async_rl.errors import EngineError
from tests.rollout_support import BLOCK, END, VOCAB, Truth, until, write_model
from workers.engines import Engine, make_engine
from workers.engines.shards import find_shards
from workers.rollout_settings import RolloutConfig

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

MAX_SEQUENCES = 16
BF16 = 0.15
"""Logits of these models reach 8, where neighbours in bfloat16 are 1/32 apart; two of them and a sum."""


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["reference", pytest.param("vllm", marks=pytest.mark.vllm)]
)
async def engine(request, policies):
    engine = make_engine(RolloutConfig(engine=request.param, max_sequences=MAX_SEQUENCES, kv_cache_gib=0.1))
    with changing(policies["a"]) as folder:
        await engine.start(folder, 0)
    yield engine
    await engine.close()
    assert not multiprocessing.active_children(), "an engine leaves no process behind"
    with pytest.raises(EngineError):
        await sample(engine, [5, 6])


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> dict[str, Path]:
    """Five policies of one architecture; m0 to m2 are memoryless."""
    folder = tmp_path_factory.mktemp("policies")
    made = {name: write_model(folder / name, seed) for seed, name in enumerate("ab")}
    for seed in range(3):
        made[f"m{seed}"] = write_model(folder / f"m{seed}", 10 + seed, memoryless=True)
    return made


@pytest.fixture(scope="module")
def truths(policies) -> dict[str, Truth]:
    return {name: Truth(folder) for name, folder in policies.items()}


@contextmanager
def changing(folder: Path) -> Iterator[Path]:
    """A copy whose weights are overwritten in place afterwards: that is what the next delta does to the files of
    the version before, while the engine serves it."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        yield Path(copy)
        for shard in find_shards(Path(copy)):
            with shard.open("r+b") as file:
                length = int.from_bytes(file.read(8), "little")
                file.seek(8 + length)
                file.write(b"\xff" * (shard.stat().st_size - 8 - length))


names = itertools.count()


async def sample(engine: Engine, prompt, *, seed=0, temperature=1.0, max_tokens=24, name=None):
    request_id = name or f"r{next(names)}"
    return await engine.generate(
        prompt, seed=seed, temperature=temperature, max_tokens=max_tokens, request_id=request_id
    )


async def swap(engine: Engine, folder: Path) -> int:
    """Serve `folder` as the next version."""
    with changing(folder) as copy:
        update = await engine.update(engine.version + 1, find_shards(copy))
    assert update.version == engine.version
    return update.version


def prompt_of(number: int, length: int = 6) -> list[int]:
    return [2 + (number * 7 + i * 5) % (VOCAB - 2) for i in range(length)]


async def test_an_engine_serves_its_last_update_alone_and_a_version_that_comes_back_says_the_same_bit_for_bit(
    engine, policies, truths
):
    """The first of the file, so that the answers before any update are a start's. The files are overwritten after
    the start and after every update."""
    said = []
    for name in ("a", "b", "a"):
        if said or engine.version:
            await swap(engine, policies[name])
        answers = [await sample(engine, prompt_of(i), seed=i) for i in range(4)]
        for i, c in enumerate(answers):
            assert np.abs(c.logprobs - truths[name].logprobs(prompt_of(i), c.tokens)).mean() < BF16
        said.append([(c.tokens.tolist(), c.logprobs.tolist()) for c in answers])
    assert said[0] == said[2] != said[1]
    assert getattr(engine, "staging", True), "this engine has found a reason to load in the pause"


async def test_a_completion_ends_at_the_end_token_or_at_its_limit(engine):
    completions = await asyncio.gather(
        *(sample(engine, prompt_of(i), seed=i, temperature=2.0, max_tokens=40) for i in range(32))
    )
    assert {c.finish for c in completions} == {"stop", "length"}
    for c in completions:
        assert c.tokens.dtype == np.int32 and c.logprobs.dtype == np.float32
        assert len(c.tokens) == len(c.logprobs) and (c.logprobs <= 0).all()
        assert c.spans == ((engine.version, len(c.tokens)),)
        assert END not in c.tokens[:-1]
        assert (c.tokens[-1] == END) if c.finish == "stop" else len(c.tokens) == 40


async def test_the_same_seed_draws_the_same_and_another_draws_otherwise(engine):
    first = await sample(engine, prompt_of(1), seed=5)
    again = await sample(engine, prompt_of(1), seed=5)
    other = await sample(engine, prompt_of(1), seed=2**63 + 6)
    assert first.tokens.tolist() == again.tokens.tolist()
    assert first.tokens.tolist() != other.tokens.tolist()


async def test_behaviour_logprobs_are_of_the_distribution_at_the_sampling_temperature(
    engine, policies, truths
):
    await swap(engine, policies["a"])
    for temperature in (0.7, 1.0, 1.5):
        completions = await asyncio.gather(
            *(sample(engine, prompt_of(i), seed=i, temperature=temperature) for i in range(8))
        )
        for i, c in enumerate(completions):
            expected = truths["a"].logprobs(prompt_of(i), c.tokens, temperature)
            assert np.abs(c.logprobs - expected).mean() < BF16 / temperature


async def test_samples_follow_the_distribution_whose_logprobs_they_carry(engine, policies, truths):
    """512 draws of a first token: no frequency is further than five standard deviations from its probability."""
    await swap(engine, policies["a"])
    draws = await asyncio.gather(*(sample(engine, prompt_of(3), seed=i, max_tokens=1) for i in range(512)))
    counts = np.bincount([int(c.tokens[0]) for c in draws], minlength=VOCAB)
    p = np.exp([truths["a"].logprobs(prompt_of(3), [token])[0] for token in range(VOCAB)])
    assert (np.abs(counts / 512 - p) <= 5 * np.sqrt(p * (1 - p) / 512) + 0.02).all()


async def test_every_token_names_the_version_whose_weights_sampled_it(engine, policies, truths):
    """Weights that are swapped under running requests. A memoryless policy gives each token a logprob that shows
    which weights it came from, without any help of the engine's own counts."""
    start = await swap(engine, policies["m0"])
    order = ["m0", "m1", "m2", "m0", "m1"]
    prompts = [prompt_of(i) for i in range(MAX_SEQUENCES)]
    running = [
        asyncio.create_task(
            sample(engine, prompt, seed=i, max_tokens=300, name=f"swap{i}", temperature=1.3)
        )
        for i, prompt in enumerate(prompts)
    ]
    for name in order[1:]:
        mark = engine.load().tokens + 8 * MAX_SEQUENCES
        await until(
            lambda mark=mark: engine.load().tokens >= mark or all(t.done() for t in running), "tokens"
        )
        await swap(engine, policies[name])
    completions = await asyncio.gather(*running)

    told_apart = boundaries = 0
    for prompt, c in zip(prompts, completions, strict=True):
        assert sum(count for _, count in c.spans) == len(c.tokens)
        assert [version for version, _ in c.spans] == sorted({version for version, _ in c.spans})
        by_policy = {name: truths[name].logprobs(prompt, c.tokens, 1.3) for name in set(order)}
        at = 0
        for version, count in c.spans:
            name = order[version - start]
            wrong = np.abs(c.logprobs - by_policy[name])[at : at + count]
            assert wrong.max() < BF16, f"version {version} did not sample token {at + int(wrong.argmax())}"
            if at:  # would the token on either side of the boundary have been noticed in the other span?
                before = order[version - start - 1]
                boundaries += 2
                told_apart += abs(c.logprobs[at] - by_policy[before][at]) > BF16
                told_apart += abs(c.logprobs[at - 1] - by_policy[name][at - 1]) > BF16
            at += count
    assert boundaries >= 20, "too few requests lived through a swap: the test shows nothing"
    assert told_apart > 0.7 * boundaries


async def test_a_request_that_starts_after_an_update_owes_nothing_to_the_old_weights(
    engine, policies, truths
):
    """The prompts share whole cache blocks, which the old weights have computed; some requests are still queued
    when the weights change."""
    await swap(engine, policies["a"])
    shared = prompt_of(9, 3 * BLOCK)
    before = await sample(engine, [*shared, 7], seed=1)
    count = 3 * MAX_SEQUENCES
    waiting = [
        asyncio.create_task(sample(engine, [*shared, 2 + i], seed=i, max_tokens=30, name=f"cache{i}"))
        for i in range(count)
    ]
    await until(lambda: sum(engine.progress(f"cache{i}") > 0 for i in range(count)) >= 4, "some to begin")
    version = await swap(engine, policies["b"])
    after = await sample(engine, [*shared, 7], seed=1)
    completions = await asyncio.gather(*waiting)

    assert before.tokens.tolist() != after.tokens.tolist()
    fresh = [([*shared, 7], after)]
    fresh += [
        ([*shared, 2 + i], c) for i, c in enumerate(completions) if c.spans == ((version, len(c.tokens)),)
    ]
    assert len(fresh) > MAX_SEQUENCES, "the queued ones started under the new version"
    for prompt, c in fresh:
        ours = np.abs(c.logprobs - truths["b"].logprobs(prompt, c.tokens)).mean()
        assert ours < BF16, f"off by {ours:.2f}: not the new weights alone"
        assert np.abs(c.logprobs - truths["a"].logprobs(prompt, c.tokens)).mean() > 3 * BF16


async def test_an_update_that_is_no_new_state_of_this_model_is_refused_and_nothing_changes(
    engine, policies, truths, tmp_path
):
    version = await swap(engine, policies["a"])
    running = asyncio.create_task(sample(engine, prompt_of(4), seed=4, max_tokens=60))
    other = write_model(tmp_path / "other", 3, layers=1)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(find_shards(policies["b"])[0].read_bytes()[:-100])
    for shards, said in (
        (find_shards(other), "another model"),
        ([cut], "cut short"),
        ([tmp_path / "missing.safetensors"], "missing.safetensors"),
    ):
        with pytest.raises(EngineError, match=said):
            await engine.update(version + 1, shards)
    with pytest.raises(EngineError, match="versions only grow"):
        await engine.update(version, find_shards(policies["b"]))
    assert engine.version == version and not engine.failed
    c = await running
    assert c.spans == ((version, len(c.tokens)),)
    assert np.abs(c.logprobs - truths["a"].logprobs(prompt_of(4), c.tokens)).mean() < BF16


async def test_a_prompt_over_the_limit_fails_alone(engine):
    good = asyncio.create_task(sample(engine, prompt_of(5)))
    with pytest.raises(EngineError, match=str(engine.max_model_len)):
        await sample(engine, prompt_of(0, engine.max_model_len + 1))
    assert len((await good).tokens) > 0
    assert not engine.failed


async def test_a_completion_can_fill_the_engine_to_its_last_token(engine):
    prompt = prompt_of(0, engine.max_model_len - 3)
    c = await sample(engine, prompt, max_tokens=50)
    assert c.finish == "stop" or len(c.tokens) == 3


async def test_progress_is_told_while_a_request_runs_and_a_cancelled_one_leaves_the_engine(
    engine, policies
):
    await swap(engine, policies["m0"])
    tasks = [
        asyncio.create_task(
            sample(engine, prompt_of(i), seed=i, max_tokens=450, name=f"gone{i}", temperature=0.5)
        )
        for i in range(4)
    ]
    await until(lambda: any(engine.progress(f"gone{i}") for i in range(4)), "a first token")
    assert engine.load().running > 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(engine.progress(f"gone{i}") == 0 for i in range(4))
    await until(lambda: engine.load().running == 0, "the engine to be empty")
    assert len((await sample(engine, prompt_of(8))).tokens) > 0


async def test_more_requests_than_fit_are_queued_and_all_are_served(engine):
    tasks = [asyncio.create_task(sample(engine, prompt_of(i), seed=i)) for i in range(5 * MAX_SEQUENCES)]
    await until(lambda: engine.load().queued > 0, "a queue")
    assert all(len(c.tokens) for c in await asyncio.gather(*tasks))
    assert engine.load().queued == 0


async def test_the_load_tells_what_runs_what_waits_and_how_full_the_cache_is(engine):
    before = engine.load()
    assert (before.running, before.queued, before.cache_used) == (0, 0, 0.0)
    assert before.seats == MAX_SEQUENCES
    tasks = [asyncio.create_task(sample(engine, prompt_of(i), seed=i, max_tokens=100)) for i in range(24)]
    await until(lambda: engine.load().running == MAX_SEQUENCES, "every seat to be taken")
    full = engine.load()
    assert 0 < full.queued <= 24 - MAX_SEQUENCES
    if full.cache_tokens:  # a cache of fixed size
        await until(lambda: engine.load().cache_used > 0, "the cache to fill")
        used = engine.load().cache_used * full.cache_tokens
        assert 0 < used <= 24 * (6 + 100 + BLOCK), "in blocks of what runs"
    await asyncio.gather(*tasks)
    after = engine.load()
    assert (after.running, after.queued, after.cache_used, after.preempted) == (0, 0, 0.0, 0)


async def test_an_engine_that_dies_fails_every_running_request_and_says_why(engine, monkeypatch):
    """The last of the file: nothing runs on this engine afterwards."""
    tasks = [asyncio.create_task(sample(engine, prompt_of(i), seed=i, max_tokens=450)) for i in range(8)]
    await until(lambda: engine.load().running > 0, "requests")
    mark = engine.load().tokens + 8
    await until(lambda: engine.load().tokens >= mark or all(t.done() for t in tasks), "tokens")
    children = multiprocessing.active_children()
    if children:
        for child in children:
            child.kill()
    else:

        def broken(*_, **__):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(engine._batch, "_forward", broken)
    tasks.append(asyncio.create_task(sample(engine, prompt_of(99), max_tokens=450)))
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20.0)
    assert isinstance(outcomes[-1], EngineError)
    assert all(isinstance(o, EngineError) or len(o.tokens) for o in outcomes)
    assert engine.failed
    with pytest.raises(EngineError):
        await sample(engine, prompt_of(1))
