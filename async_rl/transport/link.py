"""The trainer's side of the protocol, blocking, for a loop that reads top to bottom:

    link = TrainerLink(address)
    link.attach(Attach(…))
    batch = link.next_batch(incarnation, step, timeout_s)     # waits for: enough fresh groups
    link.published(incarnation, version, step)                # from the publisher's thread, never waits
    link.finish(incarnation, step, evaluate=True, timeout_s=…)

Every request is repeated until it is answered or its limit is reached. An orchestrator that was restarted
does not know us and says so (Refused, retry); then the link attaches again, with where the trainer is now,
and asks again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq

from async_rl import errors
from async_rl.errors import AsyncRLError, ConfigError, Malformed, ProtocolError, WaitTimeout
from async_rl.log import get_logger, plain
from async_rl.transport.base import HIGH_WATER, frame_of, message_of, new_identity
from async_rl.transport.handshake import Handshakes, event_of, mechanism_at
from async_rl.transport.keys import ClientKey
from async_rl.transport.zmq import LINGER_MS, configure, connect, use_key, watch_handshakes
from async_rl.wire import (
    MAX_BATCH_BYTES,
    MAX_MESSAGE_BYTES,
    AnyMessage,
    Attach,
    Attached,
    Batch,
    Checked,
    Finish,
    Finished,
    NextBatch,
    Published,
    Refused,
    Status,
    StatusRequest,
)

__all__ = ["StatusLink", "TrainerLink", "ask_status"]

log = get_logger(__name__)

ASK_AGAIN_S = 2.0
"""A request is repeated after this silence: a lost message or a restarted orchestrator costs at most so
much."""

_SLICE_S = 0.05
"""The socket's lock is let go this often while a request waits, so that `published` gets in between."""

_REFUSED_PAUSE_S = 0.2
"""Before attaching again to an orchestrator that does not know us: no busy loop where it goes on saying
so."""

_PICTURE_LIMIT_S = 1.0

M = TypeVar("M", Attached, Batch, Finished, Status)


class _Line:
    """One blocking DEALER socket. Not thread-safe. Raises ConfigError for an address that can't be one."""

    def __init__(self, address: str, name: str, key: ClientKey | None) -> None:
        self.address, self.key = address, key
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket, address, MAX_BATCH_BYTES, HIGH_WATER)
        self._socket.setsockopt(zmq.IDENTITY, new_identity(name))
        if key is not None:
            use_key(self._socket, key)
        self._handshakes = Handshakes(address, key)
        self._monitor = watch_handshakes(self._socket)
        self._failed: AsyncRLError | None = None
        try:
            connect(self._socket, address)
        except ConfigError:
            self.close(linger_ms=0)
            raise

    def send(self, message: AnyMessage) -> None:
        """Never waits: where the queue is full, the orchestrator has been away for long and the message is
        dropped; it will be sent again."""
        try:
            self._socket.send(frame_of(message, MAX_MESSAGE_BYTES), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("message dropped, the queue is full", kind=type(message).__name__)

    def recv(self, timeout_s: float) -> AnyMessage | None:
        """The next message; None after `timeout_s` without one, or sooner where there was news of the
        connection. Raises Malformed, and Refused where we are not let in."""
        if self._failed is not None:
            raise self._failed
        poller = zmq.Poller()
        for each in (self._socket, self._monitor):
            poller.register(each, zmq.POLLIN)
        ready = dict(poller.poll(max(0, int(timeout_s * 1000))))
        if self._socket in ready:
            frames = self._socket.recv_multipart(copy=False)  # a Batch is large
            return message_of([frame.buffer for frame in frames], MAX_BATCH_BYTES)
        if self._monitor in ready:
            self._watch()
        return None

    def _watch(self) -> None:
        """Raises Refused where a handshake says that we are not let in."""
        event, _ = event_of(self._monitor.recv_multipart())
        verdict = self._handshakes.on(event)
        if verdict == "look":
            verdict = self._handshakes.looked(mechanism_at(self.address))
        if verdict is not None:
            self._failed = verdict
            raise verdict

    def close(self, linger_ms: int = LINGER_MS) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)
        self._context.term()  # returns within the linger


