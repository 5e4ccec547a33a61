"""Models of storage systems: latency, bandwidth, request rates and errors, each with its source."""

from collections.abc import Mapping

import attrs

MIB, GIB = 2**20, 2**30


@attrs.frozen(kw_only=True)
class StorageModel:
    """The performance of a storage system, as its clients see it.

    Attributes:
        title: Name of the system.
        read_seconds: Seconds until the first byte of a read, or of a listing.
        write_seconds: Seconds of a write, without its bytes.
        stream_bytes: Bytes per second of one request.
        process_bytes: Bytes per second of one process.
        job_read_bytes: Bytes per second that all processes read.
        job_write_bytes: Bytes per second that all processes write.
        reads: Reads and listings per second that the system accepts in total.
        writes: Writes and deletions per second that the system accepts in total.
        retried: Fraction of requests that are repeated after an error.
        retry_seconds: Average seconds before a request is repeated.
        source: Where the numbers come from, and which of them are assumptions.
    """

    title: str
    read_seconds: float
    write_seconds: float
    stream_bytes: float
    process_bytes: float
    job_read_bytes: float
    job_write_bytes: float
    reads: float
    writes: float
    retried: float
    retry_seconds: float
    source: str

    def seconds(self, use: "Use", processes: int, *, concurrent: int = 8) -> float:
        """Return the seconds in which a job of equal processes makes its requests.

        A process makes `concurrent` requests at a time. The slowest limit decides: the latency of the process's requests, its
        bandwidth, or what the system offers to all processes.

        Args:
            use: Requests and bytes of one process.
            processes: Number of processes that make these requests at the same time.
            concurrent: Number of requests that a process makes at a time.
        """
        attempts = 1 + self.retried
        waits = (use.reads * self.read_seconds + use.writes * self.write_seconds) * attempts
        waits += (use.reads + use.writes) * self.retried * self.retry_seconds
        size = use.read_bytes + use.written_bytes
        return max(
            (waits + size / self.stream_bytes) / concurrent,
            size / self.process_bytes,
            processes * use.read_bytes / self.job_read_bytes,
            processes * use.written_bytes / self.job_write_bytes,
            processes * use.reads * attempts / self.reads,
            processes * use.writes * attempts / self.writes,
        )


@attrs.define
class Use:
    """Requests and bytes of one process.

    Attributes:
        reads: Number of reads and listings.
        writes: Number of writes and deletions.
        read_bytes: Bytes read.
        written_bytes: Bytes written.
    """

    reads: int = 0
    writes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def requests(self) -> int:
        """Number of all requests."""
        return self.reads + self.writes

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


S3 = StorageModel(
    title="Amazon S3, one prefix",
    read_seconds=0.1,
    write_seconds=0.1,
    stream_bytes=85e6,
    process_bytes=100e9 / 8,
    job_read_bytes=5e12 / 8,
    job_write_bytes=5e12 / 8,
    reads=5500,
    writes=3500,
    retried=0.01,
    retry_seconds=0.3,
    source="""Amazon S3's performance guidelines: 5,500 reads and 3,500 writes per second and prefix, 100 to 200 ms of latency for
    small objects, 85 to 90 MB/s per request, up to 100 Gb/s per instance
    (docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html). Assumed: 5 Tb/s for the job, 1% of requests that
    are repeated, after 0.3 s (the retries of `ObjectStorage` with two attempts).""",
)
"""Amazon S3 without partitions that grew with the load. The numbers are lower bounds of what S3 offers."""

GCS = StorageModel(
    title="Google Cloud Storage, one bucket",
    read_seconds=0.05,
    write_seconds=0.1,
    stream_bytes=50e6,
    process_bytes=100e9 / 8,
    job_read_bytes=5e12 / 8,
    job_write_bytes=5e12 / 8,
    reads=5000,
    writes=1000,
    retried=0.01,
    retry_seconds=0.3,
    source="""Google's guidelines for request rates: about 5,000 reads, including listings, and 1,000 writes, including
    deletions, per second and bucket before the bucket scales with the load (cloud.google.com/storage/docs/request-rate).
    Assumed: latency, 50 MB/s per request, 5 Tb/s for the job, and the errors of the S3 model.""",
)
"""Google Cloud Storage with the initial capacity of a bucket."""

LUSTRE = StorageModel(
    title="Lustre (FSx, persistent, 500 MB/s per TiB, 1 PiB)",
    read_seconds=0.001,
    write_seconds=0.002,
    stream_bytes=1e9,
    process_bytes=100e9 / 8,
    job_read_bytes=512e9,
    job_write_bytes=512e9,
    reads=100_000,
    writes=50_000,
    retried=0.0,
    retry_seconds=0.0,
    source="""Amazon FSx for Lustre's performance of SSD storage: 500 MB/s of disk throughput per TiB, latencies below 1 ms, and
    tens to hundreds of thousands of operations per second (docs.aws.amazon.com/fsx/latest/LustreGuide/ssd-storage.html), for
    1,024 TiB. Assumed: 1 GB/s per stream, 2 ms for creating and syncing a file, 100,000 reads and 50,000 creations per
    second.""",
)
"""A parallel file system."""

NFS = StorageModel(
    title="NFS (EFS, general purpose, elastic throughput)",
    read_seconds=0.00025,
    write_seconds=0.0027,
    stream_bytes=500 * MIB,
    process_bytes=1500 * MIB,
    job_read_bytes=20 * GIB,
    job_write_bytes=5 * GIB,
    reads=90_000,
    writes=50_000,
    retried=0.0,
    retry_seconds=0.0,
    source="""Amazon EFS's performance table for regional file systems with elastic throughput: 250 microseconds per read, 2.7 ms
    per write, 90,000 reads and 50,000 writes per second, 20 GiB/s and 5 GiB/s in total, 1,500 MiB/s per client
    (docs.aws.amazon.com/efs/latest/ug/performance.html). Assumed: 500 MiB/s per stream.""",
)
"""A file server."""

MODELS: Mapping[str, StorageModel] = {"s3-like": S3, "gcs-like": GCS, "lustre-like": LUSTRE, "nfs-like": NFS}
