"""A proxy before a real S3 server that misbehaves on request: `faulty_s3.script(status(503), cut(100))`.

Each request of the scripted methods takes the next fault; when the script has run out, everything is passed
on as it came (with its Host header, so signatures stay valid). `seen` holds them all: "GET /bucket/key".
`faulty_s3.once("GET", "versions/0000000003.json", stale(None))` waits for the next request that names that object.
"""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

from tests.servers import S3Server

LIMIT_S = 30.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyS3

    def _any(self) -> None:
        proxy = self.proxy
        with proxy.lock:
            proxy.seen.append(f"{self.command} {urlsplit(self.path).path}")
            scripted = proxy.faults and self.command in proxy.methods
            fault = proxy.faults.popleft() if scripted else proxy.cue_for(self.command, self.path)
        fault(self)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def forward(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        backend = http.client.HTTPConnection(self.proxy.backend, timeout=LIMIT_S)
        backend.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "connection"):
                backend.putheader(name, value)
        backend.endheaders(body or None)
        answer = backend.getresponse()
        data = answer.read()
        backend.close()
        return answer, data

    def reply_headers(self, answer: http.client.HTTPResponse, length: int) -> None:
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        announced = answer.getheader("Content-Length") if self.command == "HEAD" else str(length)
        self.send_header("Content-Length", announced or "0")
        self.end_headers()

    def hang_up(self) -> None:
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


Fault = Callable[[Handler], None]


def pass_on(handler: Handler) -> None:
    answer, data = handler.forward(handler.body())
    handler.reply_headers(answer, len(data))
    handler.wfile.write(data)


def status(code: int, s3_code: str = "InternalError") -> Fault:
    """An error, in place of the server's answer; the server does not see the request."""

    def fault(handler: Handler) -> None:
        handler.body()
        xml = f"<Error><Code>{s3_code}</Code><Message>scripted</Message></Error>".encode()
        handler.send_response_only(code)
        handler.send_header("Content-Type", "application/xml")
        handler.send_header("Content-Length", str(len(xml)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(xml)

    return fault


def drop(handler: Handler) -> None:
    """The connection breaks before an answer; the server does not see the request."""
    handler.body()
    handler.hang_up()


def lose_answer(handler: Handler) -> None:
    """The server does what was asked, but the client never learns."""
    handler.forward(handler.body())
    handler.hang_up()


def cut(after: int) -> Fault:
    """The body ends after so many bytes, though the headers announce all."""

    def fault(handler: Handler) -> None:
        answer, data = handler.forward(handler.body())
        handler.reply_headers(answer, len(data))
        handler.wfile.write(data[:after])
        handler.hang_up()

    return fault


def stall(after: int) -> Fault:
    """So many bytes of the body, then silence until the test ends."""

    def fault(handler: Handler) -> None:
        answer, data = handler.forward(handler.body())
        handler.reply_headers(answer, len(data))
        handler.wfile.write(data[:after])
        handler.wfile.flush()
        handler.proxy.released.wait(LIMIT_S)
        handler.hang_up()

    return fault


def answer(data: bytes) -> Fault:
    """200 with this body, whatever was asked for; the server does not see the request."""

    def fault(handler: Handler) -> None:
        handler.body()
        handler.send_response_only(200)
        handler.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return fault


def stale(before: bytes | None) -> Fault:
    """A get's answer as it was before the object was written: other bytes (a range of them, if one was asked for), or
    none."""

    def fault(handler: Handler) -> None:
        if before is None:
            status(404, "NoSuchKey")(handler)
            return
        handler.body()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range") or "")
        begin = int(wanted[1]) if wanted else 0
        end = min(len(before), int(wanted[2]) + 1) if wanted and wanted[2] else len(before)
        if begin >= len(before) > 0:
            status(416, "InvalidRange")(handler)
            return
        handler.send_response_only(206 if wanted else 200)
        handler.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if wanted:
            handler.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(before)}")
        handler.send_header("Content-Length", str(end - begin))
        handler.end_headers()
        handler.wfile.write(before[begin:end])

    return fault


def list_without(name: str) -> Fault:
    """A listing as it was before the objects whose keys end with `name` were written."""

    def fault(handler: Handler) -> None:
        answer, data = handler.forward(handler.body())
        entries = re.compile(rb"<Contents>(?:(?!</Contents>).)*?</Contents>", re.DOTALL)
        ending = f"{name}</Key>".encode()
        data = entries.sub(lambda match: b"" if ending in match[0] else match[0], data)
        handler.reply_headers(answer, len(data))
        handler.wfile.write(data)

    return fault


def slow_link(bytes_per_s: float) -> Fault:
    """Takes the request's body no faster than this."""

    def fault(handler: Handler) -> None:
        left = int(handler.headers.get("Content-Length") or 0)
        blocks = []
        while left:
            block = handler.rfile.read(min(left, 256 << 10))
            blocks.append(block)
            left -= len(block)
            time.sleep(len(block) / bytes_per_s)  # this is the link, not a wait of the test
        answer, data = handler.forward(b"".join(blocks))
        handler.reply_headers(answer, len(data))
        handler.wfile.write(data)

    return fault


class FaultyS3:
    def __init__(self, server: S3Server) -> None:
        self.backend = urlsplit(server.endpoint).netloc
        self.url = server.new_url()
        self.faults: deque[Fault] = deque()
        self.methods: tuple[str, ...] = ()
        self.cues: list[tuple[str, str, Fault]] = []
        self.seen: list[str] = []
        self.lock = threading.Lock()
        self.released = threading.Event()
        handler = type("BoundHandler", (Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def script(
        self, *faults: Fault, methods: tuple[str, ...] = ("GET", "PUT", "POST", "HEAD", "DELETE")
    ) -> None:
        with self.lock:
            self.faults, self.methods, self.seen = deque(faults), methods, []

    def once(self, method: str, part: str, fault: Fault) -> None:
        """For the next such request whose path or query, unquoted, holds `part`."""
        with self.lock:
            self.cues.append((method, part, fault))

    def cue_for(self, method: str, path: str) -> Fault:
        """With the lock held."""
        for cue in self.cues:
            if cue[0] == method and cue[1] in unquote(path):
                self.cues.remove(cue)
                return cue[2]
        return pass_on

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(LIMIT_S)


@pytest.fixture
def faulty_s3(seaweed: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A FaultyS3 before SeaweedFS; the environment points to it, `url` is a fresh prefix."""
    proxy = FaultyS3(seaweed)
    seaweed.activate(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    yield proxy
    proxy.close()
