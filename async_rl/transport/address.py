"""Whether an address can be one, and why nothing answers at it: for people who have typed it."""

from __future__ import annotations

import socket

from async_rl.errors import ConfigError

__all__ = ["check_address", "host_and_port", "why_silent"]

LOOK_LIMIT_S = 5.0
"""Of one attempt to connect, for its reason alone. A handshake across the world takes a fraction of a second."""


def host_and_port(address: str) -> tuple[str, int] | None:
    """Of tcp://HOST:PORT (an IPv6 host in brackets); None for anything else."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if scheme != "tcp" or (":" in host and not bracketed) or not port.isdecimal() or not port.isascii():
        return None
    host = host[1:-1] if bracketed else host
    return (host, int(port)) if host and 0 < int(port) < 65536 and not set(host) & set(" /@") else None


def check_address(address: str) -> str:
    """An address to connect to. Raises ConfigError for what can't be one."""
    if address.startswith(("ipc://", "inproc://", "memory://")) or host_and_port(address) is not None:
        return address
    rest = address.partition("://")[2]
    if not address.startswith("tcp://"):
        why = "it does not begin with tcp://"
    elif rest.count("[") != rest.count("]") or (":" in rest.rpartition(":")[0] and "[" not in rest):
        why = "an IPv6 address stands in brackets, tcp://[::1]:5577"
    elif not rest.rpartition(":")[2].isdecimal():
        why = "it has no port"
    else:
        why = "it has no host, or its port is not one of 1 to 65535"
    raise ConfigError(
        f"{address!r} is no address to connect to: {why}",
        hint="use tcp://HOST:PORT, as the orchestrator's log says it (`orchestrator listening`)",
    )


def why_silent(address: str, limit_s: float = LOOK_LIMIT_S) -> str:
    """Why nothing is heard from an address: its host is unknown, nobody listens, packets vanish. Blocking, for about
    `limit_s`. It says who is asked, so it is no more than a look: the answer may be another one a moment later."""
    found = host_and_port(address)
    if found is None:
        return f"no answer from {address}"
    host, port = found
    try:
        with socket.create_connection((host, port), timeout=limit_s):
            return f"something listens at {address}, and does not answer: is it the orchestrator?"
    except socket.gaierror as error:
        return f"the host {host!r} of {address} is not known here: {error.strerror}"
    except ConnectionRefusedError:
        return f"nothing listens at {address} (connection refused)"
    except TimeoutError:
        return f"{address} can't be reached: no connection within {limit_s:g} s (a firewall?)"
    except OSError as error:
        return f"{address} can't be reached: {error.strerror or error}"
