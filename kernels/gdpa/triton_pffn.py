"""The personalised feed-forward block for GPUs: norms, residuals and GDPA in one forward and two backward kernels.

The norms run over all heads of an entry, so one program owns a tile of queries with every head and walks the heads
several times; what it computed in an earlier walk it reads back from global memory (its own writes, behind a barrier).
Only q, k and v are saved: the backward recomputes the statistics and the attention.
With qhat = LN(q), a = gdpa(qhat) + qhat, r = 1 / sqrt(mean(a^2) + eps), out = r a + q:
da = r (g - r^2 a mean(a g)); dqhat = da + dgdpa(da); dq = rstd (dqhat - mean(dqhat) - qhat mean(dqhat qhat)) + g.
Source: norm layout of the PyTorch post on free normalisation (2026-07), reimplemented from its equations.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, type-arg"

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import configs
from kernels._jagged import Layout
from kernels._shared.triton import check_dtype, lane_dense, tl, triton, zero_tail, zigzag_slot
from kernels.gdpa.triton import attend, attend_backward, launch_backward_kv, meta_of, query_tiles, steps


@triton.jit
def _statistics(
    q,
    at,
    i,
    d,
    n,
    eps,
    q_step,
    q_head,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Mean and reciprocal deviation of each query over all heads; two passes, so that no digits cancel."""
    total = tl.zeros([BLOCK_M], tl.float32)
    in_q = (i < n)[:, None] & (d < D)[None, :]
    for head in range(H):
        q_tile = tl.load(q + at * q_step + head * q_head + d[None, :], mask=in_q, other=0.0)
        total += tl.sum(q_tile.to(tl.float32), 1)
    mean = total / (H * D)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for head in range(H):
        q_tile = tl.load(q + at * q_step + head * q_head + d[None, :], mask=in_q, other=0.0)
        centred = tl.where(in_q, q_tile.to(tl.float32) - mean[:, None], 0.0)
        squares += tl.sum(centred * centred, 1)
    return mean, 1.0 / tl.sqrt(squares / (H * D) + eps)


