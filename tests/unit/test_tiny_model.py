"""The tiny model, its tokenizer and its warm-up."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.cli.model import command
from async_rl.envs import EnvironmentConfig, make_environment
from async_rl.errors import ConfigError, TrainingError
from workers import warm_up
from workers.pretrained import load_causal_lm
from workers.tiny_model import END, PAD, TinySettings, finished, make_tiny_model, new_model, new_tokenizer
from workers.warm_up import GOAL, Measure, Task, held_out_reward, sample

RANDOM = TinySettings(steps=0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products: threads cost more than they give, and nothing where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return new_tokenizer()


@pytest.fixture(scope="module")
def task(tokenizer) -> Task:
    return Task(make_environment(EnvironmentConfig("reverse")), tokenizer, END, PAD)


# ---------------------------------------------------------------- the tokenizer and the folder


@given(st.text(string.ascii_letters + string.digits + string.punctuation + " \n", max_size=30))
@settings(deadline=None)
def test_every_character_is_one_token_and_text_comes_back_unchanged(text: str):
    tokenizer = new_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if "<|" not in text:
        assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_the_chat_template_ends_where_the_assistant_begins(tokenizer):
    chat = [{"role": "system", "content": "brief"}, {"role": "user", "content": "abc"}]
    asked = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert asked == "<|begin|><|system|>brief<|user|>abc<|assistant|>"
    answered = tokenizer.apply_chat_template(
        [*chat, {"role": "assistant", "content": "cba"}], tokenize=False
    )
    assert answered == asked + "cba<|end|>"
    ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
    assert len(ids) == len("brief" + "abc") + 4, "a role is one token"


def test_the_saved_folder_loads_with_the_auto_classes_bit_equal_and_in_bfloat16(tmp_path: Path, tokenizer):
    from transformers import AutoTokenizer

    made = make_tiny_model(tmp_path / "m", RANDOM)
    assert 0.9e6 < made.parameters < 1.1e6
    assert finished(tmp_path / "m") == made
    loaded = load_causal_lm(tmp_path / "m", dtype="auto", attention="sdpa")
    torch.manual_seed(RANDOM.seed)
    expected = new_model().to(torch.bfloat16).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)), name
    again = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert again.chat_template == tokenizer.chat_template
    assert again("ab<|end|>", add_special_tokens=False) == tokenizer("ab<|end|>", add_special_tokens=False)
    assert (again.eos_token_id, again.pad_token_id) == (
        loaded.config.eos_token_id,
        loaded.config.pad_token_id,
    )


def test_another_seed_makes_another_model(tmp_path: Path):
    weights = []
    for seed in (0, 1):
        make_tiny_model(tmp_path / str(seed), TinySettings(seed=seed, steps=0))
        weights.append((tmp_path / str(seed) / "model.safetensors").read_bytes())
    assert weights[0] != weights[1]


def test_a_folder_that_holds_something_else_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not empty"):
        make_tiny_model(tmp_path, RANDOM)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    make_tiny_model(tmp_path, RANDOM, force=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_run_that_was_stopped_in_the_middle_leaves_no_finished_model(tmp_path: Path, monkeypatch):
    make_tiny_model(tmp_path, RANDOM)

    def stop(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("workers.tiny_model.warm_up", stop)
    with pytest.raises(KeyboardInterrupt):
        make_tiny_model(tmp_path, TinySettings(steps=10), force=True)
    assert finished(tmp_path) is None


# ---------------------------------------------------------------- the command


def test_the_command_reuses_a_finished_model_with_the_same_settings_only(tmp_path: Path):
    out = tmp_path / "m"

    def tiny(*args: str):
        return CliRunner().invoke(command, ["tiny", "--out", str(out), "--steps", "0", *args])

    first = tiny()
    assert first.exit_code == 0 and "is ready" in first.output and "random weights" in first.output
    written = (out / "model.safetensors").stat().st_mtime_ns
    second = tiny()
    assert second.exit_code == 0 and "used again" in second.output
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    other = tiny("--seed", "1")
    assert isinstance(other.exception, ConfigError)
    assert tiny("--seed", "1", "--force").exit_code == 0
    assert finished(out).settings.seed == 1


# ---------------------------------------------------------------- sampling and the warm-up


class Scripted(torch.nn.Module):
    """Says the same tokens whatever it is asked, and records what it is given."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.tokens = tokens
        self.calls: list[dict[str, torch.Tensor]] = []

    def forward(self, **inputs):
        self.calls.append(inputs)
        logits = torch.full((inputs["input_ids"].shape[0], 1, 20), -1e9)
        logits[:, :, self.tokens[len(self.calls) - 1]] = 0.0
        return type("Output", (), {"logits": logits, "past_key_values": None})


def test_sampling_stops_at_the_end_token_and_at_the_limit():
    generator = torch.Generator()
    assert sample(Scripted([9, 8, END, 7]), [[5, 6], [5]], 4, END, PAD, generator) == [[9, 8], [9, 8]]
    assert sample(Scripted([9, 8, 7, 6]), [[5, 6], [5]], 3, END, PAD, generator) == [[9, 8, 7], [9, 8, 7]]


def test_sampling_pads_on_the_left_and_counts_positions_from_the_first_real_token():
    model = Scripted([9, 8])
    sample(model, [[5, 6, 7], [5]], 2, END, PAD, torch.Generator())
    first, second = model.calls
    assert first["input_ids"].tolist() == [[5, 6, 7], [PAD, PAD, 5]]
    assert first["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert first["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]
    assert second["position_ids"].tolist() == [[3], [1]]


