"""A run file: the sections of every component put together, read and checked as a whole.

The only place that knows all sections. Each is declared beside the component that reads it; here stands
what they must have in common.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from async_rl.algo import losses
from async_rl.algo.advantages import AdvantageConfig, advantage_cautions
from async_rl.algo.losses import LOSSES, LossConfig
from async_rl.config import Choice, load_toml, parse_overrides, read_sections
from async_rl.envs.base import EnvironmentConfig
from async_rl.errors import ConfigError
from async_rl.exporter import MetricsConfig, address_of
from async_rl.store.base import StoreConfig
from async_rl.weights.config import WeightsConfig
from orchestrator.config import EvalConfig, OrchestratorConfig, SamplingConfig, check_bind, check_sizes
from workers.rollout_settings import RolloutConfig
from workers.settings import ModelConfig, TrainerConfig

__all__ = ["RunConfig", "RunFile", "cautions", "check_model", "read_run_file", "read_worker_options"]


class RunConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[run]`: what the run is."""

    store: str = ""
    """The run's store URL, `s3://bucket/prefix` or `file:///path`: its one name everywhere."""
    seed: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """Of everything drawn by chance: sampling, shuffling, initial states."""


class RunFile(Struct, frozen=True):
    run: RunConfig
    model: ModelConfig
    environment: EnvironmentConfig
    sampling: SamplingConfig
    orchestrator: OrchestratorConfig
    eval: EvalConfig
    trainer: TrainerConfig
    loss: LossConfig
    advantage: AdvantageConfig
    weights: WeightsConfig
    store: StoreConfig
    rollout: RolloutConfig
    metrics: MetricsConfig


SECTIONS: dict[str, type[Struct] | Choice] = {
    "run": RunConfig,
    "model": ModelConfig,
    "environment": EnvironmentConfig,
    "sampling": SamplingConfig,
    "orchestrator": OrchestratorConfig,
    "eval": EvalConfig,
    "trainer": TrainerConfig,
    "loss": LOSSES,
    "advantage": AdvantageConfig,
    "weights": WeightsConfig,
    "store": StoreConfig,
    "rollout": RolloutConfig,
    "metrics": MetricsConfig,
}


def read_run_file(path: Path, overrides: tuple[str, ...] = ()) -> RunFile:
    """The run file at `path` with `--set` on top. Raises ConfigError for anything that can't be meant."""
    sections = read_sections(load_toml(path), parse_overrides(overrides), SECTIONS, str(path))
    run_file = RunFile(**sections)  # type: ignore[arg-type]  # one Struct per section, each of its class
    _check(run_file, str(path))
    return run_file


def cautions(r: RunFile) -> list[str]:
    """Choices that can't be told from mistakes, one sentence each: for the trainer's log, once."""
    return [
        *losses.cautions(r.loss, r.orchestrator.max_lag, r.trainer.minibatches),
        *advantage_cautions(r.advantage, r.orchestrator.drop_no_signal),
        *_adapter_cautions(r.model),
    ]


def _adapter_cautions(model: ModelConfig) -> list[str]:
    if model.lora_targets and not model.lora_rank:
        return ["model.lora_targets does nothing with model.lora_rank = 0: all weights are trained"]
    return []


def read_worker_options(overrides: tuple[str, ...]) -> tuple[RolloutConfig, StoreConfig, WeightsConfig]:
    """The sections a rollout worker chooses for itself: how it runs, not what the run is."""
    tables = parse_overrides(overrides)
    own: dict[str, type[Struct]] = {
        "rollout": RolloutConfig,
        "store": StoreConfig,
        "weights": WeightsConfig,
    }
    for name in tables:
        if name in SECTIONS and name not in own:
            raise ConfigError(
                f"--set {name}.…: a rollout worker learns [{name}] from its run and can't change it",
                hint=f"set it in the trainer's run file; a worker chooses {', '.join(own)}",
            )
    sections = read_sections({}, tables, own, "--set")
    rollout, store, weights = sections["rollout"], sections["store"], sections["weights"]
    assert (
        isinstance(rollout, RolloutConfig)
        and isinstance(store, StoreConfig)
        and isinstance(weights, WeightsConfig)
    )
    return rollout, store, weights


def _check(r: RunFile, where: str) -> None:
    """Combinations that can't work, each refused with what to change."""
    if not r.run.store:
        raise ConfigError(f"{where}: run.store is missing", hint='for example store = "s3://bucket/my-run"')
    if not r.model.path:
        raise ConfigError(
            f"{where}: model.path is missing",
            hint="a Hugging Face folder; `async-rl model tiny --out DIR` makes one",
        )
    check_bind(r.orchestrator)
    check_sizes(r.sampling)
    _check_metrics(r, where)
    if r.trainer.finish_wait_s <= r.orchestrator.final_eval_s:
        raise ConfigError(
            f"{where}: trainer.finish_wait_s = {r.trainer.finish_wait_s:g} is not longer than "
            f"orchestrator.final_eval_s = {r.orchestrator.final_eval_s:g}, which it waits for",
            hint="lengthen the first or shorten the second",
        )
    if r.trainer.publish_every > r.orchestrator.max_lag + 1:
        raise ConfigError(
            f"{where}: trainer.publish_every = {r.trainer.publish_every} with orchestrator.max_lag = "
            f"{r.orchestrator.max_lag} can't go on: the lag grows to publish_every - 1 between versions",
            hint=f"set max_lag to at least {r.trainer.publish_every - 1}, or publish more often",
        )


def check_model(path: str) -> None:
    """Where the trainer is: raises ConfigError unless there is a model's folder at `path`, before minutes were spent
    on the rest."""
    folder = Path(path)
    lacks = (
        "it has no config.json"
        if folder.is_dir()
        else "it is no folder"
        if folder.exists()
        else "nothing is there"
    )
    if (folder / "config.json").is_file():
        if any(folder.glob("*.safetensors")):
            return
        lacks = "it has no *.safetensors"
    raise ConfigError(
        f"model.path = {path!r} is no model: {lacks}",
        hint="a folder as Hugging Face's save_pretrained writes it, on every node (a hub's name is none); "
        "`async-rl model tiny --out DIR` makes a small one",
    )


def _check_metrics(r: RunFile, where: str) -> None:
    addresses = [address_of(text) for text in (r.metrics.trainer, r.metrics.orchestrator) if text]
    if len(addresses) == 2 and addresses[0] == addresses[1] and addresses[0][1]:
        raise ConfigError(
            f"{where}: metrics.trainer and metrics.orchestrator are the same address {r.metrics.trainer!r}",
            hint="each process needs one of its own",
        )
    if r.metrics.trainer and r.metrics.stuck_s <= r.trainer.batch_wait_s:
        raise ConfigError(
            f"{where}: metrics.stuck_s = {r.metrics.stuck_s:g} is not longer than trainer.batch_wait_s = "
            f"{r.trainer.batch_wait_s:g}: a trainer that may still wait would count as stuck",
            hint="lengthen the first or shorten the second",
        )
