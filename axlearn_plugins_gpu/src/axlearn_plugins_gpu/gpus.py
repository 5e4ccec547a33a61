"""GPU targets, with figures from NVIDIA's data sheets. Does not import JAX.

Peak FLOP/s are for dense matmuls; data sheets that assume structured sparsity list twice as much. The float32 peak is the
peak of TF32 tensor cores, which JAX uses for float32 matmuls by default. Memory is the amount that the driver reports for a
whole GPU. NVLink figures count one direction. Networks and hosts are those of NVIDIA's DGX systems, with one network
adapter per GPU.
"""

from collections.abc import Mapping
from typing import Any

from axlearn_core.contracts.target import Target

TOPOLOGY = "axlearn_plugins_gpu.topology:devices"
DGX_HOST_BYTES = 2e12
"""Host memory of DGX A100 (640 GB), H100 and H200."""
LOWERING = "axlearn_plugins_gpu.kernels.mosaic:lowering"
SKIP_ASSEMBLY = "axlearn_plugins_gpu.skip_assembly:skip_assembly"

OPTIONS: Mapping[str, Any] = {
    # Start collectives as early and await them as late as the program allows, based on estimated latencies.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Process two layers per iteration of the loop over layers: gather one layer's parameters while the other is computed.
    "xla_gpu_enable_while_loop_double_buffering": True,
}
"""Compiler options for every GPU. Pipelined-collective flags are omitted, because some XLA versions lack them."""


def _peaks(bfloat16: float, tf32: float, eight_bits: float, *, fp8: bool = True) -> dict[str, float]:
    peaks = {"bfloat16": bfloat16, "float16": bfloat16, "float32": tf32, "int8": eight_bits}
    return peaks | ({"float8_e4m3fn": eight_bits, "float8_e5m2": eight_bits} if fp8 else {})


def _gpu(name: str, kinds: tuple[str, ...], **figures: Any) -> Target:
    return Target(
        name=name,
        size="hosts",
        platform="gpu",
        device_kinds=kinds,
        topology=TOPOLOGY,
        lowering=LOWERING,
        skip_assembly=SKIP_ASSEMBLY,
        compiler_options=OPTIONS,
        examples=(f"{name}-8x1", f"{name}-8x64"),
        **figures,
    )


A100 = _gpu(
    "a100",
    ("NVIDIA A100-SXM4-80GB",),
    summary="NVIDIA A100 SXM",
    peak_flops=_peaks(312e12, 156e12, 624e12, fp8=False),
    hbm_bytes=85_100_068_864,
    hbm_bandwidth=2.039e12,
    host_bytes=DGX_HOST_BYTES / 8,
    link_bandwidth=300e9,
    network_bandwidth=25e9,
    source="NVIDIA A100 Tensor Core GPU data sheet (80 GB SXM); DGX A100 data sheet: 8 x 200 Gb/s",
)
H100 = _gpu(
    "h100",
    ("NVIDIA H100 80GB HBM3",),
    summary="NVIDIA H100 SXM",
    peak_flops=_peaks(989.5e12, 494.5e12, 1979e12),
    hbm_bytes=84_942_979_072,
    hbm_bandwidth=3.35e12,
    host_bytes=DGX_HOST_BYTES / 8,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    source="NVIDIA H100 Tensor Core GPU data sheet (SXM); DGX H100 data sheet: 8 x 400 Gb/s",
)
H200 = _gpu(
    "h200",
    ("NVIDIA H200",),
    summary="NVIDIA H200 SXM",
    peak_flops=_peaks(989.5e12, 494.5e12, 1979e12),
    hbm_bytes=143_156 << 20,
    hbm_bandwidth=4.8e12,
    host_bytes=DGX_HOST_BYTES / 8,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    source="NVIDIA H200 Tensor Core GPU data sheet (SXM); DGX H200 data sheet: 8 x 400 Gb/s",
)
B200 = _gpu(
    "b200",
    ("NVIDIA B200",),
    summary="NVIDIA B200 SXM",
    peak_flops=_peaks(2.25e15, 1.1e15, 4.5e15) | {"float4_e2m1fn": 9e15},
    hbm_bytes=191_514_411_008,
    hbm_bandwidth=7.7e12,
    link_bandwidth=900e9,
    network_bandwidth=50e9,
    source="NVIDIA HGX platform page and DGX B200 data sheet: 8 x 400 Gb/s",
)

TARGETS = (A100, H100, H200, B200)
