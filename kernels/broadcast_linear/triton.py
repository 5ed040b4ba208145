"""The broadcast linear layer for GPUs: the request product is added in the epilogue of the candidate product.

The product over requests and the four matrix products of the backward are plain and left to the vendor's GEMM; what is
special is the gathered addition forward and its adjoint, the sum of gradients over each request's candidates.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, type-arg"

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import configs
from kernels._shared.triton import check_dtype, dot_precision, lane_dense, tile_width, tl, triton
from kernels.broadcast_attention.grouping import group_by_request


@triton.jit
def _product_and_gather(
    x,
    w,
    y_request,
    cand_to_request,
    out,
    num_cands,
    num_in,
    num_out,
    x_step,
    w_step,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, num_in, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        in_x = (c < num_cands)[:, None] & (k < num_in)[None, :]
        in_w = (k < num_in)[:, None] & (o < num_out)[None, :]
        x_tile = tl.load(x + c[:, None] * x_step + k[None, :], mask=in_x, other=0.0)
        w_tile = tl.load(w + k.to(tl.int64)[:, None] * w_step + o[None, :], mask=in_w, other=0.0)
        acc += tl.dot(x_tile, w_tile, input_precision=PRECISION)
    inside = (c < num_cands)[:, None] & (o < num_out)[None, :]
    request = tl.load(cand_to_request + c, mask=c < num_cands, other=0)
    shared = tl.load(y_request + request[:, None] * num_out + o[None, :], mask=inside, other=0.0)
    result = acc + shared.to(tl.float32)
    tl.store(out + c[:, None] * num_out + o[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_by_request(
    grad,
    order,
    offsets,
    out,
    num_out,
    grad_step,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SORTED: tl.constexpr,
):
    """out[r] = sum of grad over the candidates of request r; deterministic, unlike atomic additions."""
    request = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(offsets + request)
    n = (tl.load(offsets + request + 1) - begin).to(tl.int32)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for c0 in range(0, n, BLOCK_M):
        c = c0 + tl.arange(0, BLOCK_M)
        at = begin + c
        if not SORTED:
            at = tl.load(order + at, mask=c < n, other=0)
        inside = (c < n)[:, None] & (o < num_out)[None, :]
        tile = tl.load(grad + at[:, None] * grad_step + o[None, :], mask=inside, other=0.0)
        acc += tl.sum(tile.to(tl.float32), 0)
    tl.store(out + request * num_out + o, acc.to(out.dtype.element_ty), mask=o < num_out)


class _BroadcastLinear(torch.autograd.Function):
    """Forward and backward launches; saves the inputs."""

    @staticmethod
    def forward(ctx, x_R, x_C, w_R, w_C, cand_to_request):
        num_cands, num_in = x_C.shape
        num_out = w_C.shape[1]
        config = configs.select("gemm", num_out, x_C.element_size(), configs.kind_of(x_C.device))
        y_R = x_R @ w_R
        out = x_C.new_empty((num_cands, num_out))
        if num_cands and num_out:
            width = min(config.other, tile_width(num_out))
            _product_and_gather[(triton.cdiv(num_cands, config.own), triton.cdiv(num_out, width))](
                x_C,
                w_C,
                y_R,
                cand_to_request,
                out,
                num_cands,
                num_in,
                num_out,
                x_C.stride(0),
                w_C.stride(0),
                BLOCK_M=config.own,
                BLOCK_N=width,
                BLOCK_K=32,
                PRECISION=dot_precision(x_C.dtype),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
        ctx.save_for_backward(x_R, x_C, w_R, w_C, cand_to_request)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        x_R, x_C, w_R, w_C, cand_to_request = ctx.saved_tensors
        d_out = lane_dense(d_out)
        num_requests, num_out = x_R.shape[0], w_R.shape[1]
        groups = group_by_request(cand_to_request, num_requests, 1)
        d_y = d_out.new_empty((num_requests, num_out))
        if num_requests and num_out:
            width = min(128, triton.next_power_of_2(num_out))
            _sum_by_request[(num_requests, triton.cdiv(num_out, width))](
                d_out,
                cand_to_request if groups.order is None else groups.order,
                groups.queries.offsets,
                d_y,
                num_out,
                d_out.stride(0),
                BLOCK_M=16,
                BLOCK_N=width,
                SORTED=groups.order is None,
            )
        return d_y @ w_R.T, d_out @ w_C.T, x_R.T @ d_y, x_C.T @ d_out, None


def broadcast_linear(x_RK: Tensor, x_CJ: Tensor, w_KO: Tensor, w_JO: Tensor, cand_to_request: Tensor) -> Tensor:
    """x_C w_C + (x_R w_R)[cand_to_request] (see `kernels.broadcast_linear.broadcast_linear`)."""
    check_dtype(x_CJ)
    return _BroadcastLinear.apply(x_RK, lane_dense(x_CJ), w_KO, lane_dense(w_JO), cand_to_request)
