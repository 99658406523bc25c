"""The faulty proxy does what it says, the same way for the same seed; the store survives its weather."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import AlreadyExists, StoreUnavailable
from async_rl.procs import Fleet
from async_rl.store import ObjectStore, StoreConfig, open_store
from tests.chaos.s3_proxy import Remote, S3Proxy, Weather
from tests.servers import S3Server

PATIENT = StoreConfig(retry_limit_s=30, read_timeout_s=2)
SHORT = StoreConfig(retry_limit_s=1.0, read_timeout_s=0.3)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rl.store.retry.FIRST_S", 0.005)


@pytest.fixture
def proxy(seaweed: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    seaweed.activate(monkeypatch)
    with S3Proxy(seaweed.endpoint, seed=3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def use(store: ObjectStore, count: int = 12) -> None:
    """Every operation of the store; each must come out as if nothing had happened."""
    for n in range(count):
        store.put(f"k/{n}", b"%d" % n * 5000)
        try:
            store.put_if_absent(f"new/{n}", b"%d" % n)
        except AlreadyExists:  # its answer was lost
            assert store.get(f"new/{n}") == b"%d" % n
        assert store.get(f"k/{n}", 100, 3000) == (b"%d" % n * 5000)[100:3100]
        assert b"".join(store.stream(f"k/{n}", 5, 4000)) == (b"%d" % n * 5000)[5:4005]
        assert store.head(f"k/{n}").size == len(b"%d" % n * 5000)
    assert len(list(store.list_after("k/"))) == count
    store.delete("k/0")
    assert "k/0" not in [each.key for each in store.list_after("k/")]


def test_the_store_survives_a_storm_of_every_fault(proxy: S3Proxy, seaweed: S3Server) -> None:
    store = open_store(seaweed.new_url(), PATIENT)
    proxy.weather = Weather(fail=0.15, drop=0.1, lose=0.1, cut=0.1, delay=0.2, delay_s=0.02)
    use(store)
    counts = proxy.counts()
    assert all(counts[name] > 0 for name in ("fail", "drop", "lose", "cut", "delay", "passed")), counts


def test_equal_seeds_meet_equal_faults_whatever_the_run_is_called(
    seaweed: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seaweed.activate(monkeypatch)

    def met(seed: int) -> list[dict[str, int]]:
        url = seaweed.new_url()
        with S3Proxy(seaweed.endpoint, seed=seed, root=url.removeprefix("s3:/")) as proxy:
            store = open_store(url, StoreConfig(endpoint_url=proxy.endpoint, retry_limit_s=30))
            proxy.weather = Weather(fail=0.3, lose=0.1, cut=0.1)
            seen = []
            for n in range(10):
                store.put(f"k/{n}", b"x" * 100)
                store.get(f"k/{n}")
                seen.append(proxy.counts())
            return seen

    assert met(5) == met(5)
    assert met(5) != met(6)


def test_an_outage_ends_with_the_limit_and_passes_with_the_weather(
    proxy: S3Proxy, seaweed: S3Server
) -> None:
    store = open_store(seaweed.new_url(), SHORT)
    store.put("k", b"x")
    for weather in (Weather(down=True), Weather(down=True, hang=1.0)):
        proxy.weather = weather
        with pytest.raises(StoreUnavailable, match=r"tried \d+ times"):
            store.get("k")
        proxy.weather = Weather()
        assert store.get("k") == b"x"


def test_weather_can_be_limited_to_some_requests(proxy: S3Proxy, seaweed: S3Server) -> None:
    store = open_store(seaweed.new_url(), SHORT)
    proxy.weather = Weather(fail=1.0, methods=("PUT",), part="packs/")
    store.put("other/k", b"x")
    with pytest.raises(StoreUnavailable, match="packs/k"):
        store.put("packs/k", b"x")


def test_a_stale_listing_is_one_from_before_the_last_writes(proxy: S3Proxy, seaweed: S3Server) -> None:
    store = open_store(seaweed.new_url(), PATIENT)
    store.put("a/1", b"")
    proxy.weather = Weather(stale_s=60.0)
    proxy.once("stale", "GET", "list-type")
    assert [each.key for each in store.list_after("a/")] == []
    assert [each.key for each in store.list_after("a/")] == ["a/1"]


def test_a_lost_answer_is_lost_after_the_server_took_the_put(proxy: S3Proxy, seaweed: S3Server) -> None:
    store = open_store(seaweed.new_url(), PATIENT)
    proxy.once("lose", "PUT", "versions/")
    with pytest.raises(AlreadyExists):
        store.put_if_absent("versions/1", b"mine")
    assert store.get("versions/1") == b"mine"
    assert proxy.pending() == 0


def test_a_proxy_of_its_own_process_is_controlled_over_its_port(
    seaweed: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from async_rl.store.local_server import free_ports

    seaweed.activate(monkeypatch)
    (port, *_) = free_ports(3)
    argv: list[Any] = [sys.executable, "-m", "tests.chaos.s3_proxy", "--backend", seaweed.endpoint]
    with Fleet(grace_s=5) as fleet:
        fleet.start("proxy", [*argv, "--port", str(port)], log_path=tmp_path / "proxy.log")
        remote = Remote(f"http://127.0.0.1:{port}")
        store = open_store(seaweed.new_url(), StoreConfig(endpoint_url=remote.endpoint, retry_limit_s=30))
        store.put("k", b"x")
        remote.weather = Weather(fail=0.5)
        assert remote.weather == Weather(fail=0.5)
        for _ in range(10):
            assert store.get("k") == b"x"
        remote.once("lose", "GET", "k")
        assert store.get("k") == b"x"
        assert remote.counts()["fail"] and remote.counts()["lose"] == 1
        with pytest.raises(ValueError, match="no fault"):
            remote.once("nonsense")
