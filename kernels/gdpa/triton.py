"""Generalised dot-product attention for GPUs. No row maximum and no row sum: nothing is saved but q, k and v.

With z = scale_before * q k^T and p = scale_after * act(z) the backward is plain calculus: dv = p^T do, dp = do v^T,
dz = scale_after * act'(z) * dp, dq = scale_before * dz k, dk = scale_before * dz^T q. z is recomputed.
Source: Kunlun (arXiv 2602.10016, section 4.3.1).
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, type-arg"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import configs
from kernels._jagged import Layout
from kernels._shared.triton import (
    check_dtype,
    dot_precision,
    lane_dense,
    tile_width,
    tl,
    triton,
    zero_tail,
    zigzag_slot,
)
from kernels.gdpa.triton_activations import activate, derivative
from kernels.schedule import Tiles, sort_tiles


@triton.jit
def legal_scores(i, j, n, num_keys, window, WINDOWED: tl.constexpr):
    """Which scores count: inside both sides and, with a window, close enough."""
    legal = (i < n) & (j < num_keys)
    if WINDOWED:
        legal = legal & (i - j <= window) & (j - i <= window)
    return legal


@triton.jit
def attend(
    q_tile,
    k_head_ptr,
    v_head_ptr,
    i,
    d,
    n,
    num_keys,
    scale_before,
    window,
    k_step,
    v_step,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACT: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """act(scale_before * q k^T) v of one query tile and one head, fp32."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for j0 in range(0, num_keys, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        in_k = (j < num_keys)[:, None] & (d < D)[None, :]
        k_tile = tl.load(k_head_ptr + j[:, None] * k_step + d[None, :], mask=in_k, other=0.0)
        v_tile = tl.load(v_head_ptr + j[:, None] * v_step + d[None, :], mask=in_k, other=0.0)
        z = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale_before
        legal = legal_scores(i[:, None], j[None, :], n, num_keys, window, WINDOWED)
        weight = activate(tl.where(legal, z, 0.0), ACT)  # act(0) = 0
        acc += tl.dot(weight.to(v_tile.dtype), v_tile, input_precision=PRECISION)
    return acc


