"""From a lease's prompt to token ids, and from completions to the group that is sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError, EnvironmentFailed
from async_rl.wire import Array, Group, Lease, Prompt, Sample
from workers.engines.base import Completion

__all__ = ["Texts", "make_group"]


class Texts:
    """The run's tokenizer and chat template."""

    def __init__(self, model_dir: Path) -> None:
        from workers.pretrained import hide_broken_media_packages

        hide_broken_media_packages()
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                model_dir, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the run's tokenizer can't be loaded: {error}",
                hint="the model folder the trainer started from must hold its tokenizer files",
            ) from error

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Messages go through the chat template, up to where the assistant begins; bare text is used as it is.
        Raises EnvironmentFailed for a prompt that can't become tokens."""
        if not prompt.messages:
            ids = self._tokenizer(prompt.text).input_ids
        else:
            if not self._tokenizer.chat_template:
                raise EnvironmentFailed(
                    "the prompt is a chat, and the run's tokenizer has no chat template",
                    hint="give the environment's prompts as text, or the model a chat_template.jinja",
                )
            turns = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
            try:
                text = self._tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # a template is the model maker's program and may raise anything
                raise EnvironmentFailed(f"the chat template refused the prompt: {error}") from error
            # The template has written the special tokens already.
            ids = self._tokenizer(text, add_special_tokens=False).input_ids
        if not ids:
            raise EnvironmentFailed("the prompt is empty: there is nothing to continue")
        return list(ids)

    def completion(self, tokens: Sequence[int]) -> str:
        """What the environment is shown: without the end token and its like."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def make_group(
    lease: Lease,
    worker: str,
    prompt_ids: Sequence[int],
    completions: Sequence[Completion],
    texts: Sequence[str],
    rewards: Sequence[float],
    *,
    generate_s: float,
    reward_s: float,
) -> Group:
    return Group(
        key=lease.key,
        prompt=Array.of(prompt_ids, "<i4"),
        samples=tuple(map(_sample, completions, texts, rewards)),
        worker=worker,
        generate_s=generate_s,
        reward_s=reward_s,
    )


def _sample(completion: Completion, text: str, reward: float) -> Sample:
    return Sample(
        tokens=Array.of(completion.tokens, "<i4"),
        logprobs=Array.of(completion.logprobs, "<f4"),
        mask=Array.of([1] * len(completion.tokens), "|u1"),
        spans=Array.of([number for span in completion.spans for number in span], "<i4"),
        reward=reward,
        finish="stop" if completion.finish == "stop" else "length",
        text=text,
    )
