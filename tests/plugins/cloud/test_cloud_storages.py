"""Every object store passes the storage suite."""

import pytest

from axlearn_testing import StorageSuite


class ObjectSuite(StorageSuite):
    """The suite in a folder of a bucket that is created for each test."""

    uri = "{tmp}"
    bucket = ""

    def storage(self, uri):
        return super().storage(f"{self.bucket}{uri}")


class TestS3(ObjectSuite):
    @pytest.fixture(autouse=True)
    def server(self, s3):
        self.bucket = s3[0]


class TestGcs(ObjectSuite):
    @pytest.fixture(autouse=True)
    def server(self, gs):
        self.bucket = gs


class TestMemory(ObjectSuite):
    @pytest.fixture(autouse=True)
    def server(self):
        import fsspec

        self.bucket = "memory://bucket"
        yield
        fsspec.filesystem("memory").rm("/", recursive=True)
