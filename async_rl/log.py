"""Structured logs: one line per event, `time process level event key=value …`, on standard error.

    log = get_logger(__name__)
    log.info("version committed", version=7, step=7, bytes=123)

Values are written so that a line can be grepped and split: strings with spaces are quoted.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

__all__ = ["Log", "get_logger", "plain", "setup"]


class Log:
    """A thin front of a stdlib logger that takes the event's fields as keywords."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    @property
    def debugs(self) -> bool:
        """Whether what `debug` is told is written at all: to ask before its fields are made, thousands of times a
        second."""
        return self._logger.isEnabledFor(logging.DEBUG)

    def debug(self, event: str, **fields: Any) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            pairs = "".join(f" {name}={_value(value)}" for name, value in fields.items())
            self._logger.log(level, "%s%s", event, pairs)


def get_logger(name: str) -> Log:
    return Log(logging.getLogger(name))


def setup(process: str, level: str = "INFO") -> None:
    """Send this process's logs to standard error. `process` (trainer, rollout w1, …) stands in every line."""
    handler = logging.StreamHandler(sys.stderr)
    layout = f"%(asctime)s.%(msecs)03d {process} %(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(layout, "%H:%M:%S"))
    for name in ("async_rl", "orchestrator", "workers"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


def plain(said: str) -> str:
    """What others say (workers name themselves), for a terminal: nothing that moves its cursor or breaks its line."""
    return "".join(each if each.isprintable() else "\ufffd" for each in said)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        if not value.isprintable():
            return json.dumps(
                value
            )  # all escaped: a name must not move the cursor of whoever reads the log
        return (
            value if value and not any(c in value for c in ' "=') else json.dumps(value, ensure_ascii=False)
        )
    return str(value).replace(" ", "")
