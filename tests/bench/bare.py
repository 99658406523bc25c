"""The same bytes through bare boto3, in parallel, without hashing or checks: what our transfers are measured against."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

__all__ = ["PARALLEL", "PART_BYTES", "Bare"]

PARALLEL = 8
PART_BYTES = 16 << 20
"""Both as in our own defaults (weights.fetch_parallel, store.part_bytes)."""


class Bare:
    """A bucket of a server given by its environment (LocalServer.env, Link.env)."""

    def __init__(self, env: dict[str, str], bucket: str) -> None:
        self._bucket = bucket
        session = boto3.session.Session(
            aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
            region_name=env["AWS_REGION"],
        )
        config = Config(
            s3={"addressing_style": "path"},
            max_pool_connections=2 * PARALLEL,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            proxies={},
        )
        self._client: Any = session.client("s3", endpoint_url=env["AWS_ENDPOINT_URL"], config=config)
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="bare")

    def put(self, key: str, data: bytes | memoryview) -> None:
        """One object; in parts, side by side, if it is longer than one."""
        view = memoryview(data)
        at = {"Bucket": self._bucket, "Key": key}
        if len(view) <= PART_BYTES:
            self._client.put_object(**at, Body=bytes(view))
            return
        upload = {**at, "UploadId": self._client.create_multipart_upload(**at)["UploadId"]}

        def part(number: int) -> dict[str, object]:
            block = bytes(view[(number - 1) * PART_BYTES : number * PART_BYTES])
            answer = self._client.upload_part(**upload, PartNumber=number, Body=block)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        parts = list(self._pool.map(part, range(1, -(-len(view) // PART_BYTES) + 1)))
        self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})

    def get(self, key: str, size: int) -> bytes:
        """`size` bytes are all of the object, or its beginning."""
        pieces = self._pool.map(lambda start: self._range(key, start, size), range(0, size, PART_BYTES))
        return b"".join(pieces)

    def get_file(self, key: str, size: int, path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

            def part(start: int) -> None:
                os.pwrite(file.fileno(), self._range(key, start, size), start)

            list(self._pool.map(part, range(0, size, PART_BYTES)))

    def _range(self, key: str, start: int, size: int) -> bytes:
        last = min(start + PART_BYTES, size) - 1
        answer = self._client.get_object(Bucket=self._bucket, Key=key, Range=f"bytes={start}-{last}")
        data: bytes = answer["Body"].read()
        assert len(data) == last + 1 - start, key
        return data

    def at_once(self, jobs: list[Callable[[], None]]) -> None:
        """Several objects side by side (jobs must not use parts of more than one each)."""
        with ThreadPoolExecutor(PARALLEL) as pool:
            for future in [pool.submit(job) for job in jobs]:
                future.result()

    def close(self) -> None:
        self._pool.shutdown()
        self._client.close()
