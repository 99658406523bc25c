"""The S3 store when something is wrong: refusals that say what to do, and faults that pass."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

import pytest

from async_rl.errors import (
    AccessDenied,
    AlreadyExists,
    BucketMissing,
    ConfigError,
    NotFound,
    StoreError,
    StoreUnavailable,
)
from async_rl.store import StoreConfig, open_store
from async_rl.store.s3 import S3Store
from tests.faulty import FaultyS3, answer, cut, drop, lose_answer, slow_link, stall, status
from tests.servers import S3Server

QUICK = StoreConfig(retry_limit_s=10, read_timeout_s=5, part_bytes=5 << 20)


# Refusals: at once, with what to do.


@pytest.mark.parametrize("body", [b"<html>please log in</html>", b""], ids=["html", "nothing"])
def test_a_page_that_is_no_listing_does_not_pass_for_an_empty_store(
    faulty_s3: FaultyS3, body: bytes
) -> None:
    store = open_store(faulty_s3.url, QUICK)
    store.put("k", b"x")
    faulty_s3.script(answer(body))
    with pytest.raises(StoreError, match=r"the answer is no listing.*proxy"):
        list(store.list_after(""))
    assert [info.key for info in store.list_after("")] == ["k"]


@pytest.mark.parametrize("server", ["moto_s3", "seaweed"])
def test_a_missing_bucket_is_named_with_how_to_create_it(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(server).activate(monkeypatch)
    store = open_store("s3://not-there/run", QUICK)
    data = b"x"
    for operation in (
        store.probe,
        lambda: store.get("k"),
        lambda: store.head("k"),
        lambda: store.put("k", data),
        lambda: store.put_if_absent("k", data),
        lambda: list(store.list_after("")),
    ):
        with pytest.raises(
            BucketMissing, match=r"no bucket 'not-there' at http.*async-rl store mb s3://not-there"
        ):
            operation()


def test_an_unknown_access_key_is_told_from_a_wrong_secret(
    seaweed: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AccessDenied, match=r"signature.*AWS_SECRET_ACCESS_KEY"):
        open_store(s3_url, QUICK).probe()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NOBODY")
    with pytest.raises(AccessDenied, match=r"does not know the access key.*'NOBODY'.*AWS_ACCESS_KEY_ID"):
        open_store(s3_url, QUICK).probe()
    with pytest.raises(AccessDenied):
        open_store(s3_url, QUICK).head("k")


def test_no_credentials_at_all_says_which_variables_to_set(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with pytest.raises(AccessDenied, match=r"credentials.*AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        open_store(s3_url, QUICK).probe()


def test_an_unreachable_endpoint_is_given_up_within_the_limit(s3_url: str) -> None:
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        store = open_store(s3_url, StoreConfig(endpoint_url=endpoint, retry_limit_s=1.0))
        began = time.monotonic()
        with pytest.raises(
            StoreUnavailable, match=rf"{endpoint} can't be reached; tried \d+ times.*AWS_ENDPOINT_URL"
        ):
            store.probe()
    assert time.monotonic() - began < 3.0


def test_a_server_that_accepts_and_says_nothing_is_given_up_within_the_limit(s3_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = open_store(s3_url, StoreConfig(endpoint_url=endpoint, retry_limit_s=1.0))
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="connection failed"):
            store.get("k")
    assert time.monotonic() - began < 4.0


def test_what_is_no_url_is_refused_before_anything_is_sent(s3_url: str) -> None:
    for endpoint in ("nonsense", "localhost:9000:x"):
        with pytest.raises(ConfigError, match="endpoint_url"):
            open_store(s3_url, StoreConfig(endpoint_url=endpoint))
    for url in (
        "s3://",
        "s3://a",
        "s3://-bad-/x",
        "s3://bucket/../x",
        "s3://bucket//x",
        "http://x/y",
        "/plain",
    ):
        with pytest.raises(ConfigError, match=r"URL|names no bucket"):
            open_store(url)
    with pytest.raises(ConfigError, match="profile"):
        open_store(s3_url, StoreConfig(profile="nobody"))


@pytest.mark.parametrize(
    ("code", "s3_code", "error", "says"),
    [
        (403, "AccessDenied", AccessDenied, "s3:PutObject"),
        (403, "RequestTimeTooSkewed", AccessDenied, "clock"),
        (400, "ExpiredToken", AccessDenied, "expired"),
        (301, "PermanentRedirect", StoreError, "region"),
        (400, "EntityTooLarge", StoreError, "EntityTooLarge"),
    ],
)
def test_an_answer_that_will_not_change_is_not_asked_for_again(
    faulty_s3: FaultyS3, code: int, s3_code: str, error: type[StoreError], says: str
) -> None:
    store = open_store(faulty_s3.url, QUICK)
    faulty_s3.script(*[status(code, s3_code)] * 3)
    with pytest.raises(error, match=says):
        store.put("k", b"x")
    assert [request for request in faulty_s3.seen if request.startswith("PUT")] == faulty_s3.seen[:1]


# Faults that pass.


@pytest.mark.parametrize(
    "fault",
    [status(500), status(503, "SlowDown"), status(429, "TooManyRequests"), drop],
    ids=["500", "503", "429", "drop"],
)
def test_every_operation_survives_a_few_failures(faulty_s3: FaultyS3, fault: object) -> None:
    store = open_store(faulty_s3.url, QUICK)
    for operation in (
        lambda: store.put("k", b"123"),
        lambda: store.put_if_absent("new", b"x"),
        lambda: store.get("k") == b"123" or pytest.fail("wrong bytes"),
        lambda: store.head("k"),
        lambda: [i.key for i in store.list_after("")] == ["k", "new"] or pytest.fail("wrong listing"),
        lambda: store.delete("new"),
    ):
        faulty_s3.script(fault, fault)
        operation()
        assert not faulty_s3.faults
        assert len(faulty_s3.seen) >= 3


def test_a_conflict_of_conditional_puts_is_asked_again(faulty_s3: FaultyS3) -> None:
    store = open_store(faulty_s3.url, QUICK)
    faulty_s3.script(status(409, "ConditionalRequestConflict"))
    store.put_if_absent("k", b"x")
    assert len(faulty_s3.seen) == 2


def test_a_server_that_keeps_failing_is_given_up_within_the_limit(faulty_s3: FaultyS3) -> None:
    store = open_store(faulty_s3.url, StoreConfig(retry_limit_s=1.0))
    faulty_s3.script(*[status(503, "SlowDown")] * 100)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"SlowDown.*tried \d+ times"):
        store.put("k", b"x")
    assert time.monotonic() - began < 3.0


def test_closing_the_store_ends_the_repeating(faulty_s3: FaultyS3) -> None:
    store = open_store(faulty_s3.url, StoreConfig(retry_limit_s=60))
    faulty_s3.script(status(500), status(500), lambda handler: (store.close(), status(500)(handler)))
    with pytest.raises(StoreUnavailable):
        store.put("k", b"x")
    assert len(faulty_s3.seen) == 3


@pytest.mark.parametrize("fault", [cut(0), cut(1000), stall(1000)], ids=["cut at 0", "cut", "stall"])
def test_a_body_that_ends_early_is_fetched_again(faulty_s3: FaultyS3, fault: object) -> None:
    store = open_store(faulty_s3.url, StoreConfig(retry_limit_s=10, read_timeout_s=0.5))
    data = bytes(range(256)) * 1024
    store.put("k", data)
    for start, length in [(0, None), (100, 200_000)]:
        faulty_s3.script(fault, fault)
        assert store.get("k", start, length) == data[start:][:length]
        assert (
            len(faulty_s3.seen) >= 3
        )  # on a busy machine the good answer may take longer than read_timeout_s, too


@pytest.mark.parametrize("fault", [cut(0), cut(300_000), stall(300_000)], ids=["cut at 0", "cut", "stall"])
def test_a_stream_that_breaks_off_goes_on_where_it_broke(faulty_s3: FaultyS3, fault: object) -> None:
    store = open_store(faulty_s3.url, StoreConfig(retry_limit_s=10, read_timeout_s=0.5))
    data = bytes(range(256)) * 4096
    store.put("k", data)
    faulty_s3.script(fault, fault)
    assert b"".join(store.stream("k", 100, 900_000)) == data[100:][:900_000]
    assert len(faulty_s3.seen) == 3


def test_a_server_that_ignores_ranges_is_found_out(faulty_s3: FaultyS3) -> None:
    store = open_store(faulty_s3.url, QUICK)
    store.put("k", b"0123456789")
    faulty_s3.script(answer(b"0123456789"))
    with pytest.raises(StoreError, match="Range"):
        store.get("k", 5, 2)
    assert store.get("k", 5, 2) == b"56"


def test_a_created_object_whose_answer_was_lost_reads_as_already_there(faulty_s3: FaultyS3) -> None:
    store = open_store(faulty_s3.url, QUICK)
    faulty_s3.script(lose_answer)
    with pytest.raises(AlreadyExists):
        store.put_if_absent("k", b"mine")
    assert store.get("k") == b"mine"


def test_a_server_without_conditional_puts_is_found_by_the_probe_and_still_used(
    faulty_s3: FaultyS3,
) -> None:
    store = open_store(faulty_s3.url, QUICK)
    faulty_s3.script(status(501, "NotImplemented"), methods=("PUT",))
    assert not store.probe().conditional_put
    store.put_if_absent("k.json", b"first")
    with pytest.raises(AlreadyExists):
        store.put_if_absent("k.json", b"second")
    assert store.get("k.json") == b"first"
    with pytest.raises(StoreError, match="does not enforce conditional puts, and only records"):
        store.put_if_absent("k", b"x")


def test_a_server_that_ignores_the_condition_is_found_by_the_probe(faulty_s3: FaultyS3) -> None:
    def unconditional(handler: object) -> None:
        # The condition is among the signed headers, so it can't be taken out: the object is, just before.
        key = handler.path.split("/", 2)[2]  # type: ignore[attr-defined]
        store._client.delete_object(Bucket=store.bucket, Key=key)
        from tests.faulty import pass_on

        pass_on(handler)  # type: ignore[arg-type]

    store = open_store(faulty_s3.url, QUICK)
    faulty_s3.script(unconditional, unconditional, methods=("PUT",))
    assert not store.probe().conditional_put
    assert [i.key for i in store.list_after("")] == []


# Uploads.

PART = 5 << 20


def test_an_upload_survives_failing_parts_and_a_lost_commit(faulty_s3: FaultyS3) -> None:
    store = open_store(faulty_s3.url, QUICK)
    data = bytes(range(256)) * (3 * PART // 256) + b"tail"
    faulty_s3.script(status(500), drop, lose_answer, methods=("PUT",))
    with store.upload("k") as upload:
        upload.write(data)
        faulty_s3.script(lose_answer, methods=("POST",))
        upload.commit()
    assert store.get("k") == data


def test_a_commit_whose_answer_was_lost_is_recognised_where_the_upload_is_forgotten(
    faulty_s3: FaultyS3,
) -> None:
    store = open_store(faulty_s3.url, QUICK)
    with store.upload("k") as upload:
        upload.write(bytes(2 * PART))
        faulty_s3.script(lose_answer, status(404, "NoSuchUpload"), methods=("POST",))
        upload.commit()
    with store.upload("never") as upload, pytest.raises(StoreError):
        upload.write(bytes(2 * PART))
        faulty_s3.script(drop, status(404, "NoSuchUpload"), methods=("POST",))
        upload.commit()


def test_a_part_that_can_not_be_stored_fails_the_upload_and_leaves_nothing(faulty_s3: FaultyS3) -> None:
    store = open_store(faulty_s3.url, StoreConfig(part_bytes=PART, parallel=2, retry_limit_s=10))
    faulty_s3.script(status(403, "AccessDenied"), methods=("PUT",))
    with pytest.raises(AccessDenied, match=r"part \d of s3://"), store.upload("k") as upload:
        for _ in range(8):
            upload.write(bytes(PART))
        upload.commit()
    assert [i.key for i in store.list_after("")] == []
    assert not store._client.list_multipart_uploads(Bucket=store.bucket, Prefix=store.prefix).get("Uploads")


def test_a_link_slower_than_the_connect_limit_is_no_failure(faulty_s3: FaultyS3) -> None:
    """A new connection's socket has the connect limit as its timeout: a body sent in one piece would have
    to leave within it."""
    config = StoreConfig(part_bytes=32 << 20, connect_timeout_s=0.5, read_timeout_s=10, retry_limit_s=20)
    data = bytes(24 << 20)
    store = open_store(faulty_s3.url, config)
    faulty_s3.script(slow_link(12e6), methods=("PUT",))
    store.put("k", data)
    assert len(faulty_s3.seen) == 1


def test_a_record_whose_writer_died_before_its_body_counts_as_absent(
    seaweed: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SeaweedFS keeps an empty object of such a put."""
    seaweed.activate(monkeypatch)
    store = open_store(seaweed.new_url(), QUICK)
    assert isinstance(store, S3Store)
    store.put("versions/0000000000.json", b"{}")
    key = "versions/0000000001.json"
    signed = store._client.generate_presigned_url("put_object", Params=store._at(key), ExpiresIn=60)
    place = urlsplit(signed)
    with socket.create_connection((place.hostname, place.port), 10) as broken:
        head = (
            f"PUT {place.path}?{place.query} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: 9\r\n\r\n"
        )
        broken.sendall(head.encode())

    def size() -> int | None:
        listed = store._client.list_objects_v2(Bucket=store.bucket, Prefix=store._at(key)["Key"])
        return next((item["Size"] for item in listed.get("Contents", ())), None)

    deadline = time.monotonic() + 30
    while size() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert size() == 0, "this server leaves nothing: the case is not met any more"

    assert [info.key for info in store.list_after("versions/")] == ["versions/0000000000.json"]
    for look in (store.get, store.head):
        with pytest.raises(NotFound):
            look(key)
    other = open_store(store.url, QUICK)
    store.put_if_absent(key, b"ours")
    with pytest.raises(AlreadyExists):
        other.put_if_absent(key, b"theirs")
    assert store.get(key) == b"ours"
    assert [info.key for info in store.list_after("versions/")][1:] == [key]
