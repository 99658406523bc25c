"""The boto3 client of a store, from its URL, `[store]` and the environment."""

from __future__ import annotations

import io
import os
import re
import ssl
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from async_rl.errors import ConfigError, StoreError
from async_rl.store.base import StoreConfig
from async_rl.store.keys import check_key
from async_rl.store.s3_errors import Place

__all__ = ["DEFAULT_REGION", "make_client", "parse_url"]

BUCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
DEFAULT_REGION = "us-east-1"
SPARE_CONNECTIONS = 8
"""Above `parallel`, for the small requests (manifests, listings, heartbeats) of other threads."""
EXPECT_FROM_BYTES = 8 << 20
"""botocore asks the server before it sends any body (`Expect: 100-continue`), which costs a round trip: half the time
of a small put over a wide area. Bodies below this go out at once; an error then has cost so many bytes in vain."""


def parse_url(url: str) -> tuple[str, str]:
    """(bucket, prefix without a slash at its end). Raises ConfigError."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not BUCKET_NAME.fullmatch(bucket):
        raise ConfigError(
            f"{url!r} names no bucket",
            hint="s3://bucket/prefix; a bucket's name has 3 to 63 letters, digits, - or .",
        )
    prefix = prefix.rstrip("/")
    try:
        return bucket, check_key(prefix) if prefix else ""
    except StoreError as error:
        raise ConfigError(f"{url!r} is no store URL: {error.message}", hint=error.hint) from error


def make_client(bucket: str, config: StoreConfig) -> tuple[Any, Place]:
    """A boto3 client (thread-safe) and what errors need to know. Raises ConfigError."""
    env = os.environ
    endpoint = config.endpoint_url or env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or None
    # A server of one's own has no DNS name per bucket.
    addressing = ("path" if endpoint else "auto") if config.addressing == "auto" else config.addressing
    if addressing not in ("path", "virtual", "auto"):
        raise ConfigError(f"store.addressing is {config.addressing!r}", hint="path, virtual or auto")
    if config.ca_bundle:
        check_ca_bundle(config.ca_bundle)
    loopback = endpoint is not None and urlsplit(endpoint).hostname in ("127.0.0.1", "localhost", "::1")
    try:
        session = boto3.session.Session(profile_name=config.profile or None)
        region = config.region or env.get("AWS_REGION") or session.region_name or DEFAULT_REGION
        client = session.client(
            "s3",
            endpoint_url=endpoint,
            region_name=region,
            verify=config.ca_bundle or None,
            config=Config(
                connect_timeout=min(config.connect_timeout_s, config.retry_limit_s),
                read_timeout=min(config.read_timeout_s, config.retry_limit_s),
                max_pool_connections=config.parallel + SPARE_CONNECTIONS,
                retries={"total_max_attempts": 1, "mode": "standard"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": addressing},
                tcp_keepalive=True,
                proxies={} if loopback else None,
                user_agent_extra="async-rl",
            ),
        )
        client.meta.events.register_last("before-call.s3", _send_small_bodies_at_once)
        credentials = session.get_credentials()
        access_key = credentials.access_key if credentials else ""
    except (BotoCoreError, ValueError, OSError) as error:
        raise ConfigError(
            f"can't set up the S3 client for bucket {bucket!r}: {error}",
            hint="check [store] (endpoint_url is http://host:port, profile) and the AWS_* variables",
        ) from error
    return client, Place(bucket, client.meta.endpoint_url, region, access_key or "")


def check_ca_bundle(path: str) -> None:
    """Raises ConfigError for what holds no certificates: boto3 would find out at the first request."""
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"store.ca_bundle: can't read certificates from {path}: {error.strerror or error}",
            hint="a PEM file with the certificate of the authority that signed the server's",
        ) from error


def _send_small_bodies_at_once(params: dict[str, Any], **_: Any) -> None:
    body = params.get("body")
    if isinstance(body, io.BytesIO) and body.getbuffer().nbytes < EXPECT_FROM_BYTES:
        params["headers"].pop("Expect", None)