class TrainerLink:
    """Rank 0's connection to the orchestrator. `published` may be called from any thread, the rest from
    one.

    One link lives as long as one incarnation: the orchestrator knows the trainer by the link's identity.
    """

    def __init__(
        self, address: str, *, connect_timeout_s: float = 30.0, key: ClientKey | None = None
    ) -> None:
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._line = _Line(address, "trainer", key)
        self._lock = threading.Lock()  # guards the socket
        self._unsent: deque[Published] = deque()
        self._attach: Attach | None = None
        self._kept: deque[AnyMessage] = deque()  # arrived while something else was awaited

    def attach(self, attach: Attach) -> Attached:
        """Take the run. Raises errors.Refused (a newer trainer has it, this is another run's orchestrator, or
        it does not let us in), and WaitTimeout where nobody answers."""
        self._attach = attach
        return self._request(
            attach,
            Attached,
            lambda answer: answer.run == attach.run,
            time.monotonic() + self._connect_timeout_s,
            f"an orchestrator at {self._address}",
            self._connect_timeout_s,
            hint="is it running, and is this its address and port?",
        )

    def next_batch(
        self, incarnation: int, step: int, timeout_s: float, *, resumable: int = 0, explain: bool = True
    ) -> Batch:
        """The groups of step `step`. Asked again, the same answer. Raises errors.Refused and WaitTimeout.

        `resumable`: the oldest step that a later trainer may resume from.

        Without `explain` the WaitTimeout comes at once and says only what was awaited: for one slice of a
        longer wait."""
        with self._lock:
            self._where(step=step)
        batch = self._request(
            NextBatch(incarnation, step, resumable),
            Batch,
            lambda answer: (answer.incarnation, answer.step) == (incarnation, step),
            time.monotonic() + timeout_s,
            f"a batch for step {step}",
            timeout_s,
            explain=explain,
        )
        with self._lock:
            self._where(frontier=batch.frontier, open=batch.open)
        return batch

    def published(
        self, incarnation: int, version: int, step: int, parent: int = -1, digest: str = ""
    ) -> None:
        """Tell that a version is committed. Never waits. The newest is told again with every later
        request."""
        self._unsent.append(Published(incarnation, version, step, parent, digest))
        if self._lock.acquire(
            timeout=2 * _SLICE_S
        ):  # else a request is waiting, and will send it in its next slice
            try:
                self._flush()
            finally:
                self._lock.release()

    def checked(self, checked: Checked) -> None:
        """Tell what the forward pass of a step has shown about its groups. Never waits, and is not repeated; what is
        too long for a message is left out: evidence lost, not the run."""
        try:
            with self._lock:
                self._line.send(checked)
        except Malformed as error:
            log.warning("what a step has shown is not told", step=checked.step, reason=error.message)

    def finish(self, incarnation: int, step: int, evaluate: bool, timeout_s: float) -> Finished:
        """No more steps: waits for the last held-out evaluation. Raises errors.Refused and WaitTimeout."""
        with self._lock:
            self._where(step=step)
        return self._request(
            Finish(incarnation, step, evaluate),
            Finished,
            lambda answer: True,
            time.monotonic() + timeout_s,
            "the last held-out evaluation",
            timeout_s,
        )

    def picture(self) -> str:
        """What the orchestrator says about itself, in a sentence, for an error. Takes up to a second."""
        with self._lock:
            self._line.send(StatusRequest())
        deadline = time.monotonic() + _PICTURE_LIMIT_S
        while (left := deadline - time.monotonic()) > 0:
            with self._lock:
                answer = self._arrived(min(_SLICE_S, left))
            if isinstance(answer, Status):
                return _describe(answer)
            if answer is not None:
                self._kept.append(answer)
        return f"nothing answers at {self._address}"

    def close(self) -> None:
        with self._lock:
            self._line.close()

    def __enter__(self) -> TrainerLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- inside

    def _request(
        self,
        message: Attach | NextBatch | Finish,
        kind: type[M],
        matches: Callable[[M], bool],
        deadline: float,
        awaited: str,
        limit_s: float,
        hint: str = "",
        explain: bool = True,
    ) -> M:
        """Ask, and ask again, until an answer of `kind` that `matches` arrives. Late answers to earlier
        requests are passed over, but one to this very request, asked before with a shorter limit, is taken."""
        with self._lock:
            while (late := self._recv(0.0)) is not None:
                if isinstance(late, kind) and matches(late):
                    return late
        refused: Refused | None = None
        ask_at = 0.0
        while (now := time.monotonic()) < deadline:
            with self._lock:
                if now >= ask_at:
                    self._say_where(again=refused is not None, attaching=kind is Attached)
                    self._line.send(message)
                    refused = None
                    ask_at = now + ASK_AGAIN_S
                self._flush()
                answer = self._recv(min(_SLICE_S, deadline - now))
            if isinstance(answer, kind) and matches(answer):
                return answer
            if isinstance(answer, Refused):
                if not answer.retry:
                    raise errors.Refused(answer.reason, hint=answer.hint)
                refused = answer
                ask_at = min(ask_at, now + _REFUSED_PAUSE_S)
        why = f"; it said: {refused.reason}" if refused else f"; {self.picture()}" if explain else ""
        raise WaitTimeout(f"waited {limit_s:g} s for {awaited}{why}", hint=hint or _HINT)

    def _recv(self, timeout_s: float) -> AnyMessage | None:
        """The next message: what was kept comes first."""
        return self._kept.popleft() if self._kept else self._arrived(timeout_s)

    def _arrived(self, timeout_s: float) -> AnyMessage | None:
        try:
            return self._line.recv(timeout_s)
        except Malformed as error:
            raise ProtocolError(
                f"the orchestrator at {self._address} speaks another protocol: {error}",
                hint="run the same version of async-rl on both sides",
            ) from error

    def _where(self, **now: Any) -> None:
        """Where the trainer is, for attaching again to a restarted orchestrator."""
        if self._attach is not None:
            self._attach = msgspec.structs.replace(self._attach, **now)

    def _flush(self) -> None:
        """Send what was published. Before the first Attach there is nobody to tell: it names the newest itself."""
        while self._unsent and self._attach is not None:
            published = self._unsent.popleft()
            if published.version > self._attach.version:
                self._where(
                    version=published.version,
                    version_step=published.step,
                    parent=published.parent,
                    digest=published.digest,
                )
            self._line.send(published)

    def _say_where(self, *, again: bool, attaching: bool) -> None:
        """Before a request: the newest version (its message may have been lost), and who we are if that was
        asked."""
        here = self._attach
        if here is not None and not attaching:
            if again:
                self._line.send(here)
            self._line.send(
                Published(here.incarnation, here.version, here.version_step, here.parent, here.digest)
            )


