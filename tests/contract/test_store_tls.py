"""S3 over TLS with a certificate authority of one's own: the right one works, anything else is refused at once."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from async_rl.errors import ConfigError, StoreUnavailable
from async_rl.store import StoreConfig, open_store
from tests.servers import S3Server

LIMIT_S = 30.0
CURVE = ("-pkeyopt", "ec_paramgen_curve:prime256v1")  # quicker to make than RSA


class TlsFront:
    """Ends TLS before a server that speaks plain HTTP: bytes go on as they come."""

    def __init__(self, certificate: Path, key: Path, backend: tuple[str, int]) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._backend = backend
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                plain, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with (
            suppress(OSError),
            plain,
            socket.create_connection(self._backend, LIMIT_S) as behind,
            self._context.wrap_socket(plain, server_side=True) as front,
        ):
            back = threading.Thread(target=_copy, args=(behind, front), daemon=True)
            back.start()
            _copy(front, behind)
            back.join(LIMIT_S)

    def close(self) -> None:
        self._listener.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def openssl(*argv: object) -> None:
    subprocess.run(["openssl", *map(str, argv)], check=True, capture_output=True, timeout=LIMIT_S)


def authority(folder: Path, name: str) -> Path:
    """Its certificate, name.pem, and key, name.key."""
    files = ("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem")
    openssl("req", "-x509", "-newkey", "ec", *CURVE, "-nodes", "-days", 2, "-subj", f"/CN={name}", *files)
    return folder / f"{name}.pem"


def certificate(folder: Path, ca: Path, address: str) -> tuple[Path, Path]:
    """For a server at this IP address, signed by `ca`: certificate and key."""
    key, request, signed = (folder / f"{address}.{ending}" for ending in ("key", "csr", "pem"))
    openssl(
        "req", "-newkey", "ec", *CURVE, "-nodes", "-subj", "/CN=server", "-keyout", key, "-out", request
    )
    names = folder / "names"
    names.write_text(f"subjectAltName=IP:{address}\n")
    signing = ("-CA", ca, "-CAkey", ca.with_suffix(".key"), "-CAcreateserial", "-days", 2)
    openssl("x509", "-req", "-in", request, *signing, "-extfile", names, "-out", signed)
    return signed, key


@pytest.fixture
def private_ca(tmp_path: Path) -> Path:
    return authority(tmp_path, "private-ca")


@pytest.fixture
def front(
    private_ca: Path, tmp_path: Path, seaweed: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TlsFront]:
    seaweed.activate(monkeypatch)
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    port = int(seaweed.endpoint.rpartition(":")[2])
    front = TlsFront(*certificate(tmp_path, private_ca, "127.0.0.1"), ("127.0.0.1", port))
    yield front
    front.close()


def config(front: TlsFront, ca_bundle: Path | None, host: str = "127.0.0.1") -> StoreConfig:
    return StoreConfig(
        endpoint_url=f"https://{host}:{front.port}",
        ca_bundle=str(ca_bundle or ""),
        retry_limit_s=20.0,
        part_bytes=5 << 20,
    )


def test_the_right_authority_works_for_objects_of_any_size(
    front: TlsFront, private_ca: Path, seaweed: S3Server
) -> None:
    store = open_store(seaweed.new_url(), config(front, private_ca))
    assert store.probe().conditional_put
    for size in (10, 12 << 20):
        store.put(f"k/{size}", bytes(size))
        assert store.get(f"k/{size}") == bytes(size)
    assert [info.size for info in store.list_after("k/")] == [10, 12 << 20]
    store.close()


def test_aws_ca_bundle_names_it_as_well(
    front: TlsFront, private_ca: Path, seaweed: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(private_ca))
    store = open_store(seaweed.new_url(), config(front, None))
    store.put("k", b"x")
    store.close()


@pytest.mark.parametrize("which", ["another authority", "those of the system"])
def test_a_server_of_an_unknown_authority_is_refused_at_the_first_try(
    front: TlsFront, tmp_path: Path, seaweed: S3Server, which: str
) -> None:
    other = authority(tmp_path, "other-ca") if which == "another authority" else None
    store = open_store(seaweed.new_url(), config(front, other))
    with pytest.raises(StoreUnavailable, match=r"can't be trusted.*VERIFY_FAILED.*ca_bundle in \[store\]"):
        store.put("k", b"x")
    assert front.connections == 1, "it was tried again, though that can't help"


def test_a_certificate_of_another_server_is_refused(
    private_ca: Path, tmp_path: Path, seaweed: S3Server, front: TlsFront
) -> None:
    port = int(seaweed.endpoint.rpartition(":")[2])
    impostor = TlsFront(*certificate(tmp_path, private_ca, "10.1.2.3"), ("127.0.0.1", port))
    store = open_store(seaweed.new_url(), config(impostor, private_ca))
    with pytest.raises(StoreUnavailable, match=r"can't be trusted.*127\.0\.0\.1.*another server's"):
        store.put("k", b"x")
    assert impostor.connections == 1
    impostor.close()


def test_a_server_without_tls_is_told_from_one_that_is_away(front: TlsFront, seaweed: S3Server) -> None:
    plain = StoreConfig(endpoint_url=seaweed.endpoint.replace("http:", "https:"), retry_limit_s=20.0)
    with pytest.raises(StoreUnavailable, match=r"speaks no TLS.*plain http"):
        open_store(seaweed.new_url(), plain).put("k", b"x")


@pytest.mark.parametrize("content", [None, "no certificate\n"], ids=["missing", "nonsense"])
def test_a_ca_bundle_that_can_not_be_read_is_refused_before_anything_is_sent(
    front: TlsFront, tmp_path: Path, seaweed: S3Server, content: str | None
) -> None:
    bundle = tmp_path / "bundle.pem"
    if content is not None:
        bundle.write_text(content)
    with pytest.raises(ConfigError, match=r"ca_bundle.*bundle\.pem"):
        open_store(seaweed.new_url(), config(front, bundle))
    assert front.connections == 0
