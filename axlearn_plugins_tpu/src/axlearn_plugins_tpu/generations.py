"""TPU generations, per JAX device. Imports no JAX.

A v4 or v5p chip is one device of two cores (megacore), a v5e or v6e chip is one device, a 7x chip is two.

`hbm_bytes` is what the compiler has for a program: the capacity less what the system keeps. Sources, all in Google Cloud's
documentation: cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x. They give the bandwidth of the links in both
directions together; half of it is what a chip sends. The memory left for programs is what libtpu 0.0.42 says when one does
not fit. `host_bytes` is a chip's share of its host (v5e, v6e) or of the machine that has a whole host (v5p).
"""

from collections.abc import Mapping
from typing import Any

from axlearn_core.contracts.target import Target

HIDDEN: Mapping[str, Any] = {
    # Collectives start as early and are awaited as late as the program allows, by an estimate of what everything takes.
    "xla_tpu_enable_latency_hiding_scheduler": True,
    "xla_enable_async_collective_permute": True,
}
"""Compiler options of every TPU."""
GATHERS: Mapping[str, Any] = {**HIDDEN, "xla_enable_async_all_gather": True}
"""Of v4: gathers that nothing waits for, as AXLearn sets it there."""
FUSED: Mapping[str, Any] = {
    **GATHERS,
    # A gather and the products beside it as one piece of work, several steps of it beside each.
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
}
"""Of v5e, which has no sparse cores; newer versions of libtpu refuse it on all others."""
OFFLOADED: Mapping[str, Any] = {
    **HIDDEN,
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    # What is fused with products stays on the core that does them.
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": False,
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": False,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_enable_instruction_fusion": False,
    "xla_sc_disable_megacore_partitioning": True,
}
"""Of v5p, v6e and 7x: the sparse cores send while the others compute, as MaxText has it there."""

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
    compiler_options=GATHERS,
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
    compiler_options=FUSED,
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
    compiler_options=OFFLOADED,
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
    compiler_options=OFFLOADED,
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
    compiler_options=OFFLOADED,
    examples=("tpu-7x-8", "tpu-7x-256", "tpu-7x-256x2"),
    source="cloud.google.com/tpu/docs/tpu7x, half of each figure for each of the two devices of a chip",
)

TARGETS = (V4, V5E, V5P, V6E, V7X)
