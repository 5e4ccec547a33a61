"""S3 through a client that answers in pages."""

from axlearn_plugins_cloud.s3 import S3Objects


class Pages:
    """A client whose listings have three objects, two per page."""

    def __init__(self):
        self.tokens = []

    def list_objects_v2(self, *, Bucket, Prefix, ContinuationToken=None):
        assert (Bucket, Prefix) == ("bucket", "run/")
        self.tokens.append(ContinuationToken)
        contents = [{"Key": f"run/{n}", "Size": n} for n in range(3)]
        if ContinuationToken is None:
            return {"Contents": contents[:2], "IsTruncated": True, "NextContinuationToken": "more"}
        return {"Contents": contents[2:], "IsTruncated": False}


def test_a_listing_has_the_objects_of_all_pages():
    objects = S3Objects("bucket")
    objects.client = Pages()
    assert list(objects.list("run/")) == [("run/0", 0), ("run/1", 1), ("run/2", 2)]
    assert objects.client.tokens == [None, "more"]
