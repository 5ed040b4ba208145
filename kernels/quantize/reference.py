"""The definitions of the low-precision formats and of products of FP8 matrices, on any device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
MX_BLOCK = 32
_E4M3_SMALLEST_EXPONENT = -6  # below 2^-6 the format is subnormal: steps stop shrinking
_E4M3_MANTISSA_BITS = 3


@dataclass(frozen=True)
class Quantized:
    """FP8 values and their scales.

    Attributes:
        values: float8_e4m3fn [M, K].
        scale: fp32 [M, 1], [1, K] or [1, 1]; or biased exponents uint8, one per 32 x 32 block (MXFP8).
    """

    values: Tensor
    scale: Tensor

    @property
    def is_mx(self) -> bool:
        """Whether the scales are block exponents."""
        return self.scale.dtype == torch.uint8

    @property
    def T(self) -> Quantized:  # noqa: N802 - the name that tensors use
        """The transpose, without requantising."""
        return Quantized(self.values.T, self.scale.T)


def quantize_fp8(x_MK: Tensor, per: str, stochastic: bool, generator: torch.Generator | None) -> Quantized:
    """FP8 with one scale per row or tensor (see `kernels.quantize.quantize_fp8`)."""
    wide = x_MK.float()
    if wide.numel() == 0:
        amax = wide.new_zeros((x_MK.shape[0] if per == "row" else 1, 1))
    else:
        amax = wide.abs().amax(1, keepdim=True) if per == "row" else wide.abs().amax().view(1, 1)
    scale = torch.where(amax > 0, amax / E4M3_MAX, 1.0)
    return Quantized(to_e4m3(wide / scale, stochastic, generator), scale)


def quantize_mxfp8(x_MK: Tensor, stochastic: bool, generator: torch.Generator | None) -> Quantized:
    """FP8 with one power-of-two scale per 32 x 32 block (see `kernels.quantize.quantize_mxfp8`)."""
    rows, columns = x_MK.shape
    wide = x_MK.float()
    padded = torch.nn.functional.pad(wide, (0, -columns % MX_BLOCK, 0, -rows % MX_BLOCK))
    blocks = padded.view(padded.shape[0] // MX_BLOCK, MX_BLOCK, padded.shape[1] // MX_BLOCK, MX_BLOCK)
    exponent = rceil_exponent(blocks.abs().amax((1, 3)) / E4M3_MAX)
    scale = expand_exponent(exponent, rows, columns)
    return Quantized(to_e4m3(wide / scale, stochastic, generator), exponent)


def rceil_exponent(scale: Tensor) -> Tensor:
    """The biased exponent of the smallest power of two >= scale (RCEIL), uint8; 0 stands for 2^-127.

    Read from the bits of fp32: the exponent, plus one where the mantissa is not zero. Subnormal scales give 0 or 1.
    """
    bits = scale.float().contiguous().view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    return (exponent + (mantissa != 0)).clamp(max=254).to(torch.uint8)


def exponent_value(exponent: Tensor) -> Tensor:
    """2^(e - 127) in fp32 for biased exponents uint8."""
    return torch.exp2(exponent.float() - 127.0)


def expand_exponent(exponent: Tensor, rows: int, columns: int) -> Tensor:
    """The scale of each element, fp32 [rows, columns], of block exponents."""
    scale = exponent_value(exponent).repeat_interleave(MX_BLOCK, 0).repeat_interleave(MX_BLOCK, 1)
    return scale[:rows, :columns]


def to_e4m3(x: Tensor, stochastic: bool = False, generator: torch.Generator | None = None) -> Tensor:
    """FP8 E4M3 of fp32 values, saturating at +-448: to nearest even, or at random in proportion to the distance."""
    x = x.clamp(-E4M3_MAX, E4M3_MAX)
    if stochastic:
        _, exponent = torch.frexp(x)  # |x| = m 2^exponent with m in [1/2, 1)
        step = torch.exp2((exponent - 1).clamp(min=_E4M3_SMALLEST_EXPONENT).float() - _E4M3_MANTISSA_BITS)
        noise = torch.rand(x.shape, generator=generator, device=x.device)
        x = (torch.floor(x / step + noise) * step).clamp(-E4M3_MAX, E4M3_MAX)
    return x.to(torch.float8_e4m3fn)


def dequantize(x: Quantized) -> Tensor:
    """The fp32 matrix that FP8 values and their scales stand for."""
    values = x.values.float()
    return values * (expand_exponent(x.scale, *values.shape) if x.is_mx else x.scale)


def scaled_matmul(a_MK: Quantized, b_KN: Quantized, dtype: torch.dtype) -> Tensor:
    """dequantize(a) @ dequantize(b) (see `kernels.quantize.scaled_matmul`)."""
    return (dequantize(a_MK) @ dequantize(b_KN)).to(dtype)


def quantize_int4(z: Tensor) -> Tensor:
    """INT4 codes (see `kernels.quantize.quantize_int4`)."""
    return (z.float() * 8).round().clamp(-8, 7).to(torch.int8)


def hadamard(x: Tensor, *, signs: Tensor | None = None) -> Tensor:
    """Orthonormal Hadamard rotation of the last dimension, after flipping signs; spreads outliers over all features.

    Rotating both factors of a product along the summed dimension leaves the product as it was. The rotation is its own
    inverse where `signs` is None; otherwise `hadamard(y) * signs` inverts it.

    Args:
        x: [..., D], D a power of two.
        signs: +1 or -1 per feature [D], usually random; None for all +1.

    Raises:
        ValueError: D is not a power of two, or `signs` has another length.
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(f"x: expected a last dimension that is a power of two, found {width}")
    if signs is not None:
        if signs.shape != (width,):
            raise ValueError(f"signs: expected shape [{width}], found {list(signs.shape)}")
        x = x * signs
    y = x.reshape(-1, width)
    half = 1
    while half < width:
        pairs = y.view(-1, width // (2 * half), 2, half)
        y = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], dim=2).view(-1, width)
        half *= 2
    return (y / math.sqrt(width)).view(x.shape)