def _describe(status: Status) -> str:
    """Why a batch may not be ready, in a sentence."""
    parts = [
        f"the orchestrator has {status.buffered} of {status.batch_groups} groups, "
        f"{status.outstanding} being generated"
    ]
    workers = [f"{plain(w.worker)} {w.state}, version {w.version}, lag {w.lag}" for w in status.workers]
    parts.append("workers: " + (", ".join(workers) or "none"))
    for name, counts in (("dropped", status.dropped), ("refused", status.refused)):
        if counts:
            parts.append(f"{name}: " + ", ".join(f"{reason} {n}" for reason, n in sorted(counts.items())))
    for standing in status.standings:
        if standing.state == "quarantined":
            parts.append(f"in quarantine: {plain(standing.worker)}: {plain(standing.reason)}")
    if status.dead_letters:
        key, reason = status.dead_letters[-1]
        parts.append(f"last given up: {key}: {plain(reason)}")
    return "; ".join(parts)


_HINT = "is a rollout worker running, and is it getting on? see `async-rl lag`"


class StatusLink:
    """Asks any orchestrator for its Status, again and again over one connection.

    A request waits in the queue for an orchestrator that is not there yet, and is answered late. So a
    connection whose request was not answered in time is given up: an answer always belongs to its request.
    """

    def __init__(self, address: str, key: ClientKey | None = None) -> None:
        self._line = _Line(address, "watcher", key)

    def ask(self, timeout_s: float) -> Status:
        """Raises WaitTimeout where nobody answers, ProtocolError where the answer can't be read, Refused where
        we are not let in or may not ask."""
        self._line.send(StatusRequest())
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = self._line.recv(left)
            except Malformed as error:
                raise ProtocolError(
                    f"the orchestrator at {self._line.address} speaks another protocol: {error}",
                    hint="run the same version of async-rl on both sides",
                ) from error
            if isinstance(answer, Status):
                return answer
            if isinstance(answer, Refused) and not answer.retry:
                raise errors.Refused(answer.reason, hint=answer.hint)
        self.close()
        self._line = _Line(self._line.address, "watcher", self._line.key)
        raise WaitTimeout(
            f"no orchestrator answered at {self._line.address} within {timeout_s:g} s",
            hint="is it running? name another with --orchestrator tcp://host:port",
        )

    def close(self) -> None:
        self._line.close(linger_ms=0)

    def __enter__(self) -> StatusLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def ask_status(address: str, timeout_s: float, key: ClientKey | None = None) -> Status:
    """One Status. Raises WaitTimeout where nobody answers within `timeout_s`."""
    with StatusLink(address, key) as link:
        return link.ask(timeout_s)
