"""An environment in a process of its own, to score texts that workers chose: whatever they do to it (run for ever,
hold Python's lock, end the process), the orchestrator goes on.

    orchestrator ── its name and arguments, then (prompt, completion), again and again ──► judge
                 ◄──────────────── (reward, "") or (0, what went wrong) ─────────────────

A frame is its length in four bytes, and MessagePack. The judge ends with its input, and with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from typing import IO

import msgspec

from async_rl.envs.base import Environment, EnvironmentConfig, Split, is_deterministic
from async_rl.errors import EnvironmentFailed
from async_rl.threads import in_daemon_thread
from async_rl.wire import Prompt

__all__ = ["Judge"]

_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
MOST_BYTES = 64 << 20
"""Of one frame; a text of a group that was accepted is far shorter."""


class _Question(msgspec.Struct, array_like=True):
    prompt: Prompt
    completion: str


class _Answer(msgspec.Struct, array_like=True):
    reward: float
    failed: str = ""


class Judge:
    """An Environment like another one, whose `reward` runs elsewhere, one at a time. A call that is cancelled ends
    the process; the next one starts another. To be used in one event loop."""

    def __init__(self, environment: Environment, config: EnvironmentConfig) -> None:
        """`environment`: made from `config`, for all but its rewards."""
        self.name = environment.name
        self.reward_range = environment.reward_range
        self.deterministic = is_deterministic(environment)
        self._environment = environment
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = asyncio.Lock()

    def prompt(self, split: Split, ordinal: int) -> Prompt:
        return self._environment.prompt(split, ordinal)

    async def reward(self, prompt: Prompt, completion: str) -> float:
        """Raises EnvironmentFailed where the environment does, or ends. Without a limit: the caller has one."""
        async with self._turn:
            try:
                process = self._started()
                answer = await in_daemon_thread(_ask, process, _Question(prompt, completion))
            except (OSError, EOFError, msgspec.DecodeError) as error:
                self.close()
                raise EnvironmentFailed(
                    f"the process of environment {self.name!r} ended while it scored a completion: {error}",
                    hint="see what it wrote on stderr",
                ) from error
            except BaseException:  # cancelled: what it is at may never end
                self.close()
                raise
        if answer.failed:
            raise EnvironmentFailed(answer.failed)
        return answer.reward

    def close(self) -> None:
        """At once, whatever it is doing."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()  # not long: it was killed

    def _started(self) -> subprocess.Popen[bytes]:
        """In the loop's thread, which lives on: the kernel ends a child with the thread that made it."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.judge"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for us
            )
            assert self._process.stdin is not None
            self._process.stdin.write(_framed(self._config))
        return self._process


def _ask(process: subprocess.Popen[bytes], question: _Question) -> _Answer:
    """Blocks until there is an answer, or the process has ended. Raises OSError, EOFError, DecodeError."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(_framed(question))
    process.stdin.flush()
    return msgspec.msgpack.decode(_read(process.stdout), type=_Answer)


def _framed(message: object) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


# ---------------------------------------------------------------- the process


def _main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    questions = os.fdopen(0, "rb", closefd=False)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the environment prints is not an answer
    from async_rl.envs import make_environment

    config = msgspec.msgpack.decode(_read(questions), type=EnvironmentConfig)
    loop = asyncio.new_event_loop()
    environment: Environment | None = None
    with suppress(EOFError):
        while True:
            question = msgspec.msgpack.decode(_read(questions), type=_Question)
            try:
                if environment is None:
                    environment = make_environment(config)
                reward = loop.run_until_complete(environment.reward(question.prompt, question.completion))
                answer = _Answer(float(reward))
            except Exception as error:  # noqa: BLE001  (the edge to the user's environment: whatever it raises)
                answer = _Answer(0.0, f"{type(error).__name__}: {error}")
            answers.write(_framed(answer))
            answers.flush()


def _read(file: IO[bytes]) -> bytes:
    """One frame. Raises EOFError at the end of the input, and for what is no frame."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError("it has ended")
    (length,) = _LENGTH.unpack(head)
    if length > MOST_BYTES:
        raise EOFError(f"a frame of {length} bytes is none of ours")
    return file.read(length)


if __name__ == "__main__":
    _main()
