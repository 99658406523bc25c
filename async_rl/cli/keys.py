"""`async-rl keys`: who may connect to an orchestrator. What the files hold: transport/keys.py, allowed.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from async_rl.errors import ConfigError

if TYPE_CHECKING:
    from async_rl.transport import allowed

__all__ = ["command"]

_ROLES = click.Choice(["worker", "trainer", "watcher"])

_server_option = click.option(
    "--server",
    "folder",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="The orchestrator's folder of keys (orchestrator.keys).",
)
_role_option = click.option(
    "--role",
    type=_ROLES,
    default="worker",
    show_default=True,
    help="What the key is for; a watcher can only see the status.",
)


@click.group()
def command() -> None:
    """Make, list, allow and revoke the keys of an orchestrator.

    With keys everything between machines is encrypted, and only who is allowed gets in. Changes hold from
    the next message on; nothing is restarted.
    """


@command.command()
@click.argument("name")
@click.option(
    "--server",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="The orchestrator's folder of keys: the key is allowed there at once. Made if it is not there.",
)
@click.option(
    "--server-key",
    default="",
    metavar="HEX",
    help="Without --server: the orchestrator's public key, to be kept in the file.",
)
@_role_option
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write; by default NAME.key. It is never overwritten.",
)
def new(name: str, folder: Path | None, server_key: str, role: str, out: Path | None) -> None:
    """Make a key and write it to a file of its own, for the machine that will use it.

    On the orchestrator's side, with --server, that is all: copy the file. Without, the secret never leaves
    the machine it was made on, and the printed command allows it on the other side.
    """
    from async_rl.transport import allowed
    from async_rl.transport.keys import (
        check_name,
        client_key_text,
        new_secret,
        of_hex,
        public_of,
        write_private,
    )

    if folder is not None and server_key:
        raise ConfigError("--server and --server-key say the same thing twice", hint="give one of them")
    check_name(name)
    path = out or Path(f"{name}.key")
    secret = new_secret()
    public = public_of(secret).hex()
    if folder is None:
        server = of_hex(server_key, "--server-key") if server_key else None
        write_private(path, client_key_text(name, secret, server))
        click.echo(f"{path}: the secret key of {name}. On the orchestrator's side:\n")
        click.echo(f"  async-rl keys allow {name} {public} --role {role} --server DIR")
        return
    server = allowed.Keyring.create(folder).public
    write_private(path, client_key_text(name, secret, server))
    try:
        allowed.add(folder, _entry(role, name, public))
    except ConfigError:
        path.unlink()  # ours, and of no use to anybody
        raise
    click.echo(
        f"{path}: the secret key of {name}, allowed as {role} in {folder}. Copy it to where it is used:\n"
    )
    click.echo(f"  async-rl {_USE[role]} --key {path.name}")


_USE = {
    "worker": "rollout --store URL --orchestrator tcp://HOST:PORT",
    "trainer": "trainer RUN.toml --orchestrator tcp://HOST:PORT",
    "watcher": "lag --orchestrator tcp://HOST:PORT",
}


@command.command("list")
@_server_option
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def list_(folder: Path, as_json: bool) -> None:
    """Show the orchestrator's public key and the keys that it allows."""
    from async_rl.transport.allowed import Keyring

    ring = Keyring.open(folder)
    entries = sorted(ring.entries, key=lambda entry: (entry.role, entry.name))
    if as_json:
        keys = [{"role": e.role, "name": e.name, "public": e.public} for e in entries]
        click.echo(json.dumps({"server": ring.public.hex(), "keys": keys}))
        return
    click.echo(f"server key  {ring.public.hex()}")
    for entry in entries:
        click.echo(f"{entry.role:<8}  {entry.public}  {entry.name}")
    if not entries:
        click.echo(f"no key is allowed; `async-rl keys new NAME --server {folder}` makes one")


@command.command()
@click.argument("name")
@click.argument("public", metavar="PUBLIC-KEY")
@_role_option
@_server_option
def allow(name: str, public: str, role: str, folder: Path) -> None:
    """Allow a key that was made elsewhere, by its public half."""
    from async_rl.transport import allowed
    from async_rl.transport.keys import check_name, of_hex

    entry = _entry(role, check_name(name), of_hex(public, "PUBLIC-KEY").hex())
    server = allowed.Keyring.create(folder).public.hex()
    allowed.add(folder, entry)
    click.echo(f"{name} is allowed as {role}. It needs our public key: --server-key {server}")


@command.command()
@click.argument("which", metavar="NAME|PUBLIC-KEY")
@_server_option
def revoke(which: str, folder: Path) -> None:
    """Refuse a key from its next message on."""
    from async_rl.transport import allowed

    allowed.Keyring.open(folder)  # says what is wrong with a folder that is none
    gone = allowed.remove(folder, which)
    click.echo(f"{gone.name} ({gone.role}) is revoked: its next message is refused")


def _entry(role: str, name: str, public: str) -> allowed.Allowed:
    from async_rl.transport.allowed import ROLES, Allowed

    return Allowed(next(each for each in ROLES if each == role), name, public)
