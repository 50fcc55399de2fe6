"""Built-in tables of machine types: GPUs, network, peak FLOPS and on-demand prices.

Network bandwidths are the baselines in the EC2 documentation, even for "up to" types: a type can
sustain them for longer than a burst. Peak FLOPS are from the GPUs' data sheets, for dense matrices
without sparsity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FLOW_GBIT_PER_S = 5.0
"""EC2's limit for one TCP connection outside of a cluster placement group."""
TABLE_DATE = "2025-06"
TABLE_REGION = "us-east-1"
ON_DEMAND_USD: Mapping[str, float] = {
    "g4dn.xlarge": 0.526,
    "g4dn.2xlarge": 0.752,
    "g4dn.4xlarge": 1.204,
    "g4dn.8xlarge": 2.176,
    "g4dn.12xlarge": 3.912,
    "g4dn.16xlarge": 4.352,
    "g5.xlarge": 1.006,
    "g5.2xlarge": 1.212,
    "g5.4xlarge": 1.624,
    "g5.8xlarge": 2.448,
    "g5.12xlarge": 5.672,
    "g5.16xlarge": 4.096,
    "g5.24xlarge": 8.144,
    "g5.48xlarge": 16.288,
    "g6.xlarge": 0.8048,
    "g6.2xlarge": 0.9776,
    "g6.4xlarge": 1.3232,
    "g6.12xlarge": 4.6016,
    "g6.48xlarge": 13.3504,
    "g6e.xlarge": 1.861,
    "p3.2xlarge": 3.06,
    "t3.small": 0.0208,
    "t3.medium": 0.0416,
    "t3.large": 0.0832,
    "m5.large": 0.096,
}
"""US dollars an hour for Linux in one region, in case the Pricing API is not available."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU model."""

    name: str
    fp32_tflops: float
    half_tflops: float
    """Peak TFLOPS in bf16, or in fp16 if the GPU has no bf16."""


@dataclass(frozen=True, kw_only=True)
class MachineType:
    """A machine type."""

    gpu: Gpu
    gpus: int
    gbit_per_s: float
    """Baseline bandwidth of its network."""

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth between two machines over one connection."""
        return min(self.gbit_per_s, FLOW_GBIT_PER_S) * 1e9 / 8


T4 = Gpu(name="T4", fp32_tflops=8.1, half_tflops=65.0)
A10G = Gpu(name="A10G", fp32_tflops=31.2, half_tflops=70.0)
L4 = Gpu(name="L4", fp32_tflops=30.3, half_tflops=121.0)
L40S = Gpu(name="L40S", fp32_tflops=91.6, half_tflops=362.0)
V100 = Gpu(name="V100", fp32_tflops=15.7, half_tflops=125.0)
A100 = Gpu(name="A100", fp32_tflops=19.5, half_tflops=312.0)
H100 = Gpu(name="H100", fp32_tflops=67.0, half_tflops=989.0)


def _types(gpu: Gpu, **by_size: tuple[int, float]) -> dict[str, MachineType]:
    # "g5_12xlarge" stands for "g5.12xlarge", which is not a Python name.
    return {
        name.replace("_", "."): MachineType(gpu=gpu, gpus=gpus, gbit_per_s=gbit)
        for name, (gpus, gbit) in by_size.items()
    }


MACHINE_TYPES: Mapping[str, MachineType] = {
    **_types(T4, g4dn_xlarge=(1, 5), g4dn_2xlarge=(1, 10), g4dn_12xlarge=(4, 50)),
    **_types(
        A10G, g5_xlarge=(1, 2.5), g5_2xlarge=(1, 5), g5_12xlarge=(4, 40), g5_48xlarge=(8, 100)
    ),
    **_types(L4, g6_xlarge=(1, 2.5), g6_2xlarge=(1, 5), g6_12xlarge=(4, 40), g6_48xlarge=(8, 100)),
    **_types(
        L40S, g6e_xlarge=(1, 2.5), g6e_2xlarge=(1, 5), g6e_12xlarge=(4, 100), g6e_48xlarge=(8, 400)
    ),
    **_types(
        V100, p3_2xlarge=(1, 2.5), p3_8xlarge=(4, 10), p3_16xlarge=(8, 25), p3dn_24xlarge=(8, 100)
    ),
    **_types(A100, p4d_24xlarge=(8, 400), p4de_24xlarge=(8, 400)),
    **_types(H100, p5_4xlarge=(1, 100), p5_48xlarge=(8, 3200)),
}
