"""The low-precision formats against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.quantize import (
    E4M3_MAX,
    MX_BLOCK,
    dequantize,
    dequantize_int4,
    hadamard,
    quantize_fp8,
    quantize_int4,
    quantize_mxfp8,
    scaled_matmul,
)
from kernels.quantize.reference import exponent_value, rceil_exponent, to_e4m3

SHAPES = [(0, 4), (4, 0), (1, 1), (31, 33), (32, 32), (64, 96), (65, 40)]
HALF_STEP = 2.0**-4  # of a value in [1, 2), relative: three mantissa bits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("per", ["row", "tensor"])
def test_fp8_error_is_at_most_half_a_step(per: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * 10.0 ** torch.arange(shape[0])[:, None].clamp(max=3)
    packed = quantize_fp8(x, per=per)
    assert packed.scale.shape == ((shape[0], 1) if per == "row" else (1, 1))
    subnormal_half_step = packed.scale * 2.0**-10
    assert ((dequantize(packed) - x).abs() <= torch.maximum(x.abs() * HALF_STEP, subnormal_half_step)).all()
    if x.numel():
        assert packed.values.float().abs().max() == E4M3_MAX  # the range is used to its end


@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp8_of_the_transpose_is_the_transpose(shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * torch.randn(shape).exp()
    packed, turned = quantize_mxfp8(x), quantize_mxfp8(x.T)
    assert torch.equal(turned.values.view(torch.uint8), packed.T.values.contiguous().view(torch.uint8))
    assert torch.equal(turned.scale, packed.T.scale)


def test_mxfp8_scales_each_block_alone_and_never_overflows() -> None:
    x = torch.ones(2 * MX_BLOCK, 2 * MX_BLOCK)
    x[:MX_BLOCK, :MX_BLOCK] *= 2.0**20
    x[MX_BLOCK:, :MX_BLOCK] *= E4M3_MAX * 1.01
    packed = quantize_mxfp8(x)
    assert packed.scale.tolist() == [[127 + 12, 127 - 8], [128, 127 - 8]]
    assert ((dequantize(packed) - x).abs() <= x * HALF_STEP).all()


@settings(derandomize=True, deadline=None)
@given(st.floats(2.0**-120, 2.0**120, width=32))
def test_rceil_gives_the_smallest_power_of_two_not_below(value: float) -> None:
    power = float(exponent_value(rceil_exponent(torch.tensor([value]))))
    assert value <= power < 2 * value


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(3, 40)
    for packed in (quantize_fp8(x), quantize_fp8(x, per="tensor"), quantize_mxfp8(x)):
        assert not dequantize(packed).any()


def test_saturation_instead_of_nan() -> None:
    assert to_e4m3(torch.tensor([1e9, -1e9, 449.0])).float().tolist() == [448.0, -448.0, 448.0]


def test_stochastic_rounding_is_unbiased_and_rounds_to_neighbours() -> None:
    x = torch.tensor([1.03, -5.7, 0.0003, 17.0, 0.0]).repeat(20000, 1)
    rounded = to_e4m3(x, stochastic=True, generator=torch.Generator().manual_seed(0)).float()
    for column, value in zip(rounded.T, x[0], strict=True):
        levels = column.unique()
        assert levels.numel() <= 2
        assert levels.min() <= value <= levels.max()
        spread = float(levels.max() - levels.min())
        # Five standard errors of a two-valued mean.
        assert abs(float(column.mean() - value)) <= 5 * spread / 2 / 20000**0.5 + 1e-6
    assert rounded[:, 0].unique().numel() == 2


def test_stochastic_rounding_at_the_largest_value_stays_finite() -> None:
    x = torch.full((1000,), 447.0)
    assert to_e4m3(x, stochastic=True).float().isfinite().all()


@pytest.mark.parametrize("kind", ["row", "tensor", "mx"])
def test_scaled_matmul_is_the_product_of_what_the_factors_stand_for(kind: str) -> None:
    a, b = torch.randn(5, 70), torch.randn(70, 9)
    if kind == "mx":
        left, right = quantize_mxfp8(a), quantize_mxfp8(b)
    else:
        left, right = quantize_fp8(a, per=kind), quantize_fp8(b.T, per=kind).T
    torch.testing.assert_close(scaled_matmul(left, right), dequantize(left) @ dequantize(right))
    relative = (scaled_matmul(left, right) - a @ b).norm() / (a @ b).norm()
    assert 0 < relative < 0.06


def test_scaled_matmul_refuses_scales_along_the_summed_dimension() -> None:
    a, b = quantize_fp8(torch.randn(5, 7)), quantize_fp8(torch.randn(7, 9))
    with pytest.raises(ValueError, match=r"b_KN.scale: .* one per column of the right factor, found shape \[7, 1\]"):
        scaled_matmul(a, b)
    with pytest.raises(ValueError, match="one of each"):
        scaled_matmul(a, quantize_mxfp8(torch.randn(7, 9)))


@settings(derandomize=True, deadline=None)
@given(st.floats(-1.0, 1.0, width=32))
def test_int4_error_is_at_most_a_sixteenth_below_its_largest_code(z: float) -> None:
    code = quantize_int4(torch.tensor([z]))
    error = abs(float(dequantize_int4(code)) - z)
    assert error <= (1 / 16 if z <= 15 / 16 else 1 / 8)
    assert int(code) == max(-8, min(7, round(8 * z)))


@pytest.mark.parametrize("width", [1, 2, 8, 64])
def test_hadamard_is_orthonormal_and_keeps_products(width: int) -> None:
    signs = torch.randint(0, 2, (width,)) * 2.0 - 1.0
    matrix = hadamard(torch.eye(width), signs=signs)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width))
    assert torch.allclose(matrix.abs(), torch.full((width, width), width**-0.5))
    a, b = torch.randn(3, width), torch.randn(4, width)
    torch.testing.assert_close(hadamard(a, signs=signs) @ hadamard(b, signs=signs).T, a @ b.T)
    torch.testing.assert_close(hadamard(hadamard(a, signs=signs)) * signs, a)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="per: expected 'row' or 'tensor', found 'column'"):
        quantize_fp8(torch.randn(2, 2), per="column")
    with pytest.raises(ValueError, match="power of two, found 6"):
        hadamard(torch.randn(2, 6))
    with pytest.raises(TypeError, match="codes: expected dtype torch.int8"):
        dequantize_int4(torch.zeros(3))
