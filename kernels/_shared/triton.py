"""Helpers of the Triton kernels: the import itself, the zigzag slot, and what every launch needs.

Kernel arguments are pointers first, then sizes, then strides, then compile-time constants. Offsets and strides are
64-bit, so packed tensors may exceed 2^31 elements; positions inside one row are 32-bit.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:  # pragma: no cover - depends on the machine
    raise ImportError(
        "the CUDA kernels need the triton package, which is not installed; tensors on the CPU do not need it"
    ) from error

__all__ = ["check_dtype", "dot_precision", "lane_dense", "tile_width", "tl", "triton", "zero_tail", "zigzag_slot"]

SMALLEST_DOT = 16  # tl.dot takes no dimension below


@triton.jit
def zigzag_slot(round_index, worker, num_workers):
    """`kernels.schedule.slot_of`, inside a kernel."""
    return round_index * num_workers + tl.where(round_index % 2 == 0, worker, num_workers - 1 - worker)


def tile_width(size: int) -> int:
    """The power of two that covers `size` and that tl.dot accepts."""
    return max(SMALLEST_DOT, triton.next_power_of_2(size))


def lane_dense(x: Tensor) -> Tensor:
    """`x` itself where its last dimension is dense, else a copy: kernels read any other stride."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def zero_tail(x_N: Tensor, total: int) -> Tensor:
    """Zero the entries past the last offset, which no tile writes."""
    x_N[total:].zero_()
    return x_N


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 products stay fp32 (no TF32): the operators promise fp32 maths for fp32 inputs."""
    return "ieee" if dtype == torch.float32 else "tf32"


def check_dtype(x: Tensor) -> None:
    """Raise TypeError for a dtype the kernels do not take."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"the CUDA kernels take float16, bfloat16 and float32, found {x.dtype}")
