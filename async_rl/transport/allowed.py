"""Who may connect, and what each may say: the orchestrator's folder of keys.

    server.key      its own secret key, mode 0600
    allowed         one line per key: role, name, public key; lines of # are comments

The list is looked at before every message, so a key that was revoked is refused on its next message, over
whatever connection it comes. A list that can't be read allows nobody.

    role        may say
    worker      what workers say, under its key's name or NAME/anything: one key serves a fleet
    trainer     what the trainer says
    watcher     StatusRequest, as the others may too
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct

from async_rl.errors import ConfigError, Malformed, NotAllowed
from async_rl.log import get_logger
from async_rl.transport.base import message_of
from async_rl.transport.keys import (
    check_name,
    new_secret,
    of_hex,
    public_of,
    read_secret,
    write_private,
)
from async_rl.wire import AnyMessage, FromTrainer, FromWorker, GroupDone, Hello, StatusRequest

__all__ = ["ROLES", "Allowed", "Keyring", "Role", "add", "format_list", "parse_list", "refusal", "remove"]

log = get_logger(__name__)

Role = Literal["worker", "trainer", "watcher"]
ROLES: tuple[Role, ...] = get_args(Role)

_HEADER = "# Who may connect: role, name, public key. Looked at before every message.\n"


class Allowed(Struct, frozen=True):
    """One key of the list."""

    role: Role
    name: str
    public: str  # 64 hexadecimal digits


# ---------------------------------------------------------------- rules


def refusal(entry: Allowed, peer: bytes, message: AnyMessage) -> NotAllowed | None:
    """Why the holder of this key may not say this; None where it may. `peer`: the identity that it came
    under. A worker's identity and its names have to be of its key, so nobody speaks for another worker."""
    match message:
        case StatusRequest():
            return None
        case _ if isinstance(message, FromTrainer):
            if entry.role == "trainer":
                return None
        case _ if isinstance(message, FromWorker):
            if entry.role == "worker":
                return _misnamed(entry, peer, message)
        case _:
            return None  # only the orchestrator says it: refused as malformed, whoever sent it
    return NotAllowed(
        f"key {entry.name!r} has the role {entry.role}, which may not send {type(message).__name__}",
        hint="use a key with another role; `async-rl keys list` shows them on the orchestrator's side",
        code="key_role",
    )


def _misnamed(entry: Allowed, peer: bytes, message: FromWorker) -> NotAllowed | None:
    names = [peer.rpartition(b":")[0].decode("utf-8", "replace")]
    if isinstance(message, Hello):
        names.append(message.worker)
    elif isinstance(message, GroupDone) and message.group.worker:
        names.append(message.group.worker)
    for name in names:
        if not owns(entry, name):
            return NotAllowed(
                f"key {entry.name!r} is not the key of worker {name!r}",
                hint=f"call the worker {entry.name} or {entry.name}/…, or use its own key",
                code="key_name",
            )
    return None


def owns(entry: Allowed, worker: str) -> bool:
    """Whether a worker's name belongs to the key."""
    return worker == entry.name or worker.startswith(entry.name + "/")


# ---------------------------------------------------------------- the list


def parse_list(text: str) -> dict[str, Allowed]:
    """By public key. Raises ConfigError for what can't be meant."""
    entries: dict[str, Allowed] = {}
    names: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 3 or words[0] not in ROLES:
            raise ConfigError(
                f"line {number} of the list of allowed keys is not `role name public-key`",
                hint=f"a role is one of {', '.join(ROLES)}; `async-rl keys` writes such lines",
            )
        role = next(each for each in ROLES if each == words[0])
        public = of_hex(words[2], f"the public key in line {number}").hex()
        if public in entries or words[1] in names:
            raise ConfigError(
                f"line {number} of the list of allowed keys repeats the key or the name {words[1]!r}",
                hint="remove one of the two lines",
            )
        names.add(words[1])
        entries[public] = Allowed(role, check_name(words[1]), public)
    return entries


def format_list(entries: Iterable[Allowed]) -> str:
    return _HEADER + "".join(f"{e.role:<8} {e.name:<20} {e.public}\n" for e in entries)


def add(folder: Path, entry: Allowed) -> None:
    """Allow a key. Raises ConfigError where the key or its name is in the list already."""
    with _editing(folder) as entries:
        taken = entries.get(entry.public) or next(
            (e for e in entries.values() if e.name == entry.name), None
        )
        if taken is not None:
            raise ConfigError(
                f"{folder} has the key or the name already: {taken.role} {taken.name} {taken.public}",
                hint=f"choose another name, or first `async-rl keys revoke {taken.name}`",
            )
        entries[entry.public] = entry


def remove(folder: Path, which: str) -> Allowed:
    """Revoke the key of this name or public key. Raises ConfigError where there is none."""
    with _editing(folder) as entries:
        found = next((e for e in entries.values() if which in (e.name, e.public)), None)
        if found is None:
            raise ConfigError(
                f"{folder} allows no key of the name or public key {which!r}",
                hint="`async-rl keys list` shows the keys that it allows",
            )
        del entries[found.public]
    return found


