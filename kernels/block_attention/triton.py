"""Block attention for GPUs: one program holds a whole block, so that nothing is rescaled and no log-sum-exp is saved.

The backward is one kernel: it recomputes the weights of its block and writes all three gradients.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, type-arg"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import configs
from kernels._jagged import Blocks
from kernels._shared.triton import check_dtype, dot_precision, lane_dense, tile_width, tl, triton, zero_tail
from kernels.jagged_attention import triton as jagged

LARGEST_BLOCK = 128  # scores of a larger block do not fit the registers of one program
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _weights(q_tile, k_tile, i, n, scale, PRECISION: tl.constexpr):
    """The softmax weights of a block; rows past its end are finite and multiply gradients of zero."""
    score = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * (scale * LOG2E)
    score = tl.where((i < n)[None, :], score, float("-inf"))
    weight = tl.exp2(score - tl.max(score, 1)[:, None])
    return weight / tl.sum(weight, 1)[:, None]


@triton.jit
def _forward(
    q,
    k,
    v,
    out,
    offsets,
    scale,
    q_step,
    q_head,
    k_step,
    k_head,
    v_step,
    v_head,
    out_step,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(offsets + block)
    n = (tl.load(offsets + block + 1) - begin).to(tl.int32)
    i, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    at = (begin + i)[:, None]
    inside = (i < n)[:, None] & (d < D)[None, :]
    q_tile = tl.load(q + at * q_step + head * q_head + d[None, :], mask=inside, other=0.0)
    k_tile = tl.load(k + at * k_step + head * k_head + d[None, :], mask=inside, other=0.0)
    v_tile = tl.load(v + at * v_step + head * v_head + d[None, :], mask=inside, other=0.0)
    weight = _weights(q_tile, k_tile, i, n, scale, PRECISION)
    acc = tl.dot(weight.to(v_tile.dtype), v_tile, input_precision=PRECISION)
    tl.store(out + at * out_step + head * D + d[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    q,
    k,
    v,
    d_out,
    d_q,
    d_k,
    d_v,
    offsets,
    scale,
    q_step,
    q_head,
    k_step,
    k_head,
    v_step,
    v_head,
    g_step,
    g_head,
    out_step,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(offsets + block)
    n = (tl.load(offsets + block + 1) - begin).to(tl.int32)
    i, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    at = (begin + i)[:, None]
    inside = (i < n)[:, None] & (d < D)[None, :]
    q_tile = tl.load(q + at * q_step + head * q_head + d[None, :], mask=inside, other=0.0)
    k_tile = tl.load(k + at * k_step + head * k_head + d[None, :], mask=inside, other=0.0)
    v_tile = tl.load(v + at * v_step + head * v_head + d[None, :], mask=inside, other=0.0)
    g_tile = tl.load(d_out + at * g_step + head * g_head + d[None, :], mask=inside, other=0.0)
    weight = _weights(q_tile, k_tile, i, n, scale, PRECISION)
    d_weight = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
    # sum(out * d_out) of a query equals sum(weight * d_weight): the output is not needed.
    delta = tl.sum(weight * d_weight, 1)
    d_score = (weight * (d_weight - delta[:, None])).to(q_tile.dtype)
    at_out = at * out_step + head * D + d[None, :]
    v_grad = tl.dot(tl.trans(weight.to(g_tile.dtype)), g_tile, input_precision=PRECISION)
    tl.store(d_v + at_out, v_grad.to(d_v.dtype.element_ty), mask=inside)
    q_grad = tl.dot(d_score, k_tile, input_precision=PRECISION) * scale
    tl.store(d_q + at_out, q_grad.to(d_q.dtype.element_ty), mask=inside)
    k_grad = tl.dot(tl.trans(d_score), q_tile, input_precision=PRECISION) * scale
    tl.store(d_k + at_out, k_grad.to(d_k.dtype.element_ty), mask=inside)


class _Attention(torch.autograd.Function):
    """Forward and backward launches; saves q, k and v."""

    @staticmethod
    def forward(ctx, q, k, v, blocks, block_size, scale):
        out = zero_tail(q.new_empty(q.shape), blocks.total)
        if blocks.num_rows and q.shape[1]:
            _forward[(blocks.num_rows, q.shape[1])](
                q,
                k,
                v,
                out,
                blocks.offsets,
                scale,
                *_steps(q, k, v),
                out.stride(0),
                **_meta(q, block_size),
            )
        ctx.save_for_backward(q, k, v)
        ctx.options = (blocks, block_size, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v = ctx.saved_tensors
        blocks, block_size, scale = ctx.options
        d_out = lane_dense(d_out)
        d_q, d_k, d_v = (zero_tail(q.new_empty(q.shape), blocks.total) for _ in range(3))
        if blocks.num_rows and q.shape[1]:
            _backward[(blocks.num_rows, q.shape[1])](
                q,
                k,
                v,
                d_out,
                d_q,
                d_k,
                d_v,
                blocks.offsets,
                scale,
                *_steps(q, k, v),
                *d_out.stride()[:2],
                d_q.stride(0),
                **_meta(q, block_size),
            )
        return d_q, d_k, d_v, None, None, None


def _steps(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])


def _meta(q: Tensor, block_size: int) -> dict[str, Any]:
    config = configs.select("block", q.shape[2], q.element_size(), configs.kind_of(q.device))
    return {
        "D": q.shape[2],
        "BLOCK_D": tile_width(q.shape[2]),
        "BLOCK": tile_width(block_size),
        "PRECISION": dot_precision(q.dtype),
        "num_warps": config.num_warps,
    }


def attention(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, blocks: Blocks, block_size: int, scale: float) -> Tensor:
    """Attention of each entry over its own block (see `kernels.block_attention.block_attention`)."""
    if block_size > LARGEST_BLOCK:  # a block is a jagged row: the kernel with an online softmax takes any length
        return jagged.attention(q_NHD, k_NHD, v_NHD, blocks, blocks, False, None, scale)
    check_dtype(q_NHD)
    return _Attention.apply(lane_dense(q_NHD), lane_dense(k_NHD), lane_dense(v_NHD), blocks, block_size, scale)
