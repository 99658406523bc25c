"""The configuration of the matrix' processes."""

from __future__ import annotations

from async_rl.store import StoreConfig
from async_rl.weights.config import WeightsConfig

__all__ = ["PUBLISHING", "READING", "STORE"]

PUBLISHING = WeightsConfig(
    pack_bytes=100_000,
    delta_pack_bytes=1_000,
    publish_limit_s=20.0,
    merge_after_s=0.0,
    anchor_every=4,
    anchor_cost=0.5,
    skip_spans=(2, 4),
    keep_versions=3,
    gc_every=4,
    gc_grace_s=0.0,
)
"""Packs and spans so small that everything happens within a few versions."""

STORE = StoreConfig(part_bytes=5 << 20, retry_limit_s=10.0, read_timeout_s=10.0)

READING = WeightsConfig(fetch_parallel=2, fetch_part_bytes=50_000)
