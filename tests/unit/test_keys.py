"""Keys without sockets: their files, the list of who is allowed, what each role may say, and what a dialer
makes of a handshake that failed. With sockets: tests/contract/test_transport.py."""

from __future__ import annotations

import socket
import threading

import pytest
import zmq

from async_rl import wire
from async_rl.errors import ConfigError, NotAllowed, Refused
from async_rl.transport.allowed import (
    ROLES,
    Allowed,
    Keyring,
    add,
    format_list,
    parse_list,
    refusal,
    remove,
)
from async_rl.transport.handshake import HUNG_UP, Handshakes, mechanism_at
from async_rl.transport.keys import (
    ClientKey,
    client_key_text,
    new_secret,
    of_hex,
    public_of,
    read_client_key,
    write_private,
)
from async_rl.transport.zap import answer
from tests.orchestration import group, train_key

A, B = "a1" * 32, "b2" * 32


# ---------------------------------------------------------------- files


def test_a_clients_file_holds_all_that_it_needs_and_only_its_owner_can_read_it(tmp_path):
    secret, path = new_secret(), tmp_path / "w1.key"
    write_private(path, client_key_text("w1", secret, b"\7" * 32))
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_client_key(path) == ClientKey("w1", secret, b"\7" * 32)
    assert read_client_key(path).public == public_of(secret) != secret


def test_a_key_is_never_shown_by_accident():
    key = ClientKey("w1", new_secret(), b"\7" * 32)
    assert key.secret.hex() not in repr(key) and repr(key.secret) not in repr(key)


def test_the_orchestrators_own_key_is_nobody_elses(tmp_path):
    Keyring.create(tmp_path / "keys")
    for server in ("", B):
        with pytest.raises(ConfigError, match=r"server\.key is the orchestrator's own key") as caught:
            read_client_key(tmp_path / "keys" / "server.key", server)
        assert "keys new NAME" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ab" * 31 + "a", "found 63 digits"),
        ("ab" * 33, "found 66 digits"),
        ("ab" * 31 + "xy", "found 64 characters, 2 of them no such digit"),
        ("ab " * 21 + "a", "found 64 characters, 21 of them no such digit"),
        ("", "found nothing"),
    ],
)
def test_a_key_that_is_cut_or_mistyped_is_told_by_what_is_wrong_and_not_repeated(text, found):
    with pytest.raises(
        ConfigError, match=f"--server-key is no key: 64 hexadecimal digits were expected, {found}"
    ) as no:
        of_hex(text, "--server-key")
    assert not text or text not in str(no.value)


def test_a_server_key_that_is_given_replaces_the_one_in_the_file(tmp_path):
    write_private(tmp_path / "k", client_key_text("w1", new_secret(), None))
    with pytest.raises(ConfigError, match="public key is missing") as caught:
        read_client_key(tmp_path / "k")
    assert "--server-key" in caught.value.hint
    assert read_client_key(tmp_path / "k", B).server == bytes.fromhex(B)


@pytest.mark.parametrize(
    ("text", "mode", "error"),
    [
        (f'name = "w"\nsecret = "{A}"\nserver = "{B}"', 0o604, "everybody on this machine can read"),
        (f'name = "w"\nsecret = "{A[:-1]}"\nserver = "{B}"', 0o600, "secret in .* is no key"),
        (f'name = "w"\nsecret = "{A}"\nserver = "xyz"', 0o600, "server in .* is no key"),
        (f'name = "a b"\nsecret = "{A}"\nserver = "{B}"', 0o600, "can't be the name of a key"),
        ("secret = ", 0o600, "no key file"),
        ("", 0o600, "secret in .* is no key"),
    ],
)
def test_a_file_that_is_no_good_key_is_named_and_its_secret_is_not(tmp_path, text, mode, error):
    path = tmp_path / "w.key"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=error) as caught:
        read_client_key(path)
    assert caught.value.hint and A[:8] not in str(caught.value)


def test_a_key_is_not_overwritten(tmp_path):
    write_private(tmp_path / "k", "first")
    with pytest.raises(ConfigError, match="exists already"):
        write_private(tmp_path / "k", "second")
    assert (tmp_path / "k").read_text() == "first"


# ---------------------------------------------------------------- the list


def test_the_list_is_read_as_it_is_written_and_people_may_comment_it():
    entries = [Allowed("worker", "a", A), Allowed("watcher", "b", B)]
    text = "\n# mine\n  " + format_list(entries)
    assert list(parse_list(text).values()) == entries


