"""The conformance suite for storage, over S3: a server over HTTP, with pyarrow's client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raysgd.checkpoint.storage.storage import Storage
from raysgd.testing.storage_suite import StorageSuite
from support.s3 import S3Server, s3_server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory, _no_process_is_left: None) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


class TestS3(StorageSuite):
    @pytest.fixture(autouse=True)
    def connect(self, s3: S3Server) -> None:
        self._server = s3

    def make_storage(self, tmp_path: Path) -> Storage:
        return Storage.from_uri(self._server.uri(f"suite/{tmp_path.name}"))
