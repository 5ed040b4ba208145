"""The FP8 kernels against their definitions."""

from __future__ import annotations

import os

import pytest
import torch

from kernels.quantize import dequantize, reference, triton
from kernels.quantize.reference import Quantized

SHAPES = [(0, 4), (1, 1), (31, 33), (32, 32), (3, 1500), (65, 40)]


DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def assert_same(found: Quantized, expected: Quantized) -> None:
    """Equal scales and equal values, but for what the interpreter's own cast gets wrong: values that round up to the
    next power of two (it loses the carry), exact ties, and subnormals. On a GPU nothing is left out."""
    assert found.scale.dtype == expected.scale.dtype
    torch.testing.assert_close(found.scale, expected.scale)
    ours, theirs = dequantize(found), dequantize(expected)
    if DEVICE == "cuda":
        assert torch.equal(ours, theirs)
        return
    mantissa, _ = torch.frexp(expected.values.float())
    carried = mantissa.abs() == 0.5
    subnormal = expected.values.float().abs() < 2.0**-6
    same = ours == theirs
    assert (same | carried | subnormal).float().mean() > 0.995
    assert same.float().mean() > 0.9


@pytest.mark.parametrize("shape", SHAPES)
def test_rows(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device=DEVICE) * 100
    if x.numel():
        x[0] = 0.0
        assert_same(triton.quantize_fp8_rows(x), reference.quantize_fp8(x, "row", False, None))
    else:
        assert triton.quantize_fp8_rows(x).values.shape == shape


@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp8(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device=DEVICE) * torch.randn(shape, device=DEVICE).exp()
    if x.numel():
        assert_same(triton.quantize_mxfp8(x), reference.quantize_mxfp8(x, False, None))
        view = torch.full((shape[0], 2, shape[1]), float("nan"), device=DEVICE)
        view[:, 1] = x
        again = triton.quantize_mxfp8(view[:, 1])
        assert torch.equal(dequantize(again), dequantize(triton.quantize_mxfp8(x)))
    else:
        assert triton.quantize_mxfp8(x).values.shape == shape


@pytest.mark.parametrize("kind", ["row", "tensor", "mx"])
@pytest.mark.parametrize(("num_m", "num_k", "num_n"), [(5, 70, 9), (64, 32, 17), (1, 1, 1), (70, 130, 66)])
def test_matmul(kind: str, num_m: int, num_k: int, num_n: int) -> None:
    a, b = torch.randn(num_m, num_k, device=DEVICE), torch.randn(num_k, num_n, device=DEVICE)
    if kind == "mx":
        left, right = reference.quantize_mxfp8(a, False, None), reference.quantize_mxfp8(b.T, False, None).T
    else:
        left = reference.quantize_fp8(a, kind, False, None)
        right = reference.quantize_fp8(b.T, kind, False, None).T
    found = triton.scaled_matmul(left, right, torch.float32)
    torch.testing.assert_close(found, reference.scaled_matmul(left, right, torch.float32), rtol=1e-4, atol=1e-4)
