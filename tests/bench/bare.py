"""The same bytes through bare boto3, in parallel, unhashed: what our transfers are measured against."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
            self._put(key, bytes(view))
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
        self.get_files([(key, size, path)])

    def get_files(self, wanted: Sequence[tuple[str, int, Path]]) -> None:
        """Several objects into files, all their parts side by side."""
        with ExitStack() as stack:
            jobs = []
            for key, size, path in wanted:
                file = stack.enter_context(path.open("wb"))
                file.truncate(size)
                jobs += [(key, start, size, file.fileno()) for start in range(0, size, PART_BYTES)]

            def part(job: tuple[str, int, int, int]) -> None:
                key, start, size, file = job
                os.pwrite(file, self._range(key, start, size), start)

            list(self._pool.map(part, jobs))

    def _range(self, key: str, start: int, size: int) -> bytes:
        last = min(start + PART_BYTES, size) - 1
        answer = self._client.get_object(Bucket=self._bucket, Key=key, Range=f"bytes={start}-{last}")
        data: bytes = answer["Body"].read()
        assert len(data) == last + 1 - start, key
        return data

    def put_all(self, objects: Sequence[tuple[str, bytes]]) -> None:
        """Several objects side by side, each in one request."""
        list(self._pool.map(lambda each: self._put(*each), objects))

    def _put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=key, Body=data)

    def close(self) -> None:
        self._pool.shutdown()
        self._client.close()
