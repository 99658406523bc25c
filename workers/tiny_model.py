"""A language model of one million weights, for the demo and for tests: made here, from nothing, in seconds.

A Qwen3 (so that vLLM, transformers and FSDP2 treat it as they treat its big sisters) over single
characters, with a chat template, saved as an ordinary Hugging Face folder. A short supervised warm-up
(warm_up.py) brings it to where it is right now and then: reinforcement needs something to reinforce. It
happens once, before policy version 0, and is the only supervised learning there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct

from async_rl.envs import EnvironmentConfig, make_environment
from async_rl.errors import ConfigError
from workers.pretrained import hide_broken_media_packages
from workers.warm_up import Measure, Task, held_out_reward, warm_up

__all__ = [
    "TASKS",
    "TinyModel",
    "TinySettings",
    "finished",
    "make_tiny_model",
    "new_model",
    "new_tokenizer",
]


class TinyTask(Struct, frozen=True):
    environment: EnvironmentConfig
    blur: float  # see warm_up.py; 0: one part, and no blur


TASKS: dict[str, TinyTask] = {
    "reverse": TinyTask(EnvironmentConfig("reverse"), 0.7),
    "arithmetic": TinyTask(EnvironmentConfig("arithmetic", {"max_operand": 20, "operators": "+-"}), 0.0),
}
"""What it can be warmed up on, small enough to be learned in a minute on two cores."""

RECORD = "tiny.json"
"""Written last: a folder that holds it is complete."""

SPECIAL = ("<|pad|>", "<|end|>", "<|begin|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unk|>")
PAD, END, BEGIN, *_ = range(len(SPECIAL))

CHAT_TEMPLATE = (
    "<|begin|>"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class TinySettings(Struct, frozen=True):
    """What decides what comes out, up to rounding."""

    task: str = "reverse"
    seed: int = 0
    steps: int = 400
    """Limit of the warm-up; it ends when the held-out reward is where it should be. 0: no warm-up."""


class TinyModel(Struct, frozen=True):
    """The record kept beside the model."""

    settings: TinySettings
    environment: EnvironmentConfig
    parameters: int
    steps: int  # of the warm-up
    reward: float  # held out, sampled at temperature 1, of the weights as saved


def make_tiny_model(
    folder: Path,
    settings: TinySettings,
    *,
    force: bool = False,
    on_measure: Callable[[Measure], None] | None = None,
) -> TinyModel:
    """Make the model and save it in `folder`, in bfloat16, bit-equal to what was measured.

    Raises ConfigError where the folder holds something else (and not `force`, which writes over it but
    deletes nothing), TrainingError where the warm-up does not reach its goal in `settings.steps`.
    """
    if settings.task not in TASKS:
        raise ConfigError(
            f"there is no tiny model for {settings.task!r}", hint=f"valid: {', '.join(sorted(TASKS))}"
        )
    prepare_folder(folder, force)
    environment = TASKS[settings.task].environment
    with _one_thread():
        torch.manual_seed(settings.seed)
        tokenizer, model = new_tokenizer(), new_model()
        task = Task(make_environment(environment), tokenizer, END, PAD, TASKS[settings.task].blur)
        steps = 0
        if settings.steps:
            steps = warm_up(model, task, settings.steps, on_measure or (lambda measure: None))
        model.to(torch.bfloat16)
        reward = held_out_reward(model, task)
    _quiet()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    record = TinyModel(settings, environment, parameters, steps, round(reward, 4))
    (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    return record


@contextmanager
def _one_thread() -> Iterator[None]:
    """The matrices are so small that more threads gain little, and lose much where cores are busy; and the same
    seed gives the same model on every number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _quiet() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # a bar for one file of two megabytes


def finished(folder: Path) -> TinyModel | None:
    """The record of a complete tiny model in `folder`, None where there is none."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=TinyModel)
    except (OSError, msgspec.MsgspecError):
        return None


def prepare_folder(folder: Path, force: bool) -> None:
    """An empty folder, or any with `force`; an earlier record goes first, it would vouch for what is to
    come."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not force:
            raise ConfigError(
                f"{folder} is not empty, and it does not hold this tiny model",
                hint="choose another --out, or write over it with --force",
            )
        (folder / RECORD).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"can't write into {folder}: {error.strerror}", hint="choose another --out"
        ) from error


def new_tokenizer() -> Any:
    """A fast tokenizer, one token per printable ASCII character, special tokens for the turns of a chat."""
    hide_broken_media_packages()
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    # BPE without merges: every word falls into its characters, spaces are characters like all others.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL[-1]))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        bos_token=SPECIAL[BEGIN],
        unk_token=SPECIAL[-1],
        additional_special_tokens=list(SPECIAL[3:-1]),
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def new_model(**changes: Any) -> Any:
    """A Qwen3 with one million weights in float32, initialised from torch's current seed. `changes`: to its
    Qwen3Config.

    Two wide layers, not many narrow ones: they learn this in half the steps, and an engine's cost per token
    on a CPU is mostly its number of layers.
    """
    hide_broken_media_packages()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": len(new_tokenizer()),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "eos_token_id": END,
        "bos_token_id": BEGIN,
        "use_cache": True,
    }
    return Qwen3ForCausalLM(Qwen3Config(**settings | changes))
