"""A seeded, faulty proxy before a real S3 server: bad weather for a whole run, changed while it runs.

In a test's own process (threads):

    with S3Proxy(seaweed.endpoint, seed=7, root="/bucket/prefix") as proxy:
        AWS_ENDPOINT_URL = proxy.endpoint               # processes are pointed to it; signatures stay valid
        proxy.weather = Weather(fail=0.2, delay=0.5, delay_s=1.0)
        proxy.weather = Weather()                       # fair again
        proxy.once("lose", "PUT", "versions/")          # one fault, for the next such request
        proxy.counts()                                  # {"passed": 120, "fail": 31, …}

As a process of its own, controlled over its own port (no bucket's name begins with "_"):

    python -m tests.chaos.s3_proxy --backend http://127.0.0.1:9000 --port 9100 --seed 7 --root /bucket/prefix
    POST /_proxy/weather  {"fail": 0.2}                 # all that is left out is fair
    POST /_proxy/once     {"fault": "lose", "method": "PUT", "part": "versions/", "times": 1}
    GET  /_proxy/counts

which `Remote("http://127.0.0.1:9100")` does: it has `weather`, `once` and `counts` too.

The faults (FAULTS), each a share in [0, 1] of the requests in Weather, or asked for by `once`:

    fail    500 InternalError or 503 SlowDown; the server sees nothing
    drop    the connection breaks before the server sees the request
    lose    the server does it, then the connection breaks: a lost answer
    cut     the answer's body ends early (of answers with a body; others are lost)
    delay   up to `delay_s` pass before the request is taken
    stale   a listing (or its page) without the keys put or completed through this proxy in the last `stale_s`
    hang    silence, until the weather changes or HANG_LIMIT_S

`Weather(down=True)` breaks every connection: an outage; with `hang=1` the outage of a stopped server. `methods` and
`part` limit the weather to requests with one of these methods, whose path and query hold `part`.

What a request meets is drawn from the seed, its method, its path below `root`, and how often that pair was asked for
before: it does not depend on what else runs at the time.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from http.server import ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

import click
import msgspec
from msgspec import Struct

from tests import faulty

__all__ = ["FAULTS", "HANG_LIMIT_S", "Remote", "S3Proxy", "Weather"]

FAULTS = ("hang", "drop", "fail", "lose", "cut", "stale", "delay")
"""In the order in which a draw tries them; the first share it falls into is what happens."""
HANG_LIMIT_S = 120.0
LIMIT_S = 30.0
CONTROL = "/_proxy/"


class Weather(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Shares of the requests, in [0, 1], together at most 1. Fair by default."""

    fail: float = 0.0
    drop: float = 0.0
    lose: float = 0.0
    cut: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.5
    stale: float = 0.0
    stale_s: float = 2.0
    hang: float = 0.0
    down: bool = False
    methods: tuple[str, ...] = ("GET", "PUT", "POST", "HEAD", "DELETE")
    part: str = ""

    def __post_init__(self) -> None:
        if sum(getattr(self, name) for name in FAULTS) > 1.0 + 1e-9:
            raise ValueError("the shares of a weather are more than 1 together")


class Cue(Struct, frozen=True, forbid_unknown_fields=True):
    fault: str
    method: str = ""  # empty: any
    part: str = ""
    times: int = 1


