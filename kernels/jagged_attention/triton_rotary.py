"""The rotation of rotary temporal encoding for GPUs: one read and one write of the features; its adjoint turns back."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, type-arg"

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels._shared.triton import check_dtype, lane_dense, tl, triton

BLOCK_N = 32


@triton.jit
def _turn(
    x,
    angle,
    out,
    num,
    direction,
    x_step,
    x_head,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    head, heads = tl.program_id(1), tl.num_programs(1)
    p = tl.arange(0, BLOCK_P)
    inside = (n < num)[:, None] & (p < PAIRS)[None, :]
    theta = tl.load(angle + n[:, None] * PAIRS + p[None, :], mask=inside, other=0.0)
    cos, sin = tl.cos(theta), tl.sin(theta) * direction
    at = n[:, None] * x_step + head * x_head + p[None, :]
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + PAIRS, mask=inside, other=0.0).to(tl.float32)
    at_out = (n[:, None] * heads + head) * (2 * PAIRS) + p[None, :]
    tl.store(out + at_out, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at_out + PAIRS, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)


def _launch(x: Tensor, angle: Tensor, direction: float) -> Tensor:
    num, heads, width = x.shape
    out = x.new_empty(x.shape)
    if out.numel():
        x = lane_dense(x)
        pairs = width // 2
        _turn[(triton.cdiv(num, BLOCK_N), heads)](
            x,
            angle,
            out,
            num,
            direction,
            *x.stride()[:2],
            PAIRS=pairs,
            BLOCK_N=BLOCK_N,
            BLOCK_P=triton.next_power_of_2(pairs),
        )
    return out


class _Rotate(torch.autograd.Function):
    """Forward and backward launches; saves the angles."""

    @staticmethod
    def forward(ctx, x, angle):
        ctx.save_for_backward(angle)
        return _launch(x, angle, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (angle,) = ctx.saved_tensors
        return _launch(grad, angle, -1.0), None


def rotate(x_NHD: Tensor, angle_NP: Tensor) -> Tensor:
    """Pairs (d, d + D/2) of every head turned by fp32 angles [N, D/2]."""
    check_dtype(x_NHD)
    return _Rotate.apply(x_NHD, angle_NP.contiguous())