@triton.jit
def attend_backward(
    q_tile,
    g_tile,
    k_head_ptr,
    v_head_ptr,
    i,
    d,
    n,
    num_keys,
    scale_before,
    window,
    k_step,
    v_step,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACT: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(act'(z) * (g v^T)) k of one query tile and one head, fp32: the gradient of q up to both scales."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for j0 in range(0, num_keys, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        in_k = (j < num_keys)[:, None] & (d < D)[None, :]
        k_tile = tl.load(k_head_ptr + j[:, None] * k_step + d[None, :], mask=in_k, other=0.0)
        v_tile = tl.load(v_head_ptr + j[:, None] * v_step + d[None, :], mask=in_k, other=0.0)
        z = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale_before
        d_weight = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        legal = legal_scores(i[:, None], j[None, :], n, num_keys, window, WINDOWED)
        d_z = tl.where(legal, derivative(z, ACT) * d_weight, 0.0)
        acc += tl.dot(d_z.to(k_tile.dtype), k_tile, input_precision=PRECISION)
    return acc


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
    q_step,
    q_head,
    k_row,
    k_step,
    k_head,
    v_row,
    v_step,
    v_head,
    out_step,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACT: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    worker, head, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
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
            q_tile = tl.load(q + at * q_step + head * q_head + d[None, :], mask=in_q, other=0.0)
            acc = attend(
                q_tile,
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
            at_out = at * out_step + head * D + d[None, :]
            tl.store(out + at_out, (acc * scale_after).to(out.dtype.element_ty), mask=in_q)


@triton.jit
def _backward_q(
    q,
    k,
    v,
    d_out,
    d_q,
    offsets,
    tile_row,
    tile_start,
    num_tiles,
    num_rounds,
    num_keys,
    scale_before,
    scale_after,
    window,
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
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACT: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    worker, head, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
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
            q_tile = tl.load(q + at * q_step + head * q_head + d[None, :], mask=in_q, other=0.0)
            g_tile = tl.load(d_out + at * g_step + head * g_head + d[None, :], mask=in_q, other=0.0)
            acc = attend_backward(
                q_tile,
                g_tile,
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
            at_q = at * out_step + head * D + d[None, :]
            tl.store(d_q + at_q, (acc * (scale_before * scale_after)).to(d_q.dtype.element_ty), mask=in_q)


@triton.jit
def _backward_kv(
    q,
    k,
    v,
    d_out,
    mean,
    rstd,
    d_k,
    d_v,
    offsets,
    tile_row,
    tile_start,
    num_tiles,
    num_rounds,
    num_keys,
    scale_before,
    scale_after,
    window,
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
    kv_row,
    kv_step,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACT: tl.constexpr,
    WINDOWED: tl.constexpr,
    NORMED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of keys and values; with NORMED the queries are (q - mean) * rstd, as in the fused block."""
    worker, head, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    d = tl.arange(0, BLOCK_D)
    for round_index in range(num_rounds):
        slot = zigzag_slot(round_index, worker, workers)
        if slot < num_tiles:
            row = tl.load(tile_row + slot).to(tl.int64)
            begin = tl.load(offsets + row)
            n = (tl.load(offsets + row + 1) - begin).to(tl.int32)
            start = tl.load(tile_start + slot)
            j = start + tl.arange(0, BLOCK_N)
            in_k = (j < num_keys)[:, None] & (d < D)[None, :]
            at_k = j[:, None]
            k_tile = tl.load(k + row * k_row + head * k_head + at_k * k_step + d[None, :], mask=in_k, other=0.0)
            v_tile = tl.load(v + row * v_row + head * v_head + at_k * v_step + d[None, :], mask=in_k, other=0.0)
            first, last = 0, n
            if WINDOWED:
                first = tl.maximum(first, start - window)
                last = tl.minimum(last, start + BLOCK_N + window)
            k_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            v_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            for i0 in range(first, last, BLOCK_M):
                i = i0 + tl.arange(0, BLOCK_M)
                at = (begin + i)[:, None]
                in_q = (i < n)[:, None] & (d < D)[None, :]
                q_tile = tl.load(q + at * q_step + head * q_head + d[None, :], mask=in_q, other=0.0)
                if NORMED:
                    mean_tile = tl.load(mean + begin + i, mask=i < n, other=0.0)[:, None]
                    rstd_tile = tl.load(rstd + begin + i, mask=i < n, other=0.0)[:, None]
                    qhat = (q_tile.to(tl.float32) - mean_tile) * rstd_tile
                    q_tile = tl.where(in_q, qhat, 0.0).to(q_tile.dtype)
                g_tile = tl.load(d_out + at * g_step + head * g_head + d[None, :], mask=in_q, other=0.0)
                z = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * scale_before
                legal = legal_scores(i[None, :], j[:, None], n, num_keys, window, WINDOWED)
                weight = activate(tl.where(legal, z, 0.0), ACT)
                v_acc += tl.dot(weight.to(g_tile.dtype), g_tile, input_precision=PRECISION)
                d_weight = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
                d_z = tl.where(legal, derivative(z, ACT) * d_weight, 0.0)
                k_acc += tl.dot(d_z.to(q_tile.dtype), q_tile, input_precision=PRECISION)
            at_kv = row * kv_row + at_k * kv_step + head * D + d[None, :]
            tl.store(d_k + at_kv, (k_acc * (scale_before * scale_after)).to(d_k.dtype.element_ty), mask=in_k)
            tl.store(d_v + at_kv, (v_acc * scale_after).to(d_v.dtype.element_ty), mask=in_k)


def query_tiles(rows: Layout, size: int) -> Tiles:
    """Tiles of the jagged queries; all read the same number of keys, so their order carries no weight."""
    pieces = rows.blocks(size)
    return sort_tiles(pieces.parent_row, pieces.parent_start, torch.ones_like(pieces.parent_row))


def key_tiles(rows: Layout, num_keys: int, size: int, step: int) -> Tiles:
    """Tiles of every row's dense keys, weighed by the tiles of jagged queries that each reads."""
    starts = torch.arange(0, num_keys, size, device=rows.offsets.device)
    row = torch.arange(rows.num_rows, device=rows.offsets.device).repeat_interleave(starts.numel())
    return sort_tiles(row, starts.repeat(rows.num_rows), (rows.lengths[row] + step - 1) // step)


def meta_of(q: Tensor, config: configs.Config, activation: str, window: int | None) -> dict[str, Any]:
    """Compile-time arguments that all kernels of this operator share."""
    return {
        "D": q.shape[2],
        "BLOCK_D": tile_width(q.shape[2]),
        "ACT": activation,
        "WINDOWED": window is not None,
        "PRECISION": dot_precision(q.dtype),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def steps(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Strides of the inputs without their dense last dimension."""
    return (*q.stride()[:2], *k.stride()[:3], *v.stride()[:3])


def launch_backward_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    rows: Layout,
    activation: str,
    scales: tuple[float, float],
    window: int | None,
    norm: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values; `norm` holds mean and reciprocal deviation per query when they are normalised."""
    heads, num_keys = q.shape[1], k.shape[1]
    config = configs.select("backward", q.shape[2], q.element_size(), configs.kind_of(q.device))
    config = config.fit(num_keys, rows.max_len)
    d_k, d_v = k.new_empty(k.shape), v.new_empty(v.shape)
    tiles = key_tiles(rows, num_keys, config.own, config.other)
    if tiles.num and heads:
        workers = min(tiles.num, configs.num_workers(q.device, heads))
        mean, rstd = norm if norm is not None else (grad, grad)
        _backward_kv[(workers, heads)](
            q,
            k,
            v,
            grad,
            mean,
            rstd,
            d_k,
            d_v,
            rows.offsets,
            tiles.row,
            tiles.start,
            tiles.num,
            triton.cdiv(tiles.num, workers),
            num_keys,
            *scales,
            window if window is not None else 0,
            *steps(q, k, v),
            *grad.stride()[:2],
            *d_k.stride()[:2],
            BLOCK_M=config.other,
            BLOCK_N=config.own,
            NORMED=norm is not None,
            **meta_of(q, config, activation, window),
        )
    return d_k, d_v


class _Gdpa(torch.autograd.Function):
    """Forward and backward launches; saves q, k and v."""

    @staticmethod
    def forward(ctx, q, k, v, rows, activation, scale_before, scale_after, window):
        heads, num_keys = q.shape[1], k.shape[1]
        config = configs.select("forward", q.shape[2], q.element_size(), configs.kind_of(q.device))
        config = config.fit(rows.max_len, num_keys)
        out = zero_tail(q.new_empty(q.shape), rows.total)
        tiles = query_tiles(rows, config.own)
        if tiles.num and heads:
            workers = min(tiles.num, configs.num_workers(q.device, heads))
            _forward[(workers, heads)](
                q,
                k,
                v,
                out,
                rows.offsets,
                tiles.row,
                tiles.start,
                tiles.num,
                triton.cdiv(tiles.num, workers),
                num_keys,
                scale_before,
                scale_after,
                window if window is not None else 0,
                *steps(q, k, v),
                out.stride(0),
                BLOCK_M=config.own,
                BLOCK_N=config.other,
                **meta_of(q, config, activation, window),
            )
        ctx.save_for_backward(q, k, v)
        ctx.options = (rows, activation, scale_before, scale_after, window)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v = ctx.saved_tensors
        rows, activation, scale_before, scale_after, window = ctx.options
        heads, num_keys = q.shape[1], k.shape[1]
        d_out = lane_dense(d_out)
        config = configs.select("backward", q.shape[2], q.element_size(), configs.kind_of(q.device))
        config = config.fit(rows.max_len, num_keys)
        d_q = zero_tail(q.new_empty(q.shape), rows.total)
        tiles = query_tiles(rows, config.own)
        if tiles.num and heads:
            workers = min(tiles.num, configs.num_workers(q.device, heads))
            _backward_q[(workers, heads)](
                q,
                k,
                v,
                d_out,
                d_q,
                rows.offsets,
                tiles.row,
                tiles.start,
                tiles.num,
                triton.cdiv(tiles.num, workers),
                num_keys,
                scale_before,
                scale_after,
                window if window is not None else 0,
                *steps(q, k, v),
                *d_out.stride()[:2],
                d_q.stride(0),
                BLOCK_M=config.own,
                BLOCK_N=config.other,
                **meta_of(q, config, activation, window),
            )
        scales = (scale_before, scale_after)
        d_k, d_v = launch_backward_kv(q, k, v, d_out, rows, activation, scales, window, None)
        return d_q, d_k, d_v, None, None, None, None, None


def gdpa(
    q_NHD: Tensor,
    k_BKHD: Tensor,
    v_BKHD: Tensor,
    rows: Layout,
    activation: str,
    scale_before: float,
    scale_after: float,
    window: int | None,
) -> Tensor:
    """scale_after * act(scale_before * q k^T) v (see `kernels.gdpa.gdpa`)."""
    check_dtype(q_NHD)
    q, k, v = lane_dense(q_NHD), lane_dense(k_BKHD), lane_dense(v_BKHD)
    return _Gdpa.apply(q, k, v, rows, activation, float(scale_before), float(scale_after), window)