class S3Proxy:
    """`endpoint` is what clients use. Faults begin with the weather that is set; see the module."""

    def __init__(self, backend: str, *, seed: int = 1, root: str = "", port: int = 0) -> None:
        """`backend`: the server's URL. `root`: the path "/bucket/prefix" of the run, left out of the draws, so that a
        run of another name meets the same faults."""
        self.backend = urlsplit(backend).netloc
        self.released = threading.Event()  # ends what hangs: the proxy closes
        self._seed, self._root = seed, root
        self._weather = Weather()
        self._cues: list[Cue] = []
        self._asked: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._put: dict[str, float] = {}  # path of an object -> when it was last written through here
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._server = _Server(("127.0.0.1", port), type("BoundHandler", (_Handler,), {"proxy": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="s3-proxy"
        )
        self._thread.start()

    @property
    def weather(self) -> Weather:
        return self._weather

    @weather.setter
    def weather(self, weather: Weather) -> None:
        with self._changed:
            self._weather = weather
            self._changed.notify_all()

    def once(self, fault: str, method: str = "", part: str = "", times: int = 1) -> None:
        """For the next `times` such requests, before any weather."""
        if fault not in FAULTS:
            raise ValueError(f"{fault!r} is no fault: {', '.join(FAULTS)}")
        with self._lock:
            self._cues.append(Cue(fault, method, part, times))

    def pending(self) -> int:
        """Cues that no request has met yet."""
        with self._lock:
            return len(self._cues)

    def counts(self) -> dict[str, int]:
        """What happened to how many requests: "passed", "down" and the names of FAULTS."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        self.released.set()
        self.weather = Weather()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(LIMIT_S)

    def __enter__(self) -> S3Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ what the handler asks

    def draw(self, method: str, path: str) -> tuple[str, random.Random, Weather]:
        """What this request meets ("" for nothing), dice of its own, and the weather it met it in."""
        with self._lock:
            weather = self._weather
            place = f"{method} {_place(path).removeprefix(self._root)}"
            self._asked[place] += 1
            dice = random.Random(
                hashlib.sha256(f"{self._seed} {self._asked[place]} {place}".encode()).digest()
            )
            fault = self._cued(method, path) or _drawn(weather, method, path, dice.random())
            self._counts[fault or "passed"] += 1
        return fault, dice, weather

    def _cued(self, method: str, path: str) -> str:
        for at, cue in enumerate(self._cues):
            if cue.method in ("", method) and cue.part in unquote(path):
                self._cues[at : at + 1] = (
                    [msgspec.structs.replace(cue, times=cue.times - 1)] if cue.times > 1 else []
                )
                return cue.fault
        return ""

    def wrote(self, path: str) -> None:
        with self._lock:
            self._put[_place(path)] = time.monotonic()

    def fresh(self, bucket: str, within_s: float) -> list[str]:
        """Keys of the bucket that were written through here so shortly ago."""
        since = time.monotonic() - within_s
        with self._lock:
            recent = [path for path, at in self._put.items() if at >= since]
        return [path.removeprefix(f"{bucket}/") for path in recent if path.startswith(f"{bucket}/")]

    def wait_for_change(self, weather: Weather) -> None:
        """Waits for: other weather than this. Ended also by HANG_LIMIT_S and by `close`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._weather is not weather or self.released.is_set(), HANG_LIMIT_S
            )


class Remote:
    """A proxy in another process: the same `weather`, `once` and `counts`."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._address = urlsplit(endpoint).netloc

    @property
    def weather(self) -> Weather:
        return msgspec.convert(self._ask("GET", "weather"), Weather)

    @weather.setter
    def weather(self, weather: Weather) -> None:
        self._ask("POST", "weather", msgspec.to_builtins(weather))

    def once(self, fault: str, method: str = "", part: str = "", times: int = 1) -> None:
        self._ask("POST", "once", {"fault": fault, "method": method, "part": part, "times": times})

    def counts(self) -> dict[str, int]:
        return msgspec.convert(self._ask("GET", "counts"), dict[str, int])

    def _ask(self, method: str, what: str, body: object = None) -> Any:
        connection = http.client.HTTPConnection(self._address, timeout=LIMIT_S)
        try:
            connection.request(method, CONTROL + what, json.dumps(body) if body is not None else None)
            answer = connection.getresponse()
            data = json.loads(answer.read())
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(data["error"])
        return data


# ---------------------------------------------------------------- inside


def _place(path: str) -> str:
    """A request's path without what differs from one attempt to the next; a listing's with where it begins."""
    parts = urlsplit(path)
    wanted = [
        each
        for each in parts.query.split("&")
        if each.startswith(("prefix=", "start-after=", "partNumber=", "uploads", "list-type="))
    ]
    return unquote(parts.path) + ("?" + unquote("&".join(wanted)) if wanted else "")


def _drawn(weather: Weather, method: str, path: str, draw: float) -> str:
    if method not in weather.methods or weather.part not in unquote(path):
        return ""
    if weather.down:
        return "hang" if weather.hang else "down"
    for name in FAULTS:
        share = getattr(weather, name)
        if draw < share:
            return name
        draw -= share
    return ""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away half-way is no event here."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(faulty.Handler):
    proxy: S3Proxy  # type: ignore[assignment]

    def _any(self) -> None:
        if self.path.startswith(CONTROL):
            self._control(self.path.removeprefix(CONTROL))
            return
        fault, dice, weather = self.proxy.draw(self.command, self.path)
        try:
            self._meet(fault, dice, weather)
        except (OSError, http.client.HTTPException):  # the server, or the client, is away
            self.hang_up()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

    def _meet(self, fault: str, dice: random.Random, weather: Weather) -> None:
        match fault:
            case "hang":
                self.proxy.wait_for_change(weather)
                self.hang_up()
            case "down" | "drop":
                faulty.drop(self)
            case "fail":
                faulty.status(*dice.choice([(500, "InternalError"), (503, "SlowDown")]))(self)
            case "lose":
                faulty.lose_answer(self)
            case "cut":
                self._cut(dice)
            case "stale":
                self._stale(weather.stale_s)
            case _:
                if fault == "delay":
                    self.proxy.released.wait(dice.random() * weather.delay_s)
                faulty.pass_on(self)

    def _cut(self, dice: random.Random) -> None:
        answer, data = self.forward(self.body())
        if data and self.command != "HEAD":
            self.reply_headers(answer, len(data))
            self.wfile.write(data[: dice.randrange(len(data))])
        self.hang_up()

    def _stale(self, within_s: float) -> None:
        answer, data = self.forward(self.body())
        parts = urlsplit(self.path)
        if self.command == "GET" and "list-type=" in parts.query and answer.status == 200:
            keys = set(self.proxy.fresh(unquote(parts.path).rstrip("/"), within_s))
            data = _ENTRY.sub(lambda entry: b"" if _key_of(entry[0]) in keys else entry[0], data)
        self.reply_headers(answer, len(data))
        self.wfile.write(data)

    def forward(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        answer, data = super().forward(body)
        parts = urlsplit(self.path)
        completes = self.command == "POST" and "uploadId=" in parts.query
        if answer.status < 300 and (
            completes or (self.command == "PUT" and "partNumber=" not in parts.query)
        ):
            self.proxy.wrote(parts.path)
        return answer, data

    def _control(self, what: str) -> None:
        said = self.body()
        code, answer = 200, {}
        try:
            match self.command, what:
                case "GET", "counts":
                    answer = self.proxy.counts()
                case "GET", "weather":
                    answer = msgspec.to_builtins(self.proxy.weather)
                case "POST", "weather":
                    self.proxy.weather = msgspec.json.decode(said, type=Weather)
                case "POST", "once":
                    cue = msgspec.json.decode(said, type=Cue)
                    self.proxy.once(cue.fault, cue.method, cue.part, cue.times)
                case _:
                    code, answer = 404, {"error": f"{self.command} {what}: there is no such control"}
        except (ValueError, msgspec.MsgspecError) as error:
            code, answer = 400, {"error": str(error)}
        data = json.dumps(answer).encode()
        self.send_response_only(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


_ENTRY = re.compile(rb"<Contents>(?:(?!</Contents>).)*?</Contents>", re.DOTALL)
_KEY = re.compile(rb"<Key>(.*?)</Key>", re.DOTALL)


def _key_of(entry: bytes) -> str:
    """Plain or URL-encoded; the keys of runs hold nothing that XML would escape."""
    found = _KEY.search(entry)
    return unquote(found[1].decode()) if found else ""


@click.command()
@click.option("--backend", required=True, help="The server's URL.")
@click.option("--port", default=0, show_default="any free one")
@click.option("--seed", default=1, show_default=True)
@click.option("--root", default="", help="/bucket/prefix of the run.")
@click.option("--weather", default="{}", help="What to begin with, as JSON.")
def main(backend: str, port: int, seed: int, root: str, weather: str) -> None:
    """Prints its endpoint as one line, and serves until it is told to stop."""
    stopping = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: stopping.set())
    with S3Proxy(backend, seed=seed, root=root, port=port) as proxy:
        proxy.weather = msgspec.json.decode(weather, type=Weather)
        click.echo(proxy.endpoint)
        sys.stdout.flush()
        stopping.wait()


if __name__ == "__main__":
    main()
