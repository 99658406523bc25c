"""A user's own task: prompts and answers in a JSONL file, and a reward function named `module:function`.

    {"prompt": "Capital of France?", "answer": "Paris"}
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
    "answer": "4"}

A line's other fields reach the reward function as strings in `prompt.info`. Only the side that makes
prompts (the orchestrator) reads the file; a worker gets its prompts over the wire and needs the reward
function alone.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from async_rl.envs.base import Split
from async_rl.envs.draws import generator, hash_fraction
from async_rl.envs.named import load_function
from async_rl.errors import ConfigError, EnvironmentFailed
from async_rl.threads import in_daemon_thread
from async_rl.wire import Message, Prompt

__all__ = ["Jsonl", "JsonlArgs", "exact_match", "read_prompts", "split_prompts"]


class JsonlArgs(Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    """Of the JSONL file, on the machine of the orchestrator."""
    prompt: str = "prompt"
    """Field that holds the user's turn; a line may have `messages` instead."""
    messages: str = "messages"
    """Field that holds a whole chat: a list of {role, content}."""
    answer: str = "answer"
    """Field that holds the answer; a line without it has the empty answer."""
    system: str = ""
    """A system turn put before each `prompt` (not before `messages`)."""
    reward: str = "async_rl.envs.jsonl:exact_match"
    """`module:function`, called as function(prompt: async_rl.wire.Prompt, completion: str) -> float; may be
    async. A plain function runs in a thread of its own, so a slow one does not hold up generation, and one that
    hangs no other."""
    deterministic: bool = True
    """False where the function may give the same completion another reward (it samples, it asks a service): then
    the orchestrator does not score groups again."""
    reward_min: float = 0.0
    reward_max: float = 1.0
    eval_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    """Share of the different prompts that is held out; more than 0 holds out at least one."""
    seed: int = 0
    """Of the order in which prompts are drawn; it changes with every pass over the file."""

    def __post_init__(self) -> None:
        if not self.reward_min < self.reward_max:
            raise ConfigError(
                f"environment.args: reward_min {self.reward_min} is not under reward_max {self.reward_max}",
                hint="they are the range a reward must lie in",
            )


class Jsonl:
    """The `jsonl` environment."""

    name = "jsonl"
    arguments = JsonlArgs

    def __init__(self, args: JsonlArgs) -> None:
        self.args = args
        self.reward_range = (args.reward_min, args.reward_max)
        self.deterministic = args.deterministic
        self._function = load_function(args.reward, what="environment.args.reward")
        self._splits: dict[Split, list[Prompt]] | None = None  # read at the first prompt

    def prompt(self, split: Split, ordinal: int) -> Prompt:
        """Pass after pass over the split, each in an order of its own. Raises ConfigError for an unusable
        file."""
        if self._splits is None:
            self._splits = split_prompts(read_prompts(self.args), self.args.eval_fraction)
        prompts = self._splits[split]
        if not prompts:
            raise ConfigError(
                f"{self.args.path}: no prompt is left for the {split} split",
                hint="add lines, or change environment.args.eval_fraction",
            )
        turn, position = divmod(ordinal, len(prompts))
        return prompts[_order(len(prompts), self.args.seed, split, turn)[position]]

    async def reward(self, prompt: Prompt, completion: str) -> float:
        """Raises what the user's function raises, and EnvironmentFailed where it returns no number."""
        if inspect.iscoroutinefunction(self._function):
            value = await self._function(prompt, completion)
        else:
            value = await in_daemon_thread(self._function, prompt, completion)
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise EnvironmentFailed(
                f"the reward function {self.args.reward} returned {value!r}",
                hint="it must return one number",
            ) from error


def exact_match(prompt: Prompt, completion: str) -> float:
    """1 where the completion is the answer, spaces around both aside; else 0."""
    return float(completion.strip() == prompt.answer.strip())


def read_prompts(args: JsonlArgs) -> list[Prompt]:
    """Every line of the file, blank ones skipped. Raises ConfigError that names each bad line (the first
    ten)."""
    path = Path(args.path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"can't read the prompts in {path}: {error}", hint="check environment.args.path"
        ) from error
    prompts, problems = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompts.append(_prompt(line, args))
            except ValueError as error:
                problems.append(f"line {number}: {error}")
    if problems:
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise ConfigError("\n  ".join([f"{path}: {len(problems)} bad lines", *problems[:10], *more]))
    if not prompts:
        raise ConfigError(f"{path} holds no prompts", hint="write one JSON object per line")
    return prompts


def split_prompts(prompts: Sequence[Prompt], eval_fraction: float) -> dict[Split, list[Prompt]]:
    """Hold out the share of *different* prompts with the lowest hashes: a prompt that occurs twice is on
    one side, and the sides do not depend on the order of the file."""
    ranked = sorted({_identity(prompt) for prompt in prompts}, key=lambda text: (hash_fraction(text), text))
    held_out = set(ranked[: math.ceil(eval_fraction * len(ranked))])
    return {
        "eval": [prompt for prompt in prompts if _identity(prompt) in held_out],
        "train": [prompt for prompt in prompts if _identity(prompt) not in held_out],
    }


def _prompt(line: str, args: JsonlArgs) -> Prompt:
    """Raises ValueError: no JSON object, no prompt, or a field of the wrong type."""
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a JSON object: {error}") from error
    info = {k: _text(v) for k, v in record.items() if k not in (args.prompt, args.messages, args.answer)}
    return Prompt(messages=_messages(record, args), answer=_text(record.get(args.answer, "")), info=info)


def _messages(record: dict[str, Any], args: JsonlArgs) -> tuple[Message, ...]:
    if args.messages in record:
        turns = record[args.messages]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"{args.messages!r} must be a list of {{role, content}} that is not empty")
        return tuple(_message(turn) for turn in turns)
    if args.prompt not in record:
        found = ", ".join(map(repr, record)) or "no field"
        raise ValueError(f"neither {args.prompt!r} nor {args.messages!r} among its fields ({found})")
    text = record[args.prompt]
    if not isinstance(text, str):
        raise ValueError(f"{args.prompt!r} must be a string, found {type(text).__name__}")
    system = (Message("system", args.system),) if args.system else ()
    return (*system, Message("user", text))


def _message(turn: object) -> Message:
    role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"a message needs the strings role and content, found {turn!r}")
    return Message(role, content)


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _identity(prompt: Prompt) -> str:
    return msgspec.json.encode(prompt.messages).decode()


def _order(count: int, seed: int, split: Split, turn: int) -> list[int]:
    order = list(range(count))
    generator(seed, split, turn).shuffle(order)
    return order
