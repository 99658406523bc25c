"""An HTTP server in a thread: `/metrics` for Prometheus, `/health` for whoever restarts processes.

    GET /metrics   the process's readings under the names of gauges.py
    GET /health    200 and {"ok": true, …}, or 503 and {"ok": false, "reason": …}

It never takes a process down: an address that can't be had is an error at the start, and whatever goes wrong later
costs one answer. Nobody is authenticated, so it listens on loopback unless a host is named.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR, socket
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from async_rl.errors import ConfigError
from async_rl.gauges import METRICS, Metric, Reading
from async_rl.log import get_logger

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

__all__ = ["Exporter", "Health", "MetricsConfig", "Source", "address_of", "exposition"]

log = get_logger(__name__)

REQUEST_LIMIT_S = 5.0
"""For one client to send its request and take the answer. A scrape takes milliseconds."""
AT_ONCE = 8
"""Answers being made; a further connection is closed. Two scrapers and a probe are three."""


class MetricsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[metrics]`: where trainer and orchestrator answer Prometheus and health checks. Each process needs an address
    of its own; a worker's is given by its option --metrics."""

    trainer: str = ""
    """PORT (loopback only) or HOST:PORT; port 0: any free one (it is logged). Empty: nowhere."""
    orchestrator: str = ""
    """Likewise, of the orchestrator, also of one that the trainer starts."""
    stuck_s: float = 900.0
    """A trainer that has finished no step for this long is not healthy. Longer than trainer.batch_wait_s and a step
    together, or a wait that is still allowed looks like the end."""


class Health(Struct, frozen=True):
    """`reason`: why it is not ok. `facts`: what else stands in the answer."""

    ok: bool
    reason: str = ""
    facts: dict[str, Any] = {}


class Source(Protocol):
    """What is exported. Called from the server's threads; must not wait for long."""

    @property
    def run(self) -> str: ...

    def readings(self) -> Iterable[Reading]: ...

    def health(self) -> Health: ...


def address_of(text: str) -> tuple[str, int]:
    """Host and port of `9100`, `:9100`, `HOST:9100`. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r} is no address for metrics", hint="use PORT or HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


class Exporter:
    """Serves until it is closed. Raises ConfigError where the address is wrong, taken or not ours."""

    def __init__(self, address: str, source: Source) -> None:
        import prometheus_client  # noqa: F401  (what is missing is missed now, not at the first scrape)

        host, port = address_of(address)
        try:
            self._server = _Server((host, port), source)
        except OSError as error:
            raise ConfigError(
                f"can't serve metrics at {host}:{port}: {error.strerror or error}",
                hint="each process needs an address of its own: [metrics] in the run file, or --metrics",
            ) from error
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="metrics", daemon=True
        )
        self._thread.start()
        log.info("metrics served", metrics=f"http://{self.address}/metrics", health="/health")

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(REQUEST_LIMIT_S)
        self._server.server_close()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], source: Source) -> None:
        self.source = source
        self._open: dict[Any, float] = {}  # connections that are answered, and until when
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= AT_ONCE:
            return self.shutdown_request(request)
        self._open[request] = time.monotonic() + REQUEST_LIMIT_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """The handler's own limit is one on each read: a client that sends a byte now and then would hold its place
        for ever, and a few of them all places."""
        now = time.monotonic()
        for request in [each for each, until in list(self._open.items()) if until <= now]:
            self._open.pop(request, None)
            with contextlib.suppress(OSError):
                request.shutdown(SHUT_RDWR)

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        log.debug("a client of the metrics went away", client=str(client_address))


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_LIMIT_S

    def do_GET(self) -> None:
        try:
            status, body, kind = self._made()
        except Exception as error:  # noqa: BLE001  (an edge: one answer is lost, nothing else)
            said = f"{type(error).__name__}: {error}"
            log.warning("metrics could not be read", path=self.path, error=said)
            status, kind = 503, "application/json"
            body = json.dumps({"ok": False, "reason": said}).encode()
        self._answer(status, body, kind)

    def _made(self) -> tuple[int, bytes, str]:
        """Status, body and its type."""
        match self.path.partition("?")[0]:
            case "/metrics":
                return 200, exposition(self.server.source), "text/plain; version=0.0.4; charset=utf-8"
            case "/health":
                health = self.server.source.health()
                body = {"ok": health.ok, "reason": health.reason, **health.facts}
                return 200 if health.ok else 503, json.dumps(body).encode(), "application/json"
        return 404, b"there is /metrics and /health\n", "text/plain"

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


# ---------------------------------------------------------------- Prometheus' text


def exposition(source: Source) -> bytes:
    """The readings of `source` in Prometheus' text format. Raises KeyError for a name that is not in the table."""
    from prometheus_client import generate_latest
    from prometheus_client.registry import Collector

    class One(Collector):
        def collect(self) -> Iterable[Family]:
            return _families(source)

    # It asks for nothing but `collect`; a registry of its own would collect twice.
    return bytes(generate_latest(One()))  # type: ignore[arg-type]


def _families(source: Source) -> Iterable[Family]:
    table = {metric.name: metric for metric in METRICS}
    found: dict[str, Any] = {}
    readings = list(source.readings())
    run = source.run  # after them: some sources learn it on the way
    for reading in readings:
        metric = table[reading.name]
        if metric.name not in found:
            found[metric.name] = _family(metric)
        family = found[metric.name]
        labels = [run, *(reading.labels[name] for name in metric.labels)]
        if isinstance(reading.value, Mapping):
            buckets, total = _buckets(reading.value)
            family.add_metric(labels, buckets, total)
        else:
            family.add_metric(labels, reading.value)
    return found.values()


def _family(metric: Metric) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    kinds: dict[str, Callable[..., Any]] = {
        "gauge": GaugeMetricFamily,
        "counter": CounterMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    return kinds[metric.kind](metric.name, metric.help, labels=["run", *metric.labels])


_BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Of lags, in optimizer steps. max_lag is rarely above 8; the rest shows what the limit would cost."""


def _buckets(counts: Mapping[int, int]) -> tuple[list[tuple[str, float]], float]:
    """Samples up to each bound, and the sum of all values."""
    counts = dict(counts)
    buckets = [
        (f"{bound:.1f}", float(sum(n for value, n in counts.items() if value <= bound)))
        for bound in _BOUNDS
    ]
    buckets.append(("+Inf", float(sum(counts.values()))))
    return buckets, float(sum(value * n for value, n in counts.items()))
