"""The grouped matrix product for GPUs: tiles of rows that never straddle two groups.

The gradient of the input is the same kernel with transposed weights; the gradient of the weights sums over a group's
rows.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, type-arg"

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import configs
from kernels._jagged import Layout
from kernels._shared.triton import check_dtype, dot_precision, lane_dense, tile_width, tl, triton, zero_tail

STEP = 32  # entries of the summed dimension per step


@triton.jit
def _product(
    x,
    w,
    out,
    offsets,
    tile_group,
    tile_start,
    num_in,
    num_out,
    x_step,
    w_group,
    w_in,
    w_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group = tl.load(tile_group + tl.program_id(0))
    begin = tl.load(offsets + group)
    n = tl.load(offsets + group + 1) - begin
    i = tl.load(tile_start + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = (begin + i)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, num_in, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        in_x = (i < n)[:, None] & (k < num_in)[None, :]
        in_w = (k < num_in)[:, None] & (o < num_out)[None, :]
        x_tile = tl.load(x + at * x_step + k[None, :], mask=in_x, other=0.0)
        w_tile = tl.load(w + group * w_group + k[:, None] * w_in + o[None, :] * w_out, mask=in_w, other=0.0)
        acc += tl.dot(x_tile, w_tile, input_precision=PRECISION)
    inside = (i < n)[:, None] & (o < num_out)[None, :]
    tl.store(out + at * num_out + o[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weight_gradient(
    x,
    grad,
    d_w,
    offsets,
    num_in,
    num_out,
    x_step,
    grad_step,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(offsets + group)
    n = (tl.load(offsets + group + 1) - begin).to(tl.int32)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i0 in range(0, n, BLOCK_K):
        i = i0 + tl.arange(0, BLOCK_K)
        at = (begin + i)[:, None]
        in_x = (i < n)[:, None] & (k < num_in)[None, :]
        in_g = (i < n)[:, None] & (o < num_out)[None, :]
        x_tile = tl.load(x + at * x_step + k[None, :], mask=in_x, other=0.0)
        g_tile = tl.load(grad + at * grad_step + o[None, :], mask=in_g, other=0.0)
        acc += tl.dot(tl.trans(x_tile), g_tile, input_precision=PRECISION)
    inside = (k < num_in)[:, None] & (o < num_out)[None, :]
    at_w = group * num_in * num_out + k[:, None] * num_out + o[None, :]
    tl.store(d_w + at_w, acc.to(d_w.dtype.element_ty), mask=inside)


def _launch_product(x: Tensor, w: Tensor, groups: Layout) -> Tensor:
    num_in, num_out = w.shape[1:]
    config = configs.select("gemm", num_out, x.element_size(), configs.kind_of(x.device))
    out = zero_tail(x.new_empty((x.shape[0], num_out)), groups.total)
    tiles = groups.blocks(config.own)
    if tiles.num_rows and num_out:
        width = min(config.other, tile_width(num_out))
        _product[(tiles.num_rows, triton.cdiv(num_out, width))](
            x,
            w,
            out,
            groups.offsets,
            tiles.parent_row,
            tiles.parent_start,
            num_in,
            num_out,
            x.stride(0),
            *w.stride(),
            BLOCK_M=config.own,
            BLOCK_N=width,
            BLOCK_K=STEP,
            PRECISION=dot_precision(x.dtype),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


class _GroupedGemm(torch.autograd.Function):
    """Forward and backward launches; saves the inputs."""

    @staticmethod
    def forward(ctx, x, w, groups):
        ctx.save_for_backward(x, w)
        ctx.groups = groups
        return _launch_product(x, w, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        x, w = ctx.saved_tensors
        d_out = lane_dense(d_out)
        num_groups, num_in, num_out = w.shape
        config = configs.select("gemm", num_out, x.element_size(), configs.kind_of(x.device))
        d_w = w.new_empty(w.shape)
        if d_w.numel():
            tall, wide = min(config.own, tile_width(num_in)), min(config.other, tile_width(num_out))
            _weight_gradient[(num_groups, triton.cdiv(num_in, tall), triton.cdiv(num_out, wide))](
                x,
                d_out,
                d_w,
                ctx.groups.offsets,
                num_in,
                num_out,
                x.stride(0),
                d_out.stride(0),
                BLOCK_M=tall,
                BLOCK_N=wide,
                BLOCK_K=STEP,
                PRECISION=dot_precision(x.dtype),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
        return _launch_product(d_out, w.transpose(1, 2), ctx.groups), d_w, None


def grouped_gemm(x_NK: Tensor, w_GKO: Tensor, groups: Layout) -> Tensor:
    """x[rows of group g] w[g] (see `kernels.grouped_gemm.grouped_gemm`)."""
    check_dtype(x_NK)
    return _GroupedGemm.apply(lane_dense(x_NK), w_GKO, groups)