@pytest.mark.parametrize(
    "line",
    [
        "worker a",
        f"boss a {A}",
        f"worker a/b {A}",
        f"worker a {A[1:]}",
        f"worker a {A} b",
        f"worker c {B}",
        f"worker b {A}",
    ],
)
def test_a_line_that_cant_be_meant_is_named_by_its_number_or_its_name(line):
    with pytest.raises(ConfigError, match="line 2|'a/b'"):
        parse_list(f"worker b {B}\n{line}\n")


def test_a_name_and_a_key_are_allowed_once(tmp_path):
    ring = Keyring.create(tmp_path / "keys")
    add(ring.folder, Allowed("worker", "a", A))
    for again in (Allowed("worker", "a", B), Allowed("trainer", "b", A)):
        with pytest.raises(ConfigError, match="already") as caught:
            add(ring.folder, again)
        assert "revoke a" in caught.value.hint
    assert ring.entries == [Allowed("worker", "a", A)]


def test_keys_are_allowed_and_revoked_while_the_ring_is_in_use(tmp_path):
    ring = Keyring.create(tmp_path / "keys")
    assert ring.find(A).code == "key_unknown"
    for _ in range(3):
        add(ring.folder, Allowed("worker", "a", A))
        assert ring.find(A).name == "a"
        assert remove(ring.folder, "a").public == A
        assert ring.find(A).code == "key_revoked"
    assert ring.find(None).code == ring.find(B).code == "key_unknown"
    with pytest.raises(ConfigError, match="allows no key"):
        remove(ring.folder, "a")


def test_a_list_edited_by_hand_to_the_same_length_is_noticed(tmp_path):
    ring = Keyring.create(tmp_path / "keys")
    add(ring.folder, Allowed("worker", "a", A))
    assert ring.find(A).name == "a"
    path = ring.folder / "allowed"
    path.write_text(path.read_text().replace(A, B))
    assert ring.find(A).code == "key_revoked" and ring.find(B).name == "a"


@pytest.mark.parametrize("damage", ["removed", "broken"])
def test_without_a_list_nobody_is_allowed_but_may_come_again(tmp_path, damage):
    ring = Keyring.create(tmp_path / "keys")
    add(ring.folder, Allowed("worker", "a", A))
    path = ring.folder / "allowed"
    whole = path.read_text()
    if damage == "removed":
        path.unlink()
    else:
        path.write_text("?")
    refused = ring.find(A)
    assert (refused.code, refused.retry) == ("key_list", True)
    path.write_text(whole)
    assert ring.find(A).name == "a"


def test_a_folder_keeps_its_own_key_and_is_refused_where_it_is_none(tmp_path):
    with pytest.raises(ConfigError, match="no folder of keys") as caught:
        Keyring.open(tmp_path / "keys")
    assert f"--server {tmp_path / 'keys'}" in caught.value.hint
    public = Keyring.create(tmp_path / "keys").public
    assert Keyring.create(tmp_path / "keys").public == Keyring.open(tmp_path / "keys").public == public
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "keys" / "server.key").stat().st_mode & 0o777 == 0o600


# ---------------------------------------------------------------- roles

WORKERS = [
    wire.Hello(wire.PROTOCOL, "a", "here"),
    wire.Credit(1, 0),
    wire.Heartbeat(0, "serving"),
    wire.GroupDone(1, group(train_key(0), worker="a")),
    wire.Failed(1, train_key(0), "x"),
    wire.Bye("x"),
]
TRAINERS = [
    wire.Attach(wire.PROTOCOL, "run", "model", 1, 0, 0, 0, 10),
    wire.NextBatch(1, 0),
    wire.Published(1, 1, 1),
    wire.Checked(1, 1, ()),
    wire.Finish(1, 1),
]


def test_every_message_that_may_come_in_is_one_roles_or_everybodys():
    may = {role: set() for role in ROLES}
    for role in ROLES:
        for message in [*WORKERS, *TRAINERS, wire.StatusRequest()]:
            if refusal(Allowed(role, "a", A), b"a:1", message) is None:
                may[role].add(type(message))
    assert may["worker"] == {*map(type, WORKERS), wire.StatusRequest}
    assert may["trainer"] == {*map(type, TRAINERS), wire.StatusRequest}
    assert may["watcher"] == {wire.StatusRequest}
    assert {*map(type, WORKERS), *map(type, TRAINERS)} == {
        *wire.FromWorker.__args__,
        *wire.FromTrainer.__args__,
    }


@pytest.mark.parametrize("name", ["a", "a/1", "a/x:y"])
def test_a_key_serves_a_fleet_of_workers_below_its_name(name):
    entry = Allowed("worker", "a", A)
    peer = f"{name}:0123".encode()
    assert refusal(entry, peer, wire.Hello(wire.PROTOCOL, name, "here")) is None
    assert refusal(entry, peer, wire.GroupDone(1, group(train_key(0), worker=name))) is None


