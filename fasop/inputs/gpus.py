"""What one GPU can do: ``data/gpus.json``, the source of costs that were not measured."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import msgspec

TABLE = Path(__file__).parents[1] / "data" / "gpus.json"
ASSUMED_SHARE = 0.8  # of the datasheet's rate, for GPUs whose best matrix product was not published


@dataclass(frozen=True)
class Hardware:
    """tensor_tflops, fp32_tflops: 10¹² operations/s; memory_bandwidth: TB/s; multiprocessors: SMs;
    matmul_share:
    of the datasheet's rate that the best matrix product reaches (None: not published).
    """

    tensor_tflops: float
    fp32_tflops: float
    memory_bandwidth: float
    multiprocessors: int
    matmul_share: float | None = None

    def matmul_rate(self, width: int) -> float:
        """Operations/s of the best matrix product of numbers of 2 or 4 bytes."""
        return self.peak_rate(width) * (self.matmul_share or ASSUMED_SHARE)

    def peak_rate(self, width: int) -> float:
        """Operations/s of the datasheet."""
        return 1e12 * (self.tensor_tflops if width == 2 else self.fp32_tflops)

    @property
    def bytes_per_second(self) -> float:
        return self.memory_bandwidth * 1e12


class _File(msgspec.Struct):
    gpus: dict[str, Hardware]


@functools.cache
def hardware() -> dict[str, Hardware]:
    """All known GPUs by name."""
    return msgspec.json.decode(TABLE.read_bytes(), type=_File).gpus
