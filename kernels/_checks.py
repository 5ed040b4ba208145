"""Argument checks shared by the dispatchers: each error names the argument, what was expected and what was found."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_floats(**tensors: Tensor) -> None:
    """Raise unless all tensors share one floating dtype and one device.

    Raises:
        TypeError: a dtype that is not floating, or two different ones.
        ValueError: two different devices.
    """
    first_name, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        if x.dtype not in FLOATS:
            raise TypeError(f"{name}: expected a floating dtype, found {x.dtype}")
        if x.dtype != first.dtype:
            raise TypeError(f"{name}: expected dtype {first.dtype} as {first_name} has, found {x.dtype}")
        check_device(name, x, first)


def check_device(name: str, x: Tensor, like: Tensor) -> None:
    """Raise ValueError unless `x` lies on the device of `like`."""
    if x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, found {x.device}")


def check_shape(name: str, x: Tensor, expected: tuple[int | None, ...]) -> None:
    """Raise ValueError unless `x` has the expected shape; None stands for any size."""
    fits = x.ndim == len(expected) and all(e is None or e == s for e, s in zip(expected, x.shape, strict=True))
    if not fits:
        shape = ", ".join("any" if e is None else str(e) for e in expected)
        raise ValueError(f"{name}: expected shape [{shape}], found {list(x.shape)}")


def check_index(name: str, index: Tensor, length: int, bound: int) -> None:
    """Raise unless `index` is int64 [length] with values in [0, bound).

    Values are read on the CPU only: on a GPU that would stop the stream at each call, so a device assertion stands in.
    """
    if index.dtype != torch.int64:
        raise TypeError(f"{name}: expected dtype torch.int64, found {index.dtype}")
    check_shape(name, index, (length,))
    if length == 0:
        return
    legal = (index >= 0) & (index < bound)
    if index.is_cuda:
        torch._assert_async(legal.all(), f"{name}: values must lie in [0, {bound})")
    elif not bool(legal.all()):
        row = int((~legal).nonzero()[0, 0])
        raise ValueError(f"{name}: row {row} expected a value in [0, {bound}), found {int(index[row])}")


def check_window(window: int | None) -> None:
    """Raise ValueError for a negative window."""
    if window is not None and window < 0:
        raise ValueError(f"window: expected None or a distance >= 0, found {window}")


def default_scale(scale: float | None, width: int) -> float:
    """The usual 1/sqrt(D) unless a scale is given."""
    return 1.0 / math.sqrt(width) if scale is None else float(scale)


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """The dtype a reference computes in: fp32, or fp64 for fp64 inputs so that gradients can be checked numerically."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
