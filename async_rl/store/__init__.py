"""Object stores behind one protocol: `open_store(url)` gives the right one."""

from __future__ import annotations

from async_rl.errors import ConfigError
from async_rl.store.base import Capabilities, ObjectInfo, ObjectStore, StoreConfig, Upload

__all__ = ["Capabilities", "ObjectInfo", "ObjectStore", "StoreConfig", "Upload", "open_store"]


def open_store(url: str, config: StoreConfig | None = None) -> ObjectStore:
    """The store of a run URL, `s3://bucket/prefix` or `file:///path`. Touches nothing yet (see `probe`)."""
    scheme, _, rest = url.partition("://")
    if scheme == "file" and rest:
        from async_rl.store.file import FileStore

        return FileStore(url)
    if scheme == "s3" and rest:
        from async_rl.store.s3 import S3Store

        return S3Store(url, config or StoreConfig())
    raise ConfigError(f"{url!r} is no store URL", hint="use s3://bucket/prefix or file:///absolute/path")
