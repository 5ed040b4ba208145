"""Launch configurations of the Triton kernels: recorded per GPU kind and shape class, tuned only where a GPU is.

A recorded configuration makes a run repeat exactly and costs no tuning at start. The entries below were chosen from the
registers, spills and shared memory of ahead-of-time compilation (`benchmarks/results/kernels_aot.csv`), not from
timings; `tune` finds faster ones on a real GPU, to be recorded here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Config:
    """One launch configuration.

    Attributes:
        own: entries per tile of the side that is cut into tiles (rows of a matrix product).
        other: entries per step of the side that is read (columns of a matrix product).
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
    """

    own: int = 64
    other: int = 64
    num_warps: int = 4
    num_stages: int = 2

    def fit(self, own_len: int, other_len: int) -> Config:
        """The same with tiles no larger than the longest rows need: short rows would leave them empty."""
        return replace(self, own=min(self.own, _cover(own_len)), other=min(self.other, _cover(other_len)))


def _cover(size: int) -> int:
    """The power of two, at least 16, that covers `size`: 16 is the smallest tile of a matrix instruction."""
    return max(16, 1 << max(size - 1, 0).bit_length())


def shape_class(width: int, element_size: int) -> str:
    """`narrow` or `wide` heads (up to 64 features, or more), or `fp32`, whose tiles need twice the room."""
    if element_size > 2:
        return "fp32"
    return "narrow" if width <= 64 else "wide"


_DEFAULT: dict[tuple[str, str], Config] = {
    ("forward", "narrow"): Config(128, 64, 8, 3),
    ("forward", "wide"): Config(128, 64, 8, 2),
    ("forward", "fp32"): Config(64, 32, 8, 2),
    ("backward", "narrow"): Config(64, 64, 8, 2),
    ("backward", "wide"): Config(64, 64, 8, 2),
    ("backward", "fp32"): Config(32, 32, 8, 1),
    ("block", "narrow"): Config(num_warps=4),  # one program holds a block: its tile is the block
    ("block", "wide"): Config(num_warps=8),
    ("block", "fp32"): Config(num_warps=16),
    ("fused", "narrow"): Config(64, 64, 8, 2),
    ("fused", "wide"): Config(64, 64, 8, 2),
    ("fused", "fp32"): Config(32, 32, 8, 1),
    ("fused_backward", "narrow"): Config(32, 64, 8, 2),
    ("fused_backward", "wide"): Config(32, 64, 8, 2),
    ("fused_backward", "fp32"): Config(32, 32, 8, 1),
    ("gemm", "narrow"): Config(64, 64, 4, 3),
    ("gemm", "wide"): Config(128, 128, 8, 3),
    ("gemm", "fp32"): Config(64, 64, 4, 2),
}

# Changes against the default by GPU kind, (major, minor) of the compute capability.
_BY_KIND: dict[tuple[int, int], dict[tuple[str, str], dict[str, int]]] = {
    (9, 0): {("forward", "wide"): {"num_stages": 3}, ("gemm", "wide"): {"num_stages": 4}},
    (10, 0): {("forward", "wide"): {"num_stages": 3}, ("gemm", "wide"): {"num_stages": 4}},
}


def kind_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (8, 0), the plainest kind, for the interpreter on a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def select(job: str, width: int, element_size: int, kind: tuple[int, int]) -> Config:
    """The recorded configuration of a job (a first key of the table above) for a shape on a GPU kind.

    Raises:
        KeyError: an unknown job.
    """
    key = (job, shape_class(width, element_size))
    return replace(_DEFAULT[key], **_BY_KIND.get(kind, {}).get(key, {}))


def num_workers(device: torch.device, num_heads: int, per_unit: int = 2) -> int:
    """Persistent programs per head that fill a device: its multiprocessors times `per_unit`, shared by the heads."""
    if device.type != "cuda":
        return 3  # the interpreter: enough to walk several zigzag rounds
    units = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, -(-units * per_unit // max(num_heads, 1)))


def tune(candidates: Iterable[Config], run: Callable[[Config], object], repeats: int = 20) -> tuple[Config, float]:
    """The fastest of several configurations and its time in milliseconds; needs a GPU.

    Raises:
        RuntimeError: no CUDA device is present: timings from elsewhere would choose at random.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tune: expected a CUDA device, found none")
    best: tuple[Config, float] | None = None
    for config in candidates:
        run(config)  # compiles
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(repeats):
            run(config)
        end.record()
        torch.cuda.synchronize()
        time_ms = begin.elapsed_time(end) / repeats
        if best is None or time_ms < best[1]:
            best = (config, time_ms)
    if best is None:
        raise ValueError("tune: expected at least one candidate, found none")
    return best
