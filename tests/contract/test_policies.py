"""The policies of docs/security.md, as they stand there, against a server that enforces them (SeaweedFS with users):
everything that a trainer, a worker and a viewer do is allowed, and what a worker must not do is refused in so many
words."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import pytest
import torch

from async_rl.errors import AccessDenied
from async_rl.store import ObjectStore, StoreConfig, open_store
from async_rl.weights import lineage
from async_rl.weights.compactor import Compactor
from async_rl.weights.config import WeightsConfig
from async_rl.weights.gc import collect, dead_edges
from async_rl.weights.publisher import Publisher
from async_rl.weights.readers import ReaderBeat, drop_beat, live_readers, newest_lack, write_beat
from async_rl.weights.run import fetch_model_files, open_run
from async_rl.weights.subscriber import Subscriber
from tests.integration.test_checkpoints import load, save, whole_state
from tests.servers import S3Server
from tests.weights_support import History
from workers import checkpoints

PAGE = Path(__file__).parents[2] / "docs/security.md"
CONFIG = StoreConfig(part_bytes=5 << 20, retry_limit_s=20)
WEIGHTS = WeightsConfig(skip_spans=(2,), keep_versions=2, gc_grace_s=0.0)
LIMIT_S = 30.0
POLICIES = {"trainer": 0, "worker": 1, "viewer": 2}
"""Which of the page's policies."""


def policy(name: str, bucket: str, run: str) -> dict[str, Any]:
    blocks = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    text = blocks[POLICIES[name]].replace("BUCKET", bucket).replace("RUN", run)
    found: dict[str, Any] = json.loads(text)
    return found


class Keys(NamedTuple):
    key_id: str
    secret: str


