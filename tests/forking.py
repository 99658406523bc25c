"""The loop of a process that imports much, once, and is then forked at order: by chaos/forks.py and warm_start.py."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

__all__ = ["fork_at_order", "say"]


def fork_at_order(become: Callable[[dict[str, Any]], NoReturn]) -> None:
    """Reads orders, a JSON line each, from standard input until that is closed, and forks a child for each, whose
    whole life `become` is. Says `{"pid": …}`, in the order of the orders, and `{"pid": …, "status": …}` when that one
    has ended. Children that are left at the end are killed. Call it before there is any other thread."""
    reaped, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    buffer = b""
    while True:
        ready, _, _ = select.select([0, reaped], [], [])
        if reaped in ready:
            os.read(reaped, 4096)
            for pid in list(children):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    children.discard(pid)
                    say({"pid": pid, "status": os.waitstatus_to_exitcode(status)})
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    become(json.loads(line))
                children.add(pid)
                say({"pid": pid})
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def say(message: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")
