"""The Trainium2 target, with figures from AWS's documentation. Does not import JAX.

A device is a logical NeuronCore in the SDK's default configuration (LNC=2): two of a chip's eight physical cores, with a
quarter of the chip's memory and bandwidth.
"""

from axlearn_core.contracts.target import Target

CORES = 4
"""Number of logical cores per chip."""

TRN2 = Target(
    name="trn2",
    summary="AWS Trainium2, by logical cores",
    size="hosts",
    platform="neuron",
    device_kinds=("NC_v3d",),  # with LNC=1 the SDK reports NC_v3, and these figures are wrong
    devices_per_chip=CORES,
    chips_per_host=16,
    peak_flops={
        "bfloat16": 667e12 / CORES,
        "float16": 667e12 / CORES,
        "float32": 181e12 / CORES,
        "float8_e4m3fn": 1299e12 / CORES,
    },
    hbm_bytes=96 * 2**30 / CORES,
    hbm_bandwidth=2.9e12 / CORES,
    link_bandwidth=1024e9 / 2 / CORES,  # NeuronLink-v3 within an instance; half of the total is outbound
    network_bandwidth=3200e9 / 8 / 16 / CORES,  # EFAv3, per instance
    topology="axlearn_plugins_neuron.topology:devices",
    stand_in="partitioned by XLA over virtual CPU devices: the layout and the collectives are exact for trn2, "
    "but the kernels, fusions and schedule are not Neuron's",
    examples=("trn2-16x1", "trn2-16x64"),
    source="AWS Neuron documentation: Trainium2 Architecture, Amazon EC2 Trn2 Architecture, Logical NeuronCore configuration",
)