@pytest.mark.parametrize("name", ["", "b", "ab", "a.b", "/a", "b/a"])
def test_a_workers_names_are_those_of_its_key(name):
    entry = Allowed("worker", "a", A)
    for peer, message in [
        (f"{name}:0123".encode(), wire.Credit(1, 0)),
        (b"a:0123", wire.Hello(wire.PROTOCOL, name, "here")),
        (b"a:0123", wire.GroupDone(1, group(train_key(0), worker=name or "b"))),
        (b"\xff\xfe", wire.Credit(1, 0)),
    ]:
        assert refusal(entry, peer, message).code == "key_name"


# ---------------------------------------------------------------- the door


def ask(ring, *credentials, mechanism=b"CURVE"):
    request = [b"1.0", b"7", b"async-rl", b"127.0.0.1", b"", mechanism, *credentials]
    reply, _ = answer(request, ring)
    assert reply[:2] == [b"1.0", b"7"] and len(reply) == 6
    return reply[2], reply[4]


def test_the_door_opens_for_allowed_keys_and_says_whose_they_are(tmp_path):
    ring = Keyring.create(tmp_path / "keys")
    add(ring.folder, Allowed("worker", "a", A))
    assert ask(ring, bytes.fromhex(A)) == (b"200", A.encode())
    assert ask(ring, bytes.fromhex(B)) == (b"400", b"")
    assert ask(ring) == (b"400", b"")
    assert ask(ring, mechanism=b"NULL") == (b"400", b"")
    assert ask(ring, b"user", b"password", mechanism=b"PLAIN") == (b"400", b"")
    assert answer([], ring)[0][2] == b"400"
    (ring.folder / "allowed").write_text("?")
    assert ask(ring, bytes.fromhex(A)) == (b"300", b""), "it may come again"


# ---------------------------------------------------------------- the dialer's view

KEY = ClientKey("w1", bytes.fromhex(A), bytes.fromhex(B))


@pytest.mark.parametrize(
    ("event", "key", "error"),
    [
        (zmq.Event.HANDSHAKE_FAILED_AUTH, KEY, "does not allow our key 'w1'"),
        (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, KEY, "has no keys"),
        (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, None, "we have no key"),
    ],
)
def test_a_handshake_that_says_why_it_failed_is_an_error_at_once(event, key, error):
    verdict = Handshakes("tcp://there:1", key).on(event)
    assert isinstance(verdict, Refused) and error in verdict.message
    assert "tcp://there:1" in verdict.message and verdict.hint and A not in str(verdict)


def test_a_listener_that_hangs_up_is_the_wrong_one_only_where_it_says_so_again_and_again():
    handshakes = Handshakes("tcp://there:1", KEY)
    assert handshakes.on(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL) == "look"
    for _ in range(HUNG_UP):
        assert handshakes.looked("") is None
    for _ in range(HUNG_UP - 1):
        assert handshakes.looked("CURVE") is None
    assert handshakes.on(zmq.Event.HANDSHAKE_SUCCEEDED) is None
    for _ in range(HUNG_UP - 1):
        assert handshakes.looked("CURVE") is None
    verdict = handshakes.looked("CURVE")
    assert isinstance(verdict, Refused) and f"server key {B}" in verdict.message


@pytest.mark.parametrize(
    ("key", "mechanism", "error"), [(None, "CURVE", "we have no key"), (KEY, "NULL", "has no keys")]
)
def test_a_listener_of_the_other_kind_that_hangs_up_first_is_found_out_too(key, mechanism, error):
    handshakes = Handshakes("tcp://there:1", key)
    assert handshakes.on(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL) == "look"
    for _ in range(HUNG_UP - 1):
        assert handshakes.looked(mechanism) is None
    assert error in handshakes.looked(mechanism).message


def test_without_keys_a_listener_that_hangs_up_is_waited_for():
    handshakes = Handshakes("tcp://there:1", None)
    for mechanism in ("", "NULL"):
        for _ in range(2 * HUNG_UP):
            assert handshakes.looked(mechanism) is None


@pytest.mark.parametrize("speaks", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 64, b"", b"\xff"])
def test_a_port_that_speaks_something_else_is_no_listener(speaks):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.sendall(speaks)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert mechanism_at(address, 5.0) == ""
        thread.join(5.0)
    for nowhere in (address, "ipc:///x", "tcp://host"):
        assert mechanism_at(nowhere, 0.5) == ""


def test_not_allowed_is_no_reason_to_print_a_secret(tmp_path):
    ring = Keyring.create(tmp_path / "keys")
    refused = ring.find(A)
    assert isinstance(refused, NotAllowed)
    assert ring.secret.hex() not in str(refused) and ring.secret.hex() not in repr(ring)