class Run:
    """A run's prefix on the server, and its store as each of them opens it."""

    def __init__(self, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.url = server.new_url()
        self._iam = boto3.client(
            "iam",
            endpoint_url=server.endpoint,
            aws_access_key_id=server.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=server.env["AWS_SECRET_ACCESS_KEY"],
            region_name="us-east-1",
        )
        bucket, _, run = self.url.removeprefix("s3://").partition("/")
        self._keys = {name: self._make(name, policy(name, bucket, run)) for name in POLICIES}
        self._opened: list[ObjectStore] = []

    def _make(self, name: str, document: dict[str, Any]) -> Keys:
        user = f"{name}-{uuid.uuid4().hex[:8]}"
        self._iam.create_user(UserName=user)
        self._iam.put_user_policy(UserName=user, PolicyName="run", PolicyDocument=json.dumps(document))
        made = self._iam.create_access_key(UserName=user)["AccessKey"]
        return Keys(made["AccessKeyId"], made["SecretAccessKey"])

    def open_as(self, name: str) -> ObjectStore:
        """Waits for: the server having heard of the user."""
        self._monkeypatch.setenv("AWS_ACCESS_KEY_ID", self._keys[name].key_id)
        self._monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", self._keys[name].secret)
        store = open_store(self.url, CONFIG)
        self._opened.append(store)
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                list(store.list_after("versions/"))
                return store
            except AccessDenied:
                assert time.monotonic() < deadline, f"the server does not know the {name} after {LIMIT_S} s"
                time.sleep(0.1)

    def close(self) -> None:
        for store in self._opened:
            store.close()


@pytest.fixture
def run(seaweed: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    seaweed.activate(monkeypatch)
    with closing(Run(seaweed, monkeypatch)) as run:
        yield run


def publish(store: ObjectStore, folder: Path) -> History:
    """What a trainer does in its life: versions by hand and by the publisher, skip deltas, garbage, checkpoints."""
    assert store.probe().conditional_put
    history = History(folder, store)
    history.full(history.random())
    for number in range(1, 6):
        history.delta(history.changed(0.1, seed=number))
    parameters = {spec.name: torch.zeros(spec.shape) for spec in history.run.tensors}
    claim = lineage.claim(store)
    with Publisher(store, history.run, claim, parameters, WEIGHTS, parent=history.newest) as publisher:
        for step in range(6, 9):
            next(iter(parameters.values())).add_(1.0)
            publisher.publish(step)
            publisher.flush(LIMIT_S)
    Compactor(store, history.run, WEIGHTS, folder / "scratch").run()
    for _ in range(2):
        collected = collect(store, WEIGHTS)
    assert collected.sweep, "nothing was deleted: the test shows nothing"
    for step in range(3):
        checkpoint = save(store, whole_state(), 2, step=step)
        checkpoints.prune(store, 1, checkpoint.name)
    load(store, checkpoint, 1)
    with store.upload("packs/large") as upload:
        upload.write(bytes(11 << 20))
    assert newest_lack(store) == -1
    lineage.check_not_fenced(store, claim)
    return history


def test_a_trainer_a_worker_and_a_viewer_can_do_all_they_need(run: Run, tmp_path: Path) -> None:
    trainer = run.open_as("trainer")
    publish(trainer, tmp_path)

    worker = run.open_as("worker")
    info = open_run(worker)
    fetch_model_files(worker, info, tmp_path / "model")
    reader = Subscriber(worker, info, tmp_path / "cache", WEIGHTS)
    newest = reader.newest(-1)
    assert newest is not None and newest.step == 8
    reader.fetch(newest)
    reader.close()
    dead_edges(worker)
    write_beat(worker, ReaderBeat("fleet/w1", (newest.version,), 3600.0))
    assert [beat.worker for beat in live_readers(trainer)] == ["fleet/w1"]

    viewer = run.open_as("viewer")
    assert open_run(viewer).run == info.run
    assert lineage.wanted_version(viewer, None) == newest
    assert b"fleet/w1" in viewer.get(next(viewer.list_after("workers/")).key)
    assert [each.key for each in viewer.list_after("checkpoints/") if each.key.endswith(".json")]

    drop_beat(worker, "fleet/w1")


WORKER_MUST_NOT: dict[str, Callable[[ObjectStore, str], object]] = {
    "put": lambda store, key: store.put(key, b"x"),
    "create": lambda store, key: store.put_if_absent(key, b"x"),
    "delete": lambda store, key: store.delete(key),
}
THEIRS = [
    *("run.json", "model/0/config.json", "versions/0000000000.json", "versions/0000000009.json"),
    *("incarnations/00000000.json", "incarnations/00000009.json", "packs/0000000009-00000000-0-0"),
    *("ways/x.json", "gc/00000000.json", "checkpoints/00000001-0000000001.json", "clock/x", "elsewhere"),
]


def test_a_worker_can_write_and_delete_nothing_that_others_read(run: Run, tmp_path: Path) -> None:
    trainer = run.open_as("trainer")
    for key in THEIRS:
        trainer.put(key, b"theirs")
    worker = run.open_as("worker")
    for key in THEIRS:
        for what, attempt in WORKER_MUST_NOT.items():
            with pytest.raises(AccessDenied) as refused:
                attempt(worker, key)
            said = str(refused.value)
            verb = {"put": "write", "create": "create", "delete": "delete"}[what]
            assert f"can't {verb} {run.url}/{key}: access denied" in said
            assert "the access key in use is" in said and "docs/security.md" in said
    with (
        pytest.raises(AccessDenied, match=r"start the upload of .*packs/large"),
        worker.upload("packs/large") as up,
    ):
        up.write(bytes(6 << 20))
    with pytest.raises(AccessDenied, match=r"read .*checkpoints/00000001-0000000001.json.*s3:GetObject"):
        worker.get("checkpoints/00000001-0000000001.json")
    for key in THEIRS:
        assert trainer.get(key) == b"theirs"


def test_a_viewer_can_change_nothing(run: Run) -> None:
    run.open_as("trainer").put("run.json", b"theirs")
    viewer = run.open_as("viewer")
    for key in ("workers/w.json", "run.json", "versions/0000000000.json", "clock/x"):
        for attempt in WORKER_MUST_NOT.values():
            with pytest.raises(AccessDenied):
                attempt(viewer, key)
    with pytest.raises(AccessDenied, match="packs/x"):
        viewer.get("packs/x")


def test_other_runs_of_the_bucket_are_out_of_reach(run: Run, seaweed: S3Server) -> None:
    trainer = run.open_as("trainer")
    elsewhere = open_store(seaweed.new_url(), CONFIG)
    try:
        for attempt in WORKER_MUST_NOT.values():
            with pytest.raises(AccessDenied):
                attempt(elsewhere, "versions/0000000000.json")
        with pytest.raises(AccessDenied):
            elsewhere.get("run.json")
    finally:
        elsewhere.close()
    trainer.put("k", b"x")
