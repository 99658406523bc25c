"""Real object stores for tests, each a process of its own on a free port, started once per session.

def test_…(seaweed):   seaweed.endpoint, seaweed.env, seaweed.new_bucket(), seaweed.new_url()
def test_…(s3_url):    a fresh s3:// prefix on SeaweedFS; the environment is set so that open_store
                       works on it here and in child processes
def test_…(moto_s3):   the same object as `seaweed`, over moto (which checks no signatures)
def test_…(juicefs):   likewise, over JuiceFS' gateway: an old MinIO, which ignores If-None-Match
forked_starts:         for whole runs (tests/runs.py): no process of them waits for its imports (tests/warm_start.py)
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from async_rl.procs import Fleet
from async_rl.store.local_server import LocalServer, free_ports, loopback_client, make_bucket, weed_command
from tests.runs import LocalRun
from tests.warm_start import WarmStart

LIMIT_S = 60.0


@cache
def read_descriptions_once() -> None:
    """botocore reads what is known about S3 anew for each client: 0.15 s of a core, and tests make hundreds."""
    import botocore.loaders
    import botocore.session

    loader = botocore.loaders.create_loader()
    botocore.session.create_loader = lambda *_: loader


class S3Server:
    """A running server, as tests see it."""

    def __init__(self, endpoint: str, key_id: str, secret: str, bucket: str) -> None:
        self.endpoint = endpoint
        self.bucket = bucket
        self.env = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": key_id,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
            # Whatever account the developer's machine is set up for must not leak in.
            "AWS_SESSION_TOKEN": "",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }
        read_descriptions_once()
        self._client = loopback_client(endpoint, key_id, secret)

    def new_bucket(self) -> str:
        """The name of a bucket made now. SeaweedFS reserves space for each: prefer new_url."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        reason = make_bucket(self._client, name)
        assert not reason, reason
        return name

    def new_url(self) -> str:
        """An unused prefix in the session's bucket, as a store URL."""
        return f"s3://{self.bucket}/{uuid.uuid4().hex[:12]}"

    def activate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this server the one that boto3 finds, in this process and in those it starts."""
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)

    def wait_until_ready(self, fleet: Fleet) -> None:
        deadline = time.monotonic() + LIMIT_S
        while reason := make_bucket(self._client, self.bucket):
            fleet.check()
            assert time.monotonic() < deadline, (
                f"{self.endpoint} was not ready within {LIMIT_S} s: {reason}"
            )
            time.sleep(0.1)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS: checks signatures, enforces conditional puts, and the policies of users that its IAM API makes."""

    def with_users(*args: Any) -> Any:
        argv, env = weed_command(*args)
        return [*argv, "-s3.iam.readOnly=false"], env

    local = LocalServer(
        tmp_path_factory.mktemp("seaweed"), bucket="tests", kind="seaweedfs", limit_s=LIMIT_S, grace_s=0
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("async_rl.store.local_server.weed_command", with_users)
        local.start()
    try:
        yield S3Server(
            local.endpoint, local.env["AWS_ACCESS_KEY_ID"], local.env["AWS_SECRET_ACCESS_KEY"], local.bucket
        )
    finally:
        local.stop()


@pytest.fixture(scope="session")
def moto_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """moto in its server mode: the closest there is to AWS' answers without AWS."""
    (port, *_) = free_ports(3)
    log_path: Path = tmp_path_factory.mktemp("moto") / "moto.log"
    with Fleet() as fleet:
        argv = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
        fleet.start("moto", argv, log_path=log_path)
        server = S3Server(f"http://127.0.0.1:{port}", "testing", "testing", "tests")
        server.wait_until_ready(fleet)
        yield server


@pytest.fixture(scope="session")
def juicefs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A store without conditional puts: JuiceFS' gateway is MinIO's of the time before it had them. Its objects lie
    in files, their names in SQLite."""
    folder = tmp_path_factory.mktemp("juicefs")
    program = Path(sys.executable).with_name("juicefs")
    meta = f"sqlite3://{folder / 'meta.db'}"
    key_id, secret = "async-rl", uuid.uuid4().hex
    disk = ["--storage", "file", "--bucket", f"{folder}/data/", "--trash-days", "0"]
    subprocess.run(
        [program, "format", *disk, meta, "tests"], check=True, capture_output=True, timeout=LIMIT_S
    )
    port, metrics, *_ = free_ports(4)
    address = f"127.0.0.1:{port}"
    flags = ["--multi-buckets", "--no-banner", "--no-usage-report", "--backup-meta", "0"]
    flags += ["--metrics", f"127.0.0.1:{metrics}", "--cache-dir", str(folder / "cache")]
    with Fleet() as fleet:
        fleet.start(
            "juicefs",
            [str(program), "gateway", *flags, meta, address],
            env={"MINIO_ROOT_USER": key_id, "MINIO_ROOT_PASSWORD": secret, "HOME": str(folder)},
            log_path=folder / "juicefs.log",
        )
        server = S3Server(f"http://{address}", key_id, secret, "tests")
        server.wait_until_ready(fleet)
        yield server


@pytest.fixture
def s3_url(seaweed: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    seaweed.activate(monkeypatch)
    return seaweed.new_url()


@pytest.fixture(scope="session")
def warm_start() -> Iterator[WarmStart]:
    server = WarmStart()
    yield server
    server.close()


@pytest.fixture
def forked_starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every LocalRun of this test forks its processes instead of starting them. ASYNC_RL_TEST_FRESH=1 starts them: to
    see whether it makes a difference."""
    if not os.environ.get("ASYNC_RL_TEST_FRESH"):
        monkeypatch.setattr(LocalRun, "warm", request.getfixturevalue("warm_start"))