@triton.jit
def _forward(
    q,
    k,
    v,
    out,
    offsets,
    tile_row,
    tile_start,
    num_tiles,
    num_rounds,
    num_keys,
    scale_before,
    scale_after,
    window,
    eps,
    q_step,
    q_head,
    k_row,
    k_step,
    k_head,
    v_row,
    v_step,
    v_head,
    out_step,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACT: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    worker, workers = tl.program_id(0), tl.num_programs(0)
    d = tl.arange(0, BLOCK_D)
    for round_index in range(num_rounds):
        slot = zigzag_slot(round_index, worker, workers)
        if slot < num_tiles:
            row = tl.load(tile_row + slot).to(tl.int64)
            begin = tl.load(offsets + row)
            n = (tl.load(offsets + row + 1) - begin).to(tl.int32)
            i = tl.load(tile_start + slot) + tl.arange(0, BLOCK_M)
            at = (begin + i)[:, None]
            in_q = (i < n)[:, None] & (d < D)[None, :]
            mean, rstd = _statistics(q, at, i, d, n, eps, q_step, q_head, H, D, BLOCK_M)
            squares = tl.zeros([BLOCK_M], tl.float32)
            for head in range(H):
                q_tile = tl.load(q + at * q_step + head * q_head + d[None, :], mask=in_q, other=0.0)
                qhat = tl.where(in_q, (q_tile.to(tl.float32) - mean[:, None]) * rstd[:, None], 0.0)
                acc = attend(
                    qhat.to(q_tile.dtype),
                    k + row * k_row + head * k_head,
                    v + row * v_row + head * v_head,
                    i,
                    d,
                    n,
                    num_keys,
                    scale_before,
                    window,
                    k_step,
                    v_step,
                    D,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_D,
                    ACT,
                    WINDOWED,
                    PRECISION,
                )
                a_tile = acc * scale_after + qhat
                squares += tl.sum(a_tile * a_tile, 1)
                at_out = at * out_step + head * D + d[None, :]
                tl.store(out + at_out, a_tile.to(out.dtype.element_ty), mask=in_q)
            rms = 1.0 / tl.sqrt(squares / (H * D) + eps)
            tl.debug_barrier()
            for head in range(H):
                at_out = at * out_step + head * D + d[None, :]
                a_tile = tl.load(out + at_out, mask=in_q, other=0.0).to(tl.float32)
                q_tile = tl.load(q + at * q_step + head * q_head + d[None, :], mask=in_q, other=0.0)
                result = a_tile * rms[:, None] + q_tile.to(tl.float32)
                tl.store(out + at_out, result.to(out.dtype.element_ty), mask=in_q)


@triton.jit
def _backward_q(
    q,
    k,
    v,
    d_out,
    d_q,
    d_a,
    mean_out,
    rstd_out,
    offsets,
    tile_row,
    tile_start,
    num_tiles,
    num_rounds,
    num_keys,
    scale_before,
    scale_after,
    window,
    eps,
    q_step,
    q_head,
    k_row,
    k_step,
    k_head,
    v_row,
    v_step,
    v_head,
    g_step,
    g_head,
    out_step,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACT: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the queries; leaves da and the statistics for the kernel of keys and values."""
    worker, workers = tl.program_id(0), tl.num_programs(0)
    d = tl.arange(0, BLOCK_D)
    for round_index in range(num_rounds):
        slot = zigzag_slot(round_index, worker, workers)
        if slot < num_tiles:
            row = tl.load(tile_row + slot).to(tl.int64)
            begin = tl.load(offsets + row)
            n = (tl.load(offsets + row + 1) - begin).to(tl.int32)
            i = tl.load(tile_start + slot) + tl.arange(0, BLOCK_M)
            at = (begin + i)[:, None]
            in_q = (i < n)[:, None] & (d < D)[None, :]
            mean, rstd = _statistics(q, at, i, d, n, eps, q_step, q_head, H, D, BLOCK_M)
            tl.store(mean_out + begin + i, mean, mask=i < n)
            tl.store(rstd_out + begin + i, rstd, mask=i < n)

            # First walk: a again, and the two sums that the gradient of its norm needs.
            squares = tl.zeros([BLOCK_M], tl.float32)
            products = tl.zeros([BLOCK_M], tl.float32)
            for head in range(H):
                q_tile = tl.load(q + at * q_step + head * q_head + d[None, :], mask=in_q, other=0.0)
                g_tile = tl.load(d_out + at * g_step + head * g_head + d[None, :], mask=in_q, other=0.0)
                qhat = tl.where(in_q, (q_tile.to(tl.float32) - mean[:, None]) * rstd[:, None], 0.0)
                acc = attend(
                    qhat.to(q_tile.dtype),
                    k + row * k_row + head * k_head,
                    v + row * v_row + head * v_head,
                    i,
                    d,
                    n,
                    num_keys,
                    scale_before,
                    window,
                    k_step,
                    v_step,
                    D,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_D,
                    ACT,
                    WINDOWED,
                    PRECISION,
                )
                a_tile = acc * scale_after + qhat
                squares += tl.sum(a_tile * a_tile, 1)
                products += tl.sum(a_tile * g_tile.to(tl.float32), 1)
                at_out = at * out_step + head * D + d[None, :]
                tl.store(d_a + at_out, a_tile.to(d_a.dtype.element_ty), mask=in_q)
            rms = 1.0 / tl.sqrt(squares / (H * D) + eps)
            pull = products / (H * D) * rms * rms * rms
            tl.debug_barrier()

            # Second walk: da replaces a, the attention's gradient joins it, and the sums for the first norm gather.
            sums = tl.zeros([BLOCK_M], tl.float32)
            turned = tl.zeros([BLOCK_M], tl.float32)
            for head in range(H):
                at_out = at * out_step + head * D + d[None, :]
                q_tile = tl.load(q + at * q_step + head * q_head + d[None, :], mask=in_q, other=0.0)
                g_tile = tl.load(d_out + at * g_step + head * g_head + d[None, :], mask=in_q, other=0.0)
                a_tile = tl.load(d_a + at_out, mask=in_q, other=0.0).to(tl.float32)
                qhat = tl.where(in_q, (q_tile.to(tl.float32) - mean[:, None]) * rstd[:, None], 0.0)
                da_tile = g_tile.to(tl.float32) * rms[:, None] - a_tile * pull[:, None]
                tl.store(d_a + at_out, da_tile.to(d_a.dtype.element_ty), mask=in_q)
                acc = attend_backward(
                    qhat.to(q_tile.dtype),
                    da_tile.to(q_tile.dtype),
                    k + row * k_row + head * k_head,
                    v + row * v_row + head * v_head,
                    i,
                    d,
                    n,
                    num_keys,
                    scale_before,
                    window,
                    k_step,
                    v_step,
                    D,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_D,
                    ACT,
                    WINDOWED,
                    PRECISION,
                )
                d_qhat = acc * (scale_before * scale_after) + da_tile
                sums += tl.sum(d_qhat, 1)
                turned += tl.sum(d_qhat * qhat, 1)
                tl.store(d_q + at_out, d_qhat.to(d_q.dtype.element_ty), mask=in_q)
            sums = sums / (H * D)
            turned = turned / (H * D)
            tl.debug_barrier()

            # Third walk: through the first norm, plus the outer residual.
            for head in range(H):
                at_out = at * out_step + head * D + d[None, :]
                q_tile = tl.load(q + at * q_step + head * q_head + d[None, :], mask=in_q, other=0.0)
                g_tile = tl.load(d_out + at * g_step + head * g_head + d[None, :], mask=in_q, other=0.0)
                d_qhat = tl.load(d_q + at_out, mask=in_q, other=0.0).to(tl.float32)
                qhat = (q_tile.to(tl.float32) - mean[:, None]) * rstd[:, None]
                result = (d_qhat - sums[:, None] - qhat * turned[:, None]) * rstd[:, None] + g_tile.to(tl.float32)
                tl.store(d_q + at_out, result.to(d_q.dtype.element_ty), mask=in_q)


class _Pffn(torch.autograd.Function):
    """Forward and backward launches; saves q, k and v."""

    @staticmethod
    def forward(ctx, q, k, v, rows, activation, scale_before, scale_after, window, eps):
        config = configs.select("fused", q.shape[2], q.element_size(), configs.kind_of(q.device))
        config = config.fit(rows.max_len, k.shape[1])
        out = zero_tail(q.new_empty(q.shape), rows.total)
        tiles = query_tiles(rows, config.own)
        if tiles.num and q.shape[1]:
            workers = min(tiles.num, configs.num_workers(q.device, 1))
            _forward[(workers,)](
                q,
                k,
                v,
                out,
                rows.offsets,
                tiles.row,
                tiles.start,
                tiles.num,
                triton.cdiv(tiles.num, workers),
                k.shape[1],
                scale_before,
                scale_after,
                window if window is not None else 0,
                eps,
                *steps(q, k, v),
                out.stride(0),
                H=q.shape[1],
                BLOCK_M=config.own,
                BLOCK_N=config.other,
                **meta_of(q, config, activation, window),
            )
        ctx.save_for_backward(q, k, v)
        ctx.options = (rows, activation, scale_before, scale_after, window, eps)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v = ctx.saved_tensors
        rows, activation, scale_before, scale_after, window, eps = ctx.options
        d_out = lane_dense(d_out)
        config = configs.select("fused_backward", q.shape[2], q.element_size(), configs.kind_of(q.device))
        config = config.fit(rows.max_len, k.shape[1])
        d_q = zero_tail(q.new_empty(q.shape), rows.total)
        d_a = q.new_empty(q.shape)
        mean, rstd = (q.new_empty(q.shape[0], dtype=torch.float32) for _ in range(2))
        tiles = query_tiles(rows, config.own)
        if tiles.num and q.shape[1]:
            workers = min(tiles.num, configs.num_workers(q.device, 1))
            _backward_q[(workers,)](
                q,
                k,
                v,
                d_out,
                d_q,
                d_a,
                mean,
                rstd,
                rows.offsets,
                tiles.row,
                tiles.start,
                tiles.num,
                triton.cdiv(tiles.num, workers),
                k.shape[1],
                scale_before,
                scale_after,
                window if window is not None else 0,
                eps,
                *steps(q, k, v),
                *d_out.stride()[:2],
                d_q.stride(0),
                H=q.shape[1],
                BLOCK_M=config.own,
                BLOCK_N=config.other,
                **meta_of(q, config, activation, window),
            )
        scales = (scale_before, scale_after)
        d_k, d_v = launch_backward_kv(q, k, v, d_a, rows, activation, scales, window, (mean, rstd))
        return d_q, d_k, d_v, None, None, None, None, None, None


def gdpa_pffn(
    q_NHD: Tensor,
    k_BKHD: Tensor,
    v_BKHD: Tensor,
    rows: Layout,
    activation: str,
    scale_before: float,
    scale_after: float,
    window: int | None,
    eps: float,
) -> Tensor:
    """RMSNorm(gdpa(LN(q)) + LN(q)) + q (see `kernels.gdpa.gdpa_pffn`)."""
    check_dtype(q_NHD)
    q, k, v = lane_dense(q_NHD), lane_dense(k_BKHD), lane_dense(v_BKHD)
    return _Pffn.apply(q, k, v, rows, activation, float(scale_before), float(scale_after), window, float(eps))
