"""The points of a process at which it can be killed, each with a name that is the same in every run.

Requests: a hook in botocore's sending. `PUT packs/+1-own-0-0: before`; `: in`, half of it on a socket of its own;
`: sent`, all of it and dead before the answer; `: after`, dead when the server has answered and nobody knows yet.
`+1` is the version counted from the first of this trainer, `own` its incarnation.

Files: Python's audit events below one folder (open for writing, rename, remove, mkdir, …), which come before the
act, and what `Points.pass_by` is called with.

Ranks (ranked.py): before and after everything that one says to the others, `gather versions: before`, by the group
that it is said in.

A first run notes the names it passes (`seen`); a later one is killed at one of them.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qs, unquote, urlsplit

from botocore.exceptions import EndpointConnectionError
from botocore.httpsession import URLLib3Session

LIMIT_S = 30.0
_EVENTS = {
    "open",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "shutil.rmtree",
    "mmap.__new__",
}


class Points:
    """`target`: the name of the point to be killed at; empty: none. `report` is told before. With `stop` the process
    is only stopped there (SIGSTOP), and goes on when somebody lets it."""

    def __init__(
        self, target: str, report: Callable[[dict[str, Any]], None], *, stop: bool = False
    ) -> None:
        self.seen: list[str] = []
        self.refused = ""
        """Requests whose names begin like this meet no server."""
        self._stop = stop
        if stop:  # before there are other threads: they inherit it, and the signal waits for sigwait
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
        self.target, self._report = target, report
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._first_version = 0
        self._incarnation = -1
        self._prefix = ""

    # ------------------------------------------------------------ names

    def pass_by(self, name: str, moment: str = "") -> None:
        """Note a point, `moment` being one of several at the same place. Dies here if it is the target."""
        full = f"{name}: {moment}" if moment else name
        with self._lock:
            self._counts[full] += 1
            times = self._counts[full]
        self._at(name if times == 1 else f"{name} #{times}", moment)

    def _at(self, name: str, moment: str) -> None:
        full = f"{name}: {moment}" if moment else name
        self.seen.append(full)
        if full == self.target and self._stop:
            self._report({"stopped": full})
            os.kill(os.getpid(), signal.SIGSTOP)
            signal.sigwait(
                {signal.SIGCONT}
            )  # the stop may take effect a moment later: this thread goes no further
        elif full == self.target:
            self.die(full)

    def die(self, name: str) -> NoReturn:
        self._report({"killed": name})
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(LIMIT_S)  # the signal is on its way: go no further
        raise AssertionError("SIGKILL did not come")

    # ------------------------------------------------------------ requests

    def numbered_from(self, first_version: int, incarnation: int) -> None:
        """From now on names count from here. Before that, a trainer's claim has no incarnation yet."""
        self._first_version, self._incarnation = first_version, incarnation

    def watch_requests(self, prefix: str, methods: tuple[str, ...]) -> None:
        """Every request of these methods below `prefix` of the bucket, in this process."""
        self._prefix = prefix
        original = URLLib3Session.send

        def send(session: URLLib3Session, request: Any) -> Any:
            if request.method not in methods:
                return original(session, request)
            name = self._name_of(request)
            if self.refused and name.startswith(self.refused):
                raise EndpointConnectionError(endpoint_url=request.url)
            with self._lock:
                self._counts[name] += 1
                name = name if self._counts[name] == 1 else f"{name} #{self._counts[name]}"
            self._at(name, "before")
            if request.method in ("PUT", "POST"):
                for moment in ("in", "sent"):
                    if f"{name}: {moment}" == self.target:
                        _send_raw(request, half=moment == "in")
                    self._at(name, moment)
            answer = original(session, request)
            self._at(name, "after")
            return answer

        URLLib3Session.send = send

    def _name_of(self, request: Any) -> str:
        url = urlsplit(request.url)
        key = unquote(url.path).partition("/")[2].partition("/")[2].removeprefix(self._prefix).strip("/")
        key = re.sub(
            r"(?<=\.json)~[0-9a-f]{32}$", "", key
        )  # a candidate's nonce (async_rl/store/candidates.py)
        query = parse_qs(url.query, keep_blank_values=True)
        if "partNumber" in query:
            key += f" part {query['partNumber'][0]}"
        elif "uploads" in query:
            key += " begin"
        elif "uploadId" in query:
            key += " finish" if request.method == "POST" else " abort"
        elif "list-type" in query or not key:
            prefix = query.get("prefix", [""])[0].removeprefix(self._prefix).strip("/")
            key = f"list {prefix}"
        if request.method == "DELETE":
            key = key.partition("/")[0] + "/"  # in no order
        return f"{request.method} {self._relative(key)}"

    def _relative(self, key: str) -> str:
        """The key with versions and incarnations as seen from this trainer."""

        def version(match: re.Match[str]) -> str:
            return f"{int(match[0]) - self._first_version:+}"

        def incarnation(match: re.Match[str]) -> str:
            return "own" if int(match[0]) == self._incarnation else "other"

        if match := re.match(r"packs/\d+-\d+-(skip|anchor)\S*( .*)?", key):
            return f"packs/{match[1]}{match[2] or ''}"  # which version gets one differs from life to life
        if key.startswith("ways/"):
            return "ways/full" if "-full-" in key else "ways/skip"
        if match := re.match("(gc|clock|workers)", key):
            return match[1]
        key = re.sub(r"(?<=^model/)[0-9a-f]{16}(?=/)", "hash", key)
        key = re.sub(r"^(incarnations/)\d{8}", r"\1new", key)
        key = re.sub(r"(?<!\d)\d{10}(?!\d)", version, key)
        return re.sub(r"(?<!\d)\d{8}(?!\d)", incarnation, key)

    # ------------------------------------------------------------ files

    def watch_files(self, folder: Path) -> None:
        """Every act that changes something below `folder`, in this process."""
        root = str(folder)

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event not in _EVENTS or not args or not isinstance(args[0], str | os.PathLike):
                return
            path = os.fspath(args[0])
            if not isinstance(path, str) or not path.startswith(root):
                return
            if event == "open" and not _for_writing(args):
                return
            self.pass_by(f"{event} {_plain(path.removeprefix(root))}")

        sys.addaudithook(hook)


def _for_writing(args: tuple[Any, ...]) -> bool:
    mode, flags = (*args[1:3], None, None)[:2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _plain(path: str) -> str:
    """Without what differs from run to run: ids, process numbers."""
    path = re.sub(r"[0-9a-f]{32}", "id", path)
    return re.sub(r"\.(\d+-)?[0-9a-f]{8}(?=\.)", "", path)


def _send_raw(request: Any, *, half: bool) -> None:
    """The request as botocore signed it, all of it or up to the middle of its body, and no wait for an answer."""
    url = urlsplit(request.url)
    body = request.body if request.body is not None else b""
    if hasattr(body, "read"):
        body = body.read()
    if isinstance(body, str):
        body = body.encode()
    target = url.path + (f"?{url.query}" if url.query else "")
    lines = [f"{request.method} {target} HTTP/1.1", f"Host: {url.netloc}"]
    for name, value in request.headers.items():
        if name.lower() not in ("host", "expect", "content-length", "transfer-encoding"):
            text = value.decode() if isinstance(value, bytes) else value
            lines.append(f"{name}: {text}")
    lines.append(f"Content-Length: {len(body)}")
    data = "\r\n".join([*lines, "", ""]).encode() + bytes(body)
    connection = socket.create_connection((url.hostname or "", url.port or 80), timeout=LIMIT_S)
    connection.sendall(data[: len(data) - (len(body) + 1) // 2] if half else data)
