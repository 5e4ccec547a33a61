"""Google Cloud Storage through Google's client, with application default credentials or `STORAGE_EMULATOR_HOST`."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import google.auth.exceptions as auth
import requests
from google.api_core import exceptions as errors
from google.cloud import storage
from requests.adapters import HTTPAdapter

from axlearn_plugins_cloud.objects import MissingObjectError, RefusedError, TransientError

TIMEOUT = (10.0, 60.0)
"""Timeouts in seconds: to connect, and between two bytes."""
T = TypeVar("T")


class GcsObjects:
    """The objects in a GCS bucket; see `Objects`."""

    batch = 8  # the client deletes one object at a time, so a small batch lets `ObjectStorage` delete in parallel

    def __init__(self, bucket: str):
        self.name = bucket

    @cached_property
    def bucket(self) -> Any:
        """The bucket's handle, created on first use. The first use fails if the bucket or a credential is missing."""
        client = storage.Client()
        adapter = HTTPAdapter(pool_maxsize=32)
        client._http.mount("https://", adapter)
        client._http.mount("http://", adapter)
        return client.bucket(self.name)

    def put(self, key: str, data: bytes) -> None:
        """Write an object; see `Objects.put`."""
        self._call(lambda: self._upload(key, data))

    def put_new(self, key: str, data: bytes) -> bool:
        """Create an object; see `Objects.put_new`."""
        try:
            self._call(lambda: self._upload(key, data, if_generation_match=0))
        except errors.PreconditionFailed:
            return False
        return True

    def get(self, key: str) -> bytes:
        """Read an object; see `Objects.get`."""
        return self._call(lambda: self.bucket.blob(key).download_as_bytes(timeout=TIMEOUT, retry=None))

    def get_range(self, key: str, begin: int, size: int) -> bytes:
        """Read a range; see `Objects.get_range`."""
        try:
            return self._call(
                lambda: self.bucket.blob(key).download_as_bytes(
                    start=begin, end=begin + size - 1, timeout=TIMEOUT, retry=None, checksum=None
                )
            )
        except errors.RequestRangeNotSatisfiable:
            return b""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """List objects; see `Objects.list`."""
        fields = "items(name,size),nextPageToken"
        blobs = self._call(
            lambda: [
                *self.bucket.client.list_blobs(self.bucket, prefix=prefix, fields=fields, timeout=TIMEOUT, retry=None)
            ],
            missing="bucket",
        )
        return ((blob.name, blob.size) for blob in blobs)

    def list_names(self, folder: str) -> Iterator[str]:
        """List a folder; see `Objects.list_names`."""
        fields = "items(name),prefixes,nextPageToken"

        def read() -> list[str]:
            blobs = self.bucket.client.list_blobs(
                self.bucket, prefix=folder, delimiter="/", fields=fields, timeout=TIMEOUT, retry=None
            )
            return [*(blob.name for blob in blobs), *blobs.prefixes]  # `prefixes` is filled while the pages are read

        return (name.removeprefix(folder).rstrip("/") for name in self._call(read, missing="bucket"))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; see `Objects.delete`."""
        for key in keys:
            try:
                self._call(lambda key=key: self.bucket.blob(key).delete(timeout=TIMEOUT, retry=None))
            except MissingObjectError:
                continue

    def copy(self, source: str, target: str) -> None:
        """Copy an object; see `Objects.copy`."""
        self._call(
            lambda: self.bucket.copy_blob(self.bucket.blob(source), self.bucket, target, timeout=TIMEOUT, retry=None)
        )

    def _upload(self, key: str, data: bytes, **fields: Any) -> None:
        self.bucket.blob(key).upload_from_string(
            data, content_type="application/octet-stream", timeout=TIMEOUT, retry=None, checksum="crc32c", **fields
        )

    def _call(self, call: Callable[[], T], *, missing: str = "object") -> T:
        try:
            return call()
        except errors.NotFound as error:
            if missing == "object" and "bucket does not exist" not in str(error).lower():
                raise MissingObjectError from error
            raise RefusedError(
                f"the bucket {self.name} does not exist", "create the bucket, or correct its name"
            ) from error
        except (errors.PreconditionFailed, errors.RequestRangeNotSatisfiable):
            raise
        except (errors.ServerError, errors.TooManyRequests) as error:
            raise TransientError(f"{error.code} {error.message}") from error
        except (errors.Forbidden, errors.Unauthorized) as error:
            fix = "check that these credentials may list, read and write the bucket"
            raise RefusedError(f"{error.code} {error.message}", fix) from error
        except errors.GoogleAPICallError as error:
            if (error.code or 0) in (408, 429):
                raise TransientError(str(error)) from error
            raise RefusedError(str(error), "check the bucket's name") from error
        except auth.DefaultCredentialsError as error:
            fix = "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`"
            raise RefusedError(f"no credentials for Google Cloud: {str(error).splitlines()[0]}", fix) from error
        except auth.RefreshError as error:
            raise RefusedError(str(error), "renew the credentials") from error
        except (requests.RequestException, auth.TransportError, ConnectionError, TimeoutError) as error:
            raise TransientError(str(error)) from error
