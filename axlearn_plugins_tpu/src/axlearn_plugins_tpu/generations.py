"""TPU targets by generation, with figures per JAX device. Does not import JAX.

A v4 or v5p chip is one device with two cores (megacore). A v5e or v6e chip is one device. A 7x chip is two devices.

`hbm_bytes` is the memory available to a program: the capacity minus the part that the system reserves, as libtpu 0.0.42
reports when a program does not fit. `host_bytes` is a chip's share of its host (v5e, v6e) or of a machine with a whole host
(v5p). The other figures are from Google Cloud's documentation: cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x.
The documentation states link bandwidths for both directions together. The figures here count only what a chip sends, which is half.
"""

from collections.abc import Mapping
from typing import Any

from axlearn_core.contracts.target import Target

COMMON: Mapping[str, Any] = {
    # Start collectives as early and await them as late as the program allows, based on estimated latencies.
    "xla_tpu_enable_latency_hiding_scheduler": True,
    "xla_enable_async_collective_permute": True,
}
"""Compiler options for every TPU."""
ASYNC_GATHERS: Mapping[str, Any] = {**COMMON, "xla_enable_async_all_gather": True}
"""Compiler options for v4: asynchronous all-gathers, as in AXLearn."""
FUSED_COLLECTIVES: Mapping[str, Any] = {
    **ASYNC_GATHERS,
    # Fuse an all-gather with the neighboring matmuls, and interleave them in several steps.
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
}
"""Compiler options for v5e, which has no SparseCores. Newer versions of libtpu reject them for all other TPUs."""
SPARSE_CORE_COLLECTIVES: Mapping[str, Any] = {
    **COMMON,
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    # Collectives that are fused with matmuls stay on the TensorCore.
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": False,
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": False,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_enable_instruction_fusion": False,
    "xla_sc_disable_megacore_partitioning": True,
}
"""Compiler options for v5p, v6e and 7x: SparseCores run the collectives while TensorCores compute, as in MaxText."""

GIB = 2.0**30
TERA = 1e12
TOPOLOGY = "axlearn_plugins_tpu.topology:devices"
DOMAIN_SHAPE = "axlearn_plugins_tpu.shapes:domain_shape"

V4 = Target(
    name="tpu-v4",
    summary="Google TPU v4",
    size="cores",
    platform="tpu",
    device_kinds=("TPU v4",),
    cores_per_chip=2,
    chips_per_host=4,
    peak_flops={"bfloat16": 275 * TERA, "int8": 275 * TERA},
    hbm_bytes=30.75 * GIB,
    hbm_bandwidth=1200e9,
    link_bandwidth=300e9,
    topology=TOPOLOGY,
    domain_shape=DOMAIN_SHAPE,
    compiler_options=ASYNC_GATHERS,
    examples=("tpu-v4-8", "tpu-v4-128", "tpu-v4-128x2"),
    source="cloud.google.com/tpu/docs/v4; links: six of 50 GB/s each way (Jouppi et al., 2023, arXiv 2304.01433, table 4)",
)
V5E = Target(
    name="tpu-v5e",
    summary="Google TPU v5e",
    size="chips",
    platform="tpu",
    device_kinds=("TPU v5 lite", "TPU v5e"),
    chips_per_host=4,
    peak_flops={"bfloat16": 197 * TERA, "int8": 393 * TERA},
    hbm_bytes=15.75 * GIB,
    hbm_bandwidth=819e9,
    host_bytes=512 * GIB / 8,
    link_bandwidth=200e9,
    network_bandwidth=25e9 / 8,
    topology=TOPOLOGY,
    domain_shape=DOMAIN_SHAPE,
    compiler_options=FUSED_COLLECTIVES,
    examples=("tpu-v5e-8", "tpu-v5e-256", "tpu-v5e-256x4"),
    source="cloud.google.com/tpu/docs/v5e; network: 6.4 Tbit/s for the 256 chips of a pod",
)
V5P = Target(
    name="tpu-v5p",
    summary="Google TPU v5p",
    size="cores",
    platform="tpu",
    device_kinds=("TPU v5", "TPU v5p"),
    cores_per_chip=2,
    chips_per_host=4,
    peak_flops={"bfloat16": 459 * TERA, "int8": 918 * TERA},
    hbm_bytes=95.74 * GIB,
    hbm_bandwidth=2765e9,
    host_bytes=448e9 / 4,
    link_bandwidth=600e9,
    network_bandwidth=50e9 / 8,
    topology=TOPOLOGY,
    domain_shape=DOMAIN_SHAPE,
    compiler_options=SPARSE_CORE_COLLECTIVES,
    examples=("tpu-v5p-8", "tpu-v5p-1024", "tpu-v5p-16384x4"),
    source="cloud.google.com/tpu/docs/v5p; int8: cloud.google.com/tpu/docs/system-architecture-tpu-vm",
)
V6E = Target(
    name="tpu-v6e",
    summary="Google TPU v6e (Trillium)",
    size="chips",
    platform="tpu",
    device_kinds=("TPU v6 lite", "TPU v6e"),
    chips_per_host=4,
    peak_flops={"bfloat16": 918 * TERA, "int8": 1836 * TERA},
    hbm_bytes=31.25 * GIB,
    hbm_bandwidth=1638e9,
    host_bytes=1536 * GIB / 8,
    link_bandwidth=400e9,
    network_bandwidth=100e9 / 8,
    topology=TOPOLOGY,
    domain_shape=DOMAIN_SHAPE,
    compiler_options=SPARSE_CORE_COLLECTIVES,
    examples=("tpu-v6e-8", "tpu-v6e-256", "tpu-v6e-256x2"),
    source="cloud.google.com/tpu/docs/v6e; network: cloud.google.com/tpu/docs/tpu7x",
)
V7X = Target(
    name="tpu-7x",
    summary="Google TPU7x (Ironwood)",
    size="chips",
    platform="tpu",
    device_kinds=("TPU7x", "TPU v7x"),
    devices_per_chip=2,
    chips_per_host=4,
    peak_flops={
        "bfloat16": 2307 * TERA / 2,
        "float8_e4m3fn": 4614 * TERA / 2,
        "float8_e5m2": 4614 * TERA / 2,
    },
    hbm_bytes=94.74 * GIB,
    hbm_bandwidth=7380e9 / 2,
    link_bandwidth=600e9 / 2,
    network_bandwidth=100e9 / 8 / 2,
    topology=TOPOLOGY,
    domain_shape=DOMAIN_SHAPE,
    compiler_options=SPARSE_CORE_COLLECTIVES,
    examples=("tpu-7x-8", "tpu-7x-256", "tpu-7x-256x2"),
    source="cloud.google.com/tpu/docs/tpu7x, with half of each figure for each of a chip's two devices",
)

TARGETS = (V4, V5E, V5P, V6E, V7X)