def test_a_batched_sample_has_the_probabilities_of_its_sequence_alone(monkeypatch):
    """Cache, padding and positions are right: a forward pass without any of them agrees."""
    torch.manual_seed(1)
    model = new_model()
    steps: list[torch.Tensor] = []

    def likeliest(probabilities: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
        steps.append(probabilities)
        return probabilities.argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", likeliest)
    prompts = [[5, 6, 7, 20], [5, 30], [8, 9, 10, 11, 12, 13]]
    completions = sample(model, prompts, 5, END, PAD, torch.Generator())
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
        for i in range(len(completion)):
            expected = logits[len(prompt) - 1 + i].softmax(-1)
            torch.testing.assert_close(steps[i][row], expected, rtol=1e-3, atol=1e-6)


def test_the_warm_up_stops_inside_its_goal_and_takes_back_a_jump_over_it(task: Task, monkeypatch):
    """Scripted rewards: below, over, below, inside."""
    rewards = iter([0.1, 0.6, 0.2, 0.35])
    weights, measured = [], []

    def measure(model, task) -> float:
        weights.append(model.weight.detach().clone())
        return next(rewards)

    def step(model, task, optimizer, *, first: int, blur: float) -> float:
        with torch.no_grad():
            model.weight += optimizer.param_groups[0]["lr"]
        return 1.0

    monkeypatch.setattr(warm_up, "held_out_reward", measure)
    monkeypatch.setattr(warm_up, "_supervised_step", step)
    model = torch.nn.Linear(1, 1, bias=False)
    steps = warm_up.warm_up(model, task, 100, measured.append)
    assert steps == 20 and [m.reward for m in measured] == [0.1, 0.6, 0.2, 0.35]
    assert weights[1] > weights[0], "the second stretch jumped over the goal"
    full, half = weights[1] - weights[0], weights[2] - weights[0]
    assert half > 0, "and was begun again from where the first had ended"
    ramp = sum(range(11, 16)) / sum(range(6, 11))  # both stretches lie in the rise of the rate
    assert half == pytest.approx(float(full) * ramp / 2, rel=1e-3), "with half the learning rate"


def test_a_blurred_warm_up_learns_the_task_first_and_then_doubt(task: Task, monkeypatch):
    """Scripted rewards: unknown, known; then too sure, too unsure, inside."""
    rewards = iter([0.5, 0.95, 0.8, 0.1, 0.4])
    steps: list[tuple[float, float]] = []

    def step(model, task, optimizer, *, first: int, blur: float) -> float:
        steps.append((blur, optimizer.param_groups[0]["lr"]))
        return 1.0

    monkeypatch.setattr(warm_up, "held_out_reward", lambda model, task: next(rewards))
    monkeypatch.setattr(warm_up, "_supervised_step", step)
    blurred = Task(task.environment, task.tokenizer, END, PAD, blur=0.7)
    assert warm_up.warm_up(torch.nn.Linear(1, 1), blurred, 100, lambda m: None) == 25
    assert [blur for blur, _ in steps] == [0.0] * 10 + [0.7] * 15
    assert steps[-1][1] == pytest.approx(steps[14][1] / 2, rel=0.5), "the second jump is half as long"


def test_a_warm_up_that_misses_its_goal_says_where_it_ended(task: Task, monkeypatch):
    monkeypatch.setattr(warm_up, "held_out_reward", lambda model, task: 0.9)
    monkeypatch.setattr(warm_up, "_supervised_step", lambda *_, **__: 1.0)
    with pytest.raises(TrainingError, match=r"held-out reward is 0\.90"):
        warm_up.warm_up(torch.nn.Linear(1, 1), task, 1000, lambda m: None)


def test_padded_rows_train_the_answers_and_nothing_else():
    ids, targets = warm_up._padded([[5, 6, 7], [5]], [[8, END], [9, 10, END]], PAD)
    assert ids.tolist() == [[5, 6, 7, 8, END], [5, 9, 10, END, PAD]]
    assert targets.tolist() == [[-100, -100, -100, 8, END], [-100, 9, 10, END, -100]]


def test_demonstrations_are_blurred_by_the_share_that_was_asked_for_and_end_where_they_should(task: Task):
    prompts = task.prompts("train", 0, 400)
    answers = task.answer_ids(prompts)
    assert task.demonstrations(prompts, 1, 0.0) == answers
    shown = task.demonstrations(prompts, 1, 0.5)
    assert shown == task.demonstrations(prompts, 1, 0.5) != task.demonstrations(prompts, 2, 0.5)
    letters = {token for answer in answers for token in answer[:-1]}
    assert {token for row in shown for token in row[:-1]} <= letters
    assert all(
        row[-1] == END and len(row) == len(answer) for row, answer in zip(shown, answers, strict=True)
    )
    pairs = [
        (a, b)
        for row, answer in zip(shown, answers, strict=True)
        for a, b in zip(row[:-1], answer, strict=False)
    ]
    wrong = sum(a != b for a, b in pairs) / len(pairs)
    assert abs(wrong - 0.5 * 0.9) < 0.05, "one random letter in ten is the right one"


@pytest.mark.slow
def test_the_tiny_model_is_right_now_and_then(tmp_path: Path):
    """The promise of `async-rl model tiny`: held-out reward 0.30 to 0.45, of the weights on disk."""
    measures: list[Measure] = []
    made = make_tiny_model(tmp_path, TinySettings(), on_measure=measures.append)
    assert measures[0].reward < 0.1 and GOAL[0] <= measures[-1].reward <= GOAL[1]
    assert made.steps == measures[-1].step
    assert 0.30 <= made.reward <= 0.45
    loaded = load_causal_lm(tmp_path, dtype="auto", attention="sdpa")
    saved = Task(make_environment(made.environment), new_tokenizer(), END, PAD)
    assert held_out_reward(loaded, saved) == pytest.approx(made.reward, abs=1e-3)
