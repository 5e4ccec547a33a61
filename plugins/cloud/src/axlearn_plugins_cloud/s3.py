"""S3 on Amazon or any other endpoint, through boto3 with its usual credentials, profiles and endpoints."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import boto3
import botocore.exceptions as errors
from botocore.config import Config

from axlearn_plugins_cloud.objects import MissingObjectError, RefusedError, TransientError

CONNECT_SECONDS, READ_SECONDS = 10.0, 60.0
TRANSIENT = {
    "RequestTimeout", "RequestTimeoutException", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests",
    "InternalError", "ServiceUnavailable", "OperationAborted", "ConditionalRequestConflict",
}  # fmt: skip
EXISTS = {"PreconditionFailed", "412"}
FIXES = {
    "AccessDenied": "check that these credentials may list, read and write the bucket",
    "403": "check that these credentials may list, read and write the bucket",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID or the profile",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY or the profile",
    "ExpiredToken": "renew the credentials",
    "NoSuchBucket": "create the bucket, or correct its name, region or AWS_ENDPOINT_URL",
    "PermanentRedirect": "set AWS_REGION to the bucket's region",
    "AuthorizationHeaderMalformed": "set AWS_REGION to the bucket's region",
    "IllegalLocationConstraintException": "set AWS_REGION to the bucket's region",
    "301": "set AWS_REGION to the bucket's region",
}
_session_lock = Lock()


class S3Objects:
    """The objects in an S3 bucket; see `Objects`."""

    batch = 1000

    def __init__(self, bucket: str):
        self.bucket = bucket

    @cached_property
    def client(self) -> Any:
        """The client, created on first use. The first use fails if a setting is missing."""
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            retries={"total_max_attempts": 1},  # `ObjectStorage` retries and logs the attempts
            max_pool_connections=32,
        )
        with _session_lock:  # creating sessions is not thread-safe
            return boto3.Session().client("s3", config=config)

    def put(self, key: str, data: bytes) -> None:
        """Write an object; see `Objects.put`."""
        self._call("put_object", Key=key, Body=data)

    def put_new(self, key: str, data: bytes) -> bool:
        """Create an object; see `Objects.put_new`."""
        return self._call("put_object", Key=key, Body=data, IfNoneMatch="*") is not None

    def get(self, key: str) -> bytes:
        """Read an object; see `Objects.get`."""
        return self._body(Key=key)

    def get_range(self, key: str, begin: int, size: int) -> bytes:
        """Read a range; see `Objects.get_range`."""
        return self._body(Key=key, Range=f"bytes={begin}-{begin + size - 1}")

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """List objects; see `Objects.list`."""
        for page in self._list_pages(Prefix=prefix):
            yield from ((item["Key"], item["Size"]) for item in page.get("Contents", ()))

    def list_names(self, folder: str) -> Iterator[str]:
        """List a folder; see `Objects.list_names`."""
        for page in self._list_pages(Prefix=folder, Delimiter="/"):
            yield from (item["Key"].removeprefix(folder) for item in page.get("Contents", ()))
            yield from (item["Prefix"].removeprefix(folder).rstrip("/") for item in page.get("CommonPrefixes", ()))

    def _list_pages(self, **fields: str) -> Iterator[Any]:
        token: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", **fields, **token)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; see `Objects.delete`."""
        if not keys:
            return
        result = self._call("delete_objects", Delete={"Objects": [{"Key": k} for k in keys], "Quiet": True})
        for failed in result.get("Errors", ()):
            if failed["Code"] in TRANSIENT:
                raise TransientError(f"{failed['Code']}: {failed.get('Message', '')}")
            raise RefusedError(f"{failed['Code']}: {failed.get('Message', '')}", FIXES.get(failed["Code"], "see above"))

    def copy(self, source: str, target: str) -> None:
        """Copy an object; see `Objects.copy`."""
        self._call("copy_object", Key=target, CopySource={"Bucket": self.bucket, "Key": source})

    def _body(self, **fields: Any) -> bytes:
        response = self._call("get_object", **fields)
        if response is None:
            return b""
        try:
            return response["Body"].read()
        except (errors.BotoCoreError, OSError) as error:  # the connection broke
            raise TransientError(str(error)) from error
        except Exception as error:
            if type(error).__module__.startswith("urllib3"):
                raise TransientError(str(error)) from error
            raise

    def _call(self, name: str, **fields: Any) -> Any:
        """Return the response, or None if a range starts at an object's end, or a conditional write finds an existing object."""
        try:
            return getattr(self.client, name)(Bucket=self.bucket, **fields)
        except errors.ClientError as error:
            code, status = (
                str(error.response["Error"].get("Code")),
                error.response["ResponseMetadata"]["HTTPStatusCode"],
            )
            if code in ("NoSuchKey", "404") and name in ("get_object", "copy_object"):
                raise MissingObjectError from error
            if code == "InvalidRange" or ("IfNoneMatch" in fields and code in EXISTS):
                return None
            if status >= 500 or status == 429 or code in TRANSIENT:
                raise TransientError(f"{code} ({status})") from error
            message = error.response["Error"].get("Message", "")
            raise RefusedError(
                f"{code}: {message}", FIXES.get(code, "check the bucket, AWS_REGION and AWS_ENDPOINT_URL")
            ) from error
        except (errors.NoCredentialsError, errors.PartialCredentialsError, errors.CredentialRetrievalError) as error:
            fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, set AWS_PROFILE, or give the machine a role"
            raise RefusedError(f"no credentials for S3: {error}", fix) from error
        except (errors.ProfileNotFound, errors.NoRegionError) as error:
            raise RefusedError(str(error), "set AWS_PROFILE to an existing profile, and set AWS_REGION") from error
        except (errors.ParamValidationError, errors.InvalidRegionError, ValueError) as error:
            raise RefusedError(str(error), "correct the bucket's name, AWS_REGION or AWS_ENDPOINT_URL") from error
        except (errors.HTTPClientError, errors.ConnectionError) as error:
            raise TransientError(str(error)) from error
