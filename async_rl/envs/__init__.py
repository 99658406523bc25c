"""Environments: what the policy is asked, and what its answer is worth.

`make_environment` builds a built-in task by its name, or a user's own class named `module:Class`.
"""

from __future__ import annotations

from async_rl.config import choices, read_section
from async_rl.envs.arithmetic import Arithmetic
from async_rl.envs.base import Environment, EnvironmentConfig, Split
from async_rl.envs.jsonl import Jsonl
from async_rl.envs.named import construct, load_class
from async_rl.envs.reverse import Reverse
from async_rl.errors import ConfigError

__all__ = ["BUILT_IN", "Environment", "EnvironmentConfig", "Split", "make_environment"]

BUILT_IN: dict[str, type[Arithmetic] | type[Jsonl] | type[Reverse]] = {
    cls.name: cls for cls in (Reverse, Arithmetic, Jsonl)
}


def make_environment(config: EnvironmentConfig) -> Environment:
    """The environment of a run. The orchestrator and every worker build it from the same name and
    arguments.

    Cheap: no prompt file is read before the first prompt is asked for, which a worker never does. Raises
    ConfigError: unknown name, unknown or wrong arguments, a user's module, class or function that can't be
    loaded.
    """
    where = f"environment {config.name!r}"
    if ":" in config.name:
        cls = load_class(config.name, methods=("prompt", "reward"), what="environment.name")
        environment: Environment = construct(cls, config.args, where=where)
        for attribute in ("name", "reward_range"):  # these may be set by its __init__
            if not hasattr(environment, attribute):
                raise ConfigError(
                    f"{where}: it has no {attribute}",
                    hint="async_rl.envs.Environment says what an environment has",
                )
        return environment
    if config.name not in BUILT_IN:
        raise ConfigError(
            f"environment.name: there is no environment {config.name!r}",
            hint=choices(config.name, BUILT_IN) + ", or your own class as module:Class",
        )
    return _built_in(config, where)


def _built_in(config: EnvironmentConfig, where: str) -> Environment:
    cls = BUILT_IN[config.name]
    return cls(read_section(cls.arguments, "environment.args", config.args, where))  # type: ignore[arg-type]
