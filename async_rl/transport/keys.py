"""Keys: the files that a client keeps, and the bytes in them.

A key is a CURVE25519 pair. Files, the command line and the list of allowed keys hold it as 64 hexadecimal
digits, which no shell, TOML or YAML takes for something else. A client's file:

    name = "fleet-a"
    secret = "…"        whoever has it is fleet-a: mode 0600
    server = "…"        the orchestrator's public key, so that nobody else can pose as it

What a key may do stands only in the orchestrator's list (allowed.py).
"""

from __future__ import annotations

import os
import re
import stat
import string
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import zmq
from zmq.utils import z85

from async_rl.errors import ConfigError

__all__ = [
    "ClientKey",
    "check_name",
    "client_key_text",
    "new_secret",
    "of_hex",
    "public_of",
    "read_client_key",
    "read_secret",
    "write_private",
]

KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class ClientKey:
    """What a dialer proves itself with, and what it expects of the listener. Never printed: the secret is in
    it."""

    name: str
    secret: bytes = field(repr=False)  # [32]
    server: bytes  # [32], the listener's public key

    @cached_property
    def public(self) -> bytes:
        return public_of(self.secret)


def new_secret() -> bytes:
    """[32] from libsodium's generator. Raises ConfigError where ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise ConfigError(
            "this build of ZeroMQ has no CURVE, so there can be no keys",
            hint="install pyzmq from its wheels, which have it",
        )
    return z85.decode(zmq.curve_keypair()[1])


def public_of(secret: bytes) -> bytes:
    return z85.decode(zmq.curve_public(z85.encode(secret)))


def of_hex(text: str, what: str) -> bytes:
    """[32]. Raises ConfigError for anything but 64 hexadecimal digits; the text is not repeated, it may be
    secret."""
    digits, others = 2 * KEY_BYTES, sum(each not in string.hexdigits for each in text)
    if others or len(text) != digits:
        found = (
            f"{len(text)} digits"
            if not others
            else f"{len(text)} characters, {others} of them no such digit"
        )
        raise ConfigError(
            f"{what} is no key: {digits} hexadecimal digits were expected, found {found if text else 'nothing'}",
            hint="copy it again, whole; `async-rl keys list` prints public keys",
        )
    return bytes.fromhex(text)


def check_name(name: str) -> str:
    """The name of a key. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} can't be the name of a key",
            hint="up to 64 letters, digits, '.', '_' and '-', the first one a letter or a digit",
        )
    return name


def client_key_text(name: str, secret: bytes, server: bytes | None) -> str:
    lines = [
        f"# The key of {name!r} for async-rl. Secret: whoever has this file is {name}.",
        f'name = "{name}"',
        f'secret = "{secret.hex()}"',
    ]
    if server is not None:
        lines.append(f'server = "{server.hex()}"  # public key of the orchestrator')
    return "\n".join(lines) + "\n"


def read_client_key(path: Path, server_key: str = "") -> ClientKey:
    """The key in a client's file; `server_key`, 64 hexadecimal digits, replaces the one in it. Raises
    ConfigError where the file can't be read, is open to others, or there is no server's key."""
    table = _read(path)
    name, server = table.get("name", ""), server_key or table.get("server", "")
    secret = of_hex(table.get("secret", ""), f"secret in {path}")
    if not name:
        raise ConfigError(
            f"{path} is the orchestrator's own key, or has lost its name: a client's key has one",
            hint="`async-rl keys new NAME --server DIR` makes one there; server.key never leaves the orchestrator, "
            "and where it did, make a new folder of keys",
        )
    if not server:
        raise ConfigError(
            f"{path} does not say which orchestrator it is for: its public key is missing",
            hint="give it with --server-key or ASYNC_RL_SERVER_KEY; `async-rl keys list` prints it "
            "on the orchestrator's side",
        )
    where = "--server-key" if server_key else f"server in {path}"
    return ClientKey(check_name(name), secret, of_hex(server, where))


def read_secret(path: Path) -> bytes:
    """[32], the secret in any key file. Raises ConfigError."""
    return of_hex(_read(path).get("secret", ""), f"secret in {path}")


def write_private(path: Path, text: str) -> None:
    """A new file that only its owner can read. Raises ConfigError where there is one already, or it can't be
    written."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already", hint="a key is never overwritten: move it away, or name another file"
        ) from None
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}", hint="choose another place") from error
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)


def _read(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(1 << 16)
    except OSError as error:
        raise ConfigError(
            f"can't read the key {path}: {error.strerror}", hint="`async-rl keys new` makes keys"
        ) from error
    if mode & stat.S_IRWXO:
        raise ConfigError(
            f"everybody on this machine can read the secret key {path}",
            hint=f"chmod 600 {path}; if others may have read it, revoke it and make a new one",
        )
    try:
        table = tomllib.loads(raw.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path} is no key file: it is not the TOML that `async-rl keys new` writes",
            hint="give the file that `async-rl keys new` wrote, as it is",
        ) from error
    return {key: value for key, value in table.items() if isinstance(value, str)}
