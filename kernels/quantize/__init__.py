"""Low-precision tensors: FP8 (E4M3), MXFP8 and INT4, and matrix products of FP8 tensors.

Sources: OCP microscaling formats for MXFP8; square blocks, scale rounding upward, stochastic rounding and random
Hadamard rotation as in low-precision attention for ads models (PyTorch engineering posts, 2026); INT4 for stored
representations as in LoopFM (arXiv 2605.29280).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._checks import check_device, check_floats, check_shape
from kernels.quantize import reference
from kernels.quantize.reference import E4M3_MAX, MX_BLOCK, Quantized, dequantize, hadamard

__all__ = [
    "E4M3_MAX",
    "MX_BLOCK",
    "Quantized",
    "dequantize",
    "dequantize_int4",
    "hadamard",
    "quantize_fp8",
    "quantize_int4",
    "quantize_mxfp8",
    "scaled_matmul",
]


def quantize_fp8(
    x_MK: Tensor, *, per: str = "row", stochastic: bool = False, generator: torch.Generator | None = None
) -> Quantized:
    """FP8 E4M3 values with one fp32 scale per tensor or per row; x is about values * scale.

    Args:
        x_MK: matrix [M, K].
        per: `row` or `tensor`.
        stochastic: round up or down at random, so that the mean of many roundings is the value.
        generator: source of that randomness.

    Returns:
        Values float8_e4m3fn [M, K] and scale fp32 [M, 1] or [1, 1]; the scale of zeros is 1.

    Raises:
        TypeError: `x_MK` is not floating.
        ValueError: shape or `per` that do not fit.
    """
    check_floats(x_MK=x_MK)
    check_shape("x_MK", x_MK, (None, None))
    if per not in ("row", "tensor"):
        raise ValueError(f"per: expected 'row' or 'tensor', found {per!r}")
    if x_MK.is_cuda and per == "row" and not stochastic:
        from kernels.quantize import triton

        return triton.quantize_fp8_rows(x_MK)
    return reference.quantize_fp8(x_MK, per, stochastic, generator)


def quantize_mxfp8(x_MK: Tensor, *, stochastic: bool = False, generator: torch.Generator | None = None) -> Quantized:
    """MXFP8: FP8 E4M3 values with one power-of-two scale per square block of 32 x 32.

    Square blocks make the quantised transpose the transpose of the quantised: one copy serves forward and backward. The
    scale is amax / 448 rounded up to a power of two (RCEIL), so that nothing overflows.

    Args:
        x_MK: matrix [M, K]; blocks at the right and lower edge may be smaller.
        stochastic: round up or down at random, so that the mean of many roundings is the value.
        generator: source of that randomness.

    Returns:
        Values float8_e4m3fn [M, K] and biased exponents uint8 [ceil(M/32), ceil(K/32)] (E8M0: scale = 2^(e - 127)).

    Raises:
        TypeError: `x_MK` is not floating.
        ValueError: the shape does not fit.
    """
    check_floats(x_MK=x_MK)
    check_shape("x_MK", x_MK, (None, None))
    if x_MK.is_cuda and not stochastic:
        from kernels.quantize import triton

        return triton.quantize_mxfp8(x_MK)
    return reference.quantize_mxfp8(x_MK, stochastic, generator)


def scaled_matmul(a_MK: Quantized, b_KN: Quantized, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The product of two FP8 matrices with fp32 sums and scales applied.

    Args:
        a_MK: left factor; scale per tensor, per row, or MXFP8.
        b_KN: right factor; scale per tensor, per column (`Quantized.T` of a per-row one), or MXFP8. Both are MXFP8 or
        none.
        dtype: dtype of the result.

    Returns:
        [M, N].

    Raises:
        ValueError: shapes, devices or scales that do not fit.
    """
    check_shape("b_KN.values", b_KN.values, (a_MK.values.shape[1], None))
    check_device("b_KN.values", b_KN.values, a_MK.values)
    if a_MK.is_mx != b_KN.is_mx:
        raise ValueError("scales: expected both factors MXFP8 or neither, found one of each")
    if not a_MK.is_mx:
        _check_scale("a_MK.scale", a_MK.scale, a_MK.values.shape[0], 0)
        _check_scale("b_KN.scale", b_KN.scale, b_KN.values.shape[1], 1)
    if a_MK.values.is_cuda:
        from kernels.quantize import triton

        return triton.scaled_matmul(a_MK, b_KN, dtype)
    return reference.scaled_matmul(a_MK, b_KN, dtype)


def _check_scale(name: str, scale: Tensor, length: int, dim: int) -> None:
    """A scale that varies along the summed dimension cannot be taken out of the sum."""
    other = 1 - dim
    if scale.ndim != 2 or scale.shape[other] != 1 or scale.shape[dim] not in (1, length):
        along = "row of the left" if dim == 0 else "column of the right"
        raise ValueError(f"{name}: expected one scale, or one per {along} factor, found shape {list(scale.shape)}")


def quantize_int4(z: Tensor) -> Tensor:
    """INT4 codes of values in [-1, 1]: clamp(round(8 z), -8, 7), ties to even.

    Args:
        z: any shape, floating, for example the output of tanh.

    Returns:
        int8 of the same shape, values -8..7. The error of `dequantize_int4` is at most 1/16, except above 15/16, where
        the largest code 7/8 leaves up to 1/8.

    Raises:
        TypeError: `z` is not floating.
    """
    check_floats(z=z)
    return reference.quantize_int4(z)


def dequantize_int4(codes: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that INT4 codes stand for: codes / 8.

    Args:
        codes: int8, values -8..7, any shape.
        dtype: dtype of the result.

    Raises:
        TypeError: codes that are not int8.
    """
    if codes.dtype != torch.int8:
        raise TypeError(f"codes: expected dtype torch.int8, found {codes.dtype}")
    return codes.to(dtype) / 8