@contextmanager
def _editing(folder: Path) -> Iterator[dict[str, Allowed]]:
    """The list, written back whole at the end; one command at a time. Comments of its own do not survive."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        path = folder / "allowed"
        entries = parse_list(path.read_text(encoding="utf-8"))
        yield entries
        partial = path.with_name("allowed.part")
        partial.write_text(format_list(entries.values()), encoding="utf-8")
        partial.replace(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the list of keys in {folder} can't be changed: {error}") from error
    finally:
        os.close(handle)


# ---------------------------------------------------------------- the folder


class Keyring:
    """The folder as the listener uses it. Safe to use from several threads."""

    def __init__(self, folder: Path, secret: bytes, extra: Iterable[Allowed] = ()) -> None:
        """`extra`: allowed for this process only, beside those of the list. A listed key comes first."""
        self.folder = folder
        self.secret = secret
        self.public = public_of(secret)
        self._path = folder / "allowed"
        self._extra = {entry.public: entry for entry in extra}
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] = ()  # what of the file was read
        self._entries: dict[str, Allowed] = {}
        self._before: dict[str, Allowed] = {}  # keys that were allowed once: their refusal can say so
        self._broken = ""
        self.turned_away: Counter[str] = Counter()  # connections that the door (zap.py) refused, by reason

    @classmethod
    def open(cls, folder: Path, extra: Iterable[Allowed] = ()) -> Keyring:
        """Raises ConfigError where it is no folder of keys, or its list can't be read."""
        if not (folder / "server.key").exists():
            raise ConfigError(
                f"{folder} is no folder of keys: there is no server.key in it",
                hint=f"`async-rl keys new NAME --server {folder}` makes the folder, and the first key",
            )
        ring = cls(folder, read_secret(folder / "server.key"), extra)
        ring._refresh()
        if ring._broken:
            raise ConfigError(f"{folder / 'allowed'}: {ring._broken}", hint="repair it")
        return ring

    @classmethod
    def create(cls, folder: Path) -> Keyring:
        """The folder, made with a server's key of its own where there is none."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / "allowed").touch()
        except OSError as error:
            raise ConfigError(
                f"can't make the folder of keys {folder}: {error.strerror}", hint="choose another place"
            ) from error
        if not (folder / "server.key").exists():
            text = "# The orchestrator's own key for async-rl. Secret: whoever has it can pose as it.\n"
            write_private(folder / "server.key", f'{text}secret = "{new_secret().hex()}"\n')
        return cls.open(folder)

    @property
    def entries(self) -> list[Allowed]:
        self._refresh()
        return list(self._entries.values())

    def find(self, public: str | None) -> Allowed | NotAllowed:
        """The holder of a key (64 hexadecimal digits), as the list stands now."""
        self._refresh()
        entry = self._entries.get(public or "") or self._extra.get(public or "")
        if entry is not None:
            return entry
        if self._broken:
            return NotAllowed(
                "the orchestrator can't read its list of allowed keys, so nobody is allowed",
                hint="repair the file `allowed` in its folder of keys; its log says what is wrong",
                code="key_list",
                retry=True,
            )
        if (before := self._before.get(public or "")) is not None:
            return NotAllowed(
                f"key {before.name!r} was revoked",
                hint="ask whoever runs the orchestrator for a new key",
                code="key_revoked",
                revoked=before.name,
            )
        return NotAllowed(
            f"key {public} is not allowed",
            hint=f"on the orchestrator's side: async-rl keys allow NAME {public} --role ROLE --server DIR "
            f"({', '.join(ROLES)})",
            code="key_unknown",
        )

    def received(
        self, public: str | None, peer: bytes, frames: Sequence[bytes | memoryview], limit: int
    ) -> AnyMessage | Malformed | NotAllowed:
        """What arrived over a connection with this key. Nothing of a key that is not allowed is decoded."""
        entry = self.find(public)
        if isinstance(entry, NotAllowed):
            return entry
        try:
            message = message_of(frames, limit)
        except Malformed as error:
            return error
        return refusal(entry, peer, message) or message

    def _refresh(self) -> None:
        """Read the list again where the file is another one than before: one `stat` otherwise, some
        microseconds."""
        try:
            found = self._path.stat()
            # The command replaces the file, an editor may write into it: either way one of these differs.
            seen: tuple[int, ...] = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        except OSError as error:
            seen = (-1, error.errno or 0)
        if seen == self._seen:
            return
        with self._lock:
            broken, entries = "", {}
            try:
                entries = parse_list(self._path.read_text(encoding="utf-8"))
            except ConfigError as error:
                broken = str(error)
            except (OSError, UnicodeDecodeError) as error:
                broken = f"can't be read: {error}"
            self._before |= self._entries
            for name in {e.name for e in self._entries.values()} - {e.name for e in entries.values()}:
                log.info("key revoked", name=name)
            self._entries, self._broken, self._seen = entries, broken, seen
            if broken:
                log.error(
                    "nobody is allowed: the list of keys is broken", file=str(self._path), reason=broken
                )
            else:
                log.info("allowed keys read", file=str(self._path), keys=len(entries))
