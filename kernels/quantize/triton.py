"""FP8 quantisation and FP8 matrix products for GPUs with FP8 units (compute capability 8.9 and up).

Casts clamp to +-448 first: the conversion need not saturate. Quantisation has no gradient; training code puts a
straight-through rule around it where it wants one.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, type-arg"

from __future__ import annotations

import torch
from torch import Tensor

from kernels import configs
from kernels._shared.triton import lane_dense, tile_width, tl, triton
from kernels.quantize.reference import E4M3_MAX, MX_BLOCK, Quantized

LIMIT = tl.constexpr(E4M3_MAX)


@triton.jit
def _to_e4m3(x):
    """Saturating cast; NaN stays NaN."""
    low = tl.maximum(x, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(low, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def _quantize_rows(x, values, scale, num_columns, x_step, BLOCK: tl.constexpr):
    """One program per row: the largest magnitude first, then the scaled values."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for c0 in range(0, num_columns, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        tile = tl.load(x + row * x_step + c, mask=c < num_columns, other=0.0)
        largest = tl.maximum(largest, tl.abs(tile.to(tl.float32)))
    amax = tl.max(largest, 0)
    row_scale = tl.where(amax > 0.0, amax / LIMIT, 1.0)
    tl.store(scale + row, row_scale)
    for c0 in range(0, num_columns, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        tile = tl.load(x + row * x_step + c, mask=c < num_columns, other=0.0)
        tl.store(values + row * num_columns + c, _to_e4m3(tile.to(tl.float32) / row_scale), mask=c < num_columns)


@triton.jit
def _quantize_mx(x, values, exponents, num_rows, num_columns, x_step, BLOCK: tl.constexpr):
    """One program per square block."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (r < num_rows)[:, None] & (c < num_columns)[None, :]
    tile = tl.load(x + r[:, None] * x_step + c[None, :], mask=inside, other=0.0).to(tl.float32)
    bits = (tl.max(tl.max(tl.abs(tile), 1), 0) / LIMIT).to(tl.int32, bitcast=True)
    # RCEIL: the exponent, plus one where the mantissa is not zero.
    exponent = tl.minimum(((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 254)
    # Two halves of the inverse 2^(127 - e): alone it would leave the normal range of fp32 for the smallest blocks.
    inverse = tl.exp2((127.0 - exponent.to(tl.float32)) * 0.5)
    tl.store(exponents + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), exponent.to(tl.uint8))
    tl.store(values + r[:, None] * num_columns + c[None, :], _to_e4m3(tile * inverse * inverse), mask=inside)


@triton.jit
def _matmul(
    a,
    b,
    a_scale,
    b_scale,
    out,
    num_m,
    num_n,
    num_k,
    a_m,
    a_k,
    b_k,
    b_n,
    a_scale_m,
    a_scale_k,
    b_scale_k,
    b_scale_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MX: tl.constexpr,
):
    """fp32 sums; block scales enter per step of 32, others once at the end (stride 0 where one scale serves all)."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, num_k, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        in_a = (m < num_m)[:, None] & (k < num_k)[None, :]
        in_b = (k < num_k)[:, None] & (n < num_n)[None, :]
        a_tile = tl.load(a + m[:, None] * a_m + k[None, :] * a_k, mask=in_a, other=0.0)
        b_tile = tl.load(b + k[:, None] * b_k + n[None, :] * b_n, mask=in_b, other=0.0)
        part = tl.dot(a_tile, b_tile)
        if MX:
            at_a = (m // BLOCK_K) * a_scale_m + (k0 // BLOCK_K) * a_scale_k
            at_b = (k0 // BLOCK_K) * b_scale_k + (n // BLOCK_K) * b_scale_n
            a_exponent = tl.load(a_scale + at_a, mask=m < num_m, other=127).to(tl.float32) - 127.0
            b_exponent = tl.load(b_scale + at_b, mask=n < num_n, other=127).to(tl.float32) - 127.0
            part = part * tl.exp2(a_exponent)[:, None] * tl.exp2(b_exponent)[None, :]
        acc += part
    if not MX:
        acc = acc * tl.load(a_scale + m * a_scale_m, mask=m < num_m, other=1.0)[:, None]
        acc = acc * tl.load(b_scale + n * b_scale_n, mask=n < num_n, other=1.0)[None, :]
    inside = (m < num_m)[:, None] & (n < num_n)[None, :]
    tl.store(out + m[:, None] * num_n + n[None, :], acc.to(out.dtype.element_ty), mask=inside)


def quantize_fp8_rows(x_MK: Tensor) -> Quantized:
    """FP8 with one scale per row (see `kernels.quantize.quantize_fp8`)."""
    rows, columns = x_MK.shape
    x = lane_dense(x_MK)
    values = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        block = min(1024, tile_width(columns))
        _quantize_rows[(rows,)](x, values, scale, columns, x.stride(0), BLOCK=block)
    return Quantized(values, scale)


def quantize_mxfp8(x_MK: Tensor) -> Quantized:
    """FP8 with one power-of-two scale per 32 x 32 block (see `kernels.quantize.quantize_mxfp8`)."""
    rows, columns = x_MK.shape
    x = lane_dense(x_MK)
    grid = (triton.cdiv(rows, MX_BLOCK), triton.cdiv(columns, MX_BLOCK))
    values = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=x.device)
    exponents = torch.empty(grid, dtype=torch.uint8, device=x.device)
    if x.numel():
        _quantize_mx[grid](x, values, exponents, rows, columns, x.stride(0), BLOCK=MX_BLOCK)
    return Quantized(values, exponents)


def scaled_matmul(a_MK: Quantized, b_KN: Quantized, dtype: torch.dtype) -> Tensor:
    """The product of two FP8 matrices (see `kernels.quantize.scaled_matmul`)."""
    (num_m, num_k), num_n = a_MK.values.shape, b_KN.values.shape[1]
    out = torch.empty((num_m, num_n), dtype=dtype, device=a_MK.values.device)
    if out.numel():
        config = configs.select("gemm", num_n, 1, configs.kind_of(out.device))
        tall, wide = min(config.own, tile_width(num_m)), min(config.other, tile_width(num_n))
        _matmul[(triton.cdiv(num_m, tall), triton.cdiv(num_n, wide))](
            a_MK.values,
            b_KN.values,
            a_MK.scale,
            b_KN.scale,
            out,
            num_m,
            num_n,
            num_k,
            *a_MK.values.stride(),
            *b_KN.values.stride(),
            *_scale_strides(a_MK.scale),
            *_scale_strides(b_KN.scale),
            BLOCK_M=tall,
            BLOCK_N=wide,
            BLOCK_K=MX_BLOCK if a_MK.is_mx else 64,
            MX=a_MK.is_mx,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


def _scale_strides(scale: Tensor) -> tuple[int, int]:
    """Strides with 0 along dimensions of size 1, so that one scale serves every index."""
    return (0 if scale.shape[0] == 1 else scale.stride(0), 0 if scale.shape[1] == 1 else scale.stride(1))
