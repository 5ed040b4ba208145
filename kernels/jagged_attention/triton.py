"""Jagged attention for GPUs: online softmax forward; the backward recomputes the weights from the saved log-sum-exp.

Source: flash attention's recomputation (arXiv 2205.14135) on jagged rows (arXiv 2409.15373); queries and keys keep
their own offsets, so that self, cross, shared and candidate attention are one kernel. Programs are persistent and walk
the zigzag list of `kernels.schedule`.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, type-arg"

from __future__ import annotations

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
from kernels.schedule import attention_tiles

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _legal(i, j, n, m, shift, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Which of the queries i may read which of the keys j; i and j broadcast against each other."""
    legal = (i < n) & (j < m)
    if CAUSAL:
        legal = legal & (j <= i + shift)
    if WINDOWED:
        distance = i + shift - j
        legal = legal & (distance <= window) & (-distance <= window)
    return legal


@triton.jit
def _forward(
    q,
    k,
    v,
    out,
    lse,
    q_offsets,
    k_offsets,
    tile_row,
    tile_start,
    num_tiles,
    num_rounds,
    num_out,
    scale,
    window,
    q_step,
    q_head,
    k_step,
    k_head,
    v_step,
    v_head,
    out_step,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    worker, head, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    d = tl.arange(0, BLOCK_D)
    for round_index in range(num_rounds):
        slot = zigzag_slot(round_index, worker, workers)
        if slot < num_tiles:
            row = tl.load(tile_row + slot)
            start = tl.load(tile_start + slot)
            q_begin = tl.load(q_offsets + row)
            k_begin = tl.load(k_offsets + row)
            n = (tl.load(q_offsets + row + 1) - q_begin).to(tl.int32)
            m = (tl.load(k_offsets + row + 1) - k_begin).to(tl.int32)
            shift = m - n
            i = start + tl.arange(0, BLOCK_M)
            q_at = i.to(tl.int64) if SHARED else q_begin + i
            in_q = (i < n)[:, None] & (d < D)[None, :]
            q_tile = tl.load(q + q_at[:, None] * q_step + head * q_head + d[None, :], mask=in_q, other=0.0)

            first, last = 0, m
            if CAUSAL:
                last = tl.minimum(last, start + BLOCK_M + shift)
            if WINDOWED:
                first = tl.maximum(first, start + shift - window)
                last = tl.minimum(last, start + BLOCK_M + shift + window)
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for j0 in range(first, last, BLOCK_N):
                j = j0 + tl.arange(0, BLOCK_N)
                in_k = (j < m)[:, None] & (d < D)[None, :]
                k_at = (k_begin + j)[:, None]
                k_tile = tl.load(k + k_at * k_step + head * k_head + d[None, :], mask=in_k, other=0.0)
                v_tile = tl.load(v + k_at * v_step + head * v_head + d[None, :], mask=in_k, other=0.0)
                score = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
                legal = _legal(i[:, None], j[None, :], n, m, shift, window, CAUSAL, WINDOWED)
                score = tl.where(legal, score, float("-inf"))
                new_top = tl.maximum(top, tl.max(score, 1))
                # Before the first legal key the maximum is -inf: measure from 0 there, so that no inf - inf arises.
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                weight = tl.exp2(score - base[:, None])
                fade = tl.exp2(top - base)
                total = total * fade + tl.sum(weight, 1)
                acc = acc * fade[:, None] + tl.dot(weight.to(v_tile.dtype), v_tile, input_precision=PRECISION)
                top = new_top
            read = total > 0.0
            total = tl.where(read, total, 1.0)
            acc = acc / total[:, None]
            at = (q_begin + i)[:, None] * out_step + head * D + d[None, :]
            tl.store(out + at, acc.to(out.dtype.element_ty), mask=in_q)
            # Any finite value does for a query that read nothing: its scores are all -inf in the backward.
            tl.store(
                lse + head.to(tl.int64) * num_out + q_begin + i,
                tl.where(read, top + tl.log2(total), 0.0),
                mask=i < n,
            )


@triton.jit
def _backward_q(
    q,
    k,
    v,
    out,
    lse,
    d_out,
    d_q,
    delta,
    q_offsets,
    k_offsets,
    tile_row,
    tile_start,
    num_tiles,
    num_rounds,
    num_out,
    scale,
    window,
    q_step,
    q_head,
    k_step,
    k_head,
    v_step,
    v_head,
    out_step,
    g_step,
    g_head,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the queries; also leaves delta = sum(out * d_out) for the kernel of keys and values."""
    worker, head, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    d = tl.arange(0, BLOCK_D)
    for round_index in range(num_rounds):
        slot = zigzag_slot(round_index, worker, workers)
        if slot < num_tiles:
            row = tl.load(tile_row + slot)
            start = tl.load(tile_start + slot)
            q_begin = tl.load(q_offsets + row)
            k_begin = tl.load(k_offsets + row)
            n = (tl.load(q_offsets + row + 1) - q_begin).to(tl.int32)
            m = (tl.load(k_offsets + row + 1) - k_begin).to(tl.int32)
            shift = m - n
            i = start + tl.arange(0, BLOCK_M)
            at = q_begin + i
            q_at = i.to(tl.int64) if SHARED else at
            in_q = (i < n)[:, None] & (d < D)[None, :]
            q_tile = tl.load(q + q_at[:, None] * q_step + head * q_head + d[None, :], mask=in_q, other=0.0)
            out_tile = tl.load(out + at[:, None] * out_step + head * D + d[None, :], mask=in_q, other=0.0)
            g_tile = tl.load(d_out + at[:, None] * g_step + head * g_head + d[None, :], mask=in_q, other=0.0)
            lse_tile = tl.load(lse + head.to(tl.int64) * num_out + at, mask=i < n, other=0.0)
            delta_tile = tl.sum(out_tile.to(tl.float32) * g_tile.to(tl.float32), 1)
            tl.store(delta + head.to(tl.int64) * num_out + at, delta_tile, mask=i < n)

            first, last = 0, m
            if CAUSAL:
                last = tl.minimum(last, start + BLOCK_M + shift)
            if WINDOWED:
                first = tl.maximum(first, start + shift - window)
                last = tl.minimum(last, start + BLOCK_M + shift + window)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for j0 in range(first, last, BLOCK_N):
                j = j0 + tl.arange(0, BLOCK_N)
                in_k = (j < m)[:, None] & (d < D)[None, :]
                k_at = (k_begin + j)[:, None]
                k_tile = tl.load(k + k_at * k_step + head * k_head + d[None, :], mask=in_k, other=0.0)
                v_tile = tl.load(v + k_at * v_step + head * v_head + d[None, :], mask=in_k, other=0.0)
                score = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * (scale * LOG2E)
                legal = _legal(i[:, None], j[None, :], n, m, shift, window, CAUSAL, WINDOWED)
                weight = tl.exp2(tl.where(legal, score, float("-inf")) - lse_tile[:, None])
                d_weight = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
                d_score = weight * (d_weight - delta_tile[:, None])
                acc += tl.dot(d_score.to(k_tile.dtype), k_tile, input_precision=PRECISION)
            tl.store(
                d_q + at[:, None] * out_step + head * D + d[None, :],
                (acc * scale).to(d_q.dtype.element_ty),
                mask=in_q,
            )


@triton.jit
def _backward_kv(
    q,
    k,
    v,
    lse,
    d_out,
    delta,
    d_k,
    d_v,
    q_offsets,
    k_offsets,
    tile_row,
    tile_start,
    num_tiles,
    num_rounds,
    num_out,
    scale,
    window,
    q_step,
    q_head,
    k_step,
    k_head,
    v_step,
    v_head,
    kv_step,
    g_step,
    g_head,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of keys and values: a tile of keys reads the queries, everything transposed."""
    worker, head, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    d = tl.arange(0, BLOCK_D)
    for round_index in range(num_rounds):
        slot = zigzag_slot(round_index, worker, workers)
        if slot < num_tiles:
            row = tl.load(tile_row + slot)
            start = tl.load(tile_start + slot)
            q_begin = tl.load(q_offsets + row)
            k_begin = tl.load(k_offsets + row)
            n = (tl.load(q_offsets + row + 1) - q_begin).to(tl.int32)
            m = (tl.load(k_offsets + row + 1) - k_begin).to(tl.int32)
            shift = m - n
            j = start + tl.arange(0, BLOCK_N)
            in_k = (j < m)[:, None] & (d < D)[None, :]
            k_at = (k_begin + j)[:, None]
            k_tile = tl.load(k + k_at * k_step + head * k_head + d[None, :], mask=in_k, other=0.0)
            v_tile = tl.load(v + k_at * v_step + head * v_head + d[None, :], mask=in_k, other=0.0)

            first, last = 0, n
            if CAUSAL:
                first = tl.maximum(first, start - shift)
            if WINDOWED:
                first = tl.maximum(first, start - shift - window)
                last = tl.minimum(last, start + BLOCK_N - shift + window)
            k_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            v_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            for i0 in range(first, last, BLOCK_M):
                i = i0 + tl.arange(0, BLOCK_M)
                at = q_begin + i
                q_at = i.to(tl.int64) if SHARED else at
                in_q = (i < n)[:, None] & (d < D)[None, :]
                q_tile = tl.load(q + q_at[:, None] * q_step + head * q_head + d[None, :], mask=in_q, other=0.0)
                g_tile = tl.load(d_out + at[:, None] * g_step + head * g_head + d[None, :], mask=in_q, other=0.0)
                lse_tile = tl.load(lse + head.to(tl.int64) * num_out + at, mask=i < n, other=0.0)
                delta_tile = tl.load(delta + head.to(tl.int64) * num_out + at, mask=i < n, other=0.0)
                score = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * (scale * LOG2E)
                legal = _legal(i[None, :], j[:, None], n, m, shift, window, CAUSAL, WINDOWED)
                weight = tl.exp2(tl.where(legal, score, float("-inf")) - lse_tile[None, :])
                v_acc += tl.dot(weight.to(g_tile.dtype), g_tile, input_precision=PRECISION)
                d_weight = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
                d_score = weight * (d_weight - delta_tile[None, :])
                k_acc += tl.dot(d_score.to(q_tile.dtype), q_tile, input_precision=PRECISION)
            at_kv = k_at * kv_step + head * D + d[None, :]
            tl.store(d_k + at_kv, (k_acc * scale).to(d_k.dtype.element_ty), mask=in_k)
            tl.store(d_v + at_kv, v_acc.to(d_v.dtype.element_ty), mask=in_k)


class _Attention(torch.autograd.Function):
    """Forward and backward launches; saves q, k, v, the output and the log-sum-exp."""

    @staticmethod
    def forward(ctx, q, k, v, queries, keys, causal, window, scale, shared):
        num_out, heads, width = queries.total if shared else q.shape[0], q.shape[1], q.shape[2]
        config = configs.select("forward", width, q.element_size(), configs.kind_of(q.device))
        config = config.fit(queries.max_len, keys.max_len)
        tiles = attention_tiles(queries, keys, config.own, config.other, causal=causal, window=window)
        out = zero_tail(q.new_empty((num_out, heads, width)), queries.total)
        lse = q.new_empty((heads, num_out), dtype=torch.float32)
        if tiles.num and heads:
            workers = min(tiles.num, configs.num_workers(q.device, heads))
            _forward[(workers, heads)](
                q,
                k,
                v,
                out,
                lse,
                queries.offsets,
                keys.offsets,
                tiles.row,
                tiles.start,
                tiles.num,
                triton.cdiv(tiles.num, workers),
                num_out,
                scale * LOG2E.value,
                window if window is not None else 0,
                *_steps(q, k, v),
                out.stride(0),
                D=width,
                BLOCK_D=tile_width(width),
                BLOCK_M=config.own,
                BLOCK_N=config.other,
                CAUSAL=causal,
                WINDOWED=window is not None,
                SHARED=shared,
                PRECISION=dot_precision(q.dtype),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layouts, ctx.options = (queries, keys), (causal, window, scale, shared)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        queries, keys = ctx.layouts
        causal, window, scale, shared = ctx.options
        num_out, heads, width = out.shape
        d_out = lane_dense(d_out)
        recorded = configs.select("backward", width, q.element_size(), configs.kind_of(q.device))
        # Shared queries get one gradient per row, summed below: deterministic, unlike atomic additions.
        d_q = zero_tail(torch.empty_like(out, dtype=torch.float32 if shared else None), queries.total)
        d_k = zero_tail(k.new_empty(k.shape), keys.total)
        d_v = zero_tail(v.new_empty(v.shape), keys.total)
        delta = torch.empty_like(lse)
        meta = {
            "D": width,
            "BLOCK_D": tile_width(width),
            "CAUSAL": causal,
            "WINDOWED": window is not None,
            "SHARED": shared,
            "PRECISION": dot_precision(q.dtype),
            "num_warps": recorded.num_warps,
            "num_stages": recorded.num_stages,
        }
        layouts = (queries.offsets, keys.offsets)
        numbers = (num_out, scale, window if window is not None else 0)
        config = recorded.fit(queries.max_len, keys.max_len)
        tiles = attention_tiles(queries, keys, config.own, config.other, causal=causal, window=window)
        if tiles.num and heads:
            workers = min(tiles.num, configs.num_workers(q.device, heads))
            _backward_q[(workers, heads)](
                q,
                k,
                v,
                out,
                lse,
                d_out,
                d_q,
                delta,
                *layouts,
                tiles.row,
                tiles.start,
                tiles.num,
                triton.cdiv(tiles.num, workers),
                *numbers,
                *_steps(q, k, v),
                out.stride(0),
                d_out.stride(0),
                d_out.stride(1),
                BLOCK_M=config.own,
                BLOCK_N=config.other,
                **meta,
            )
        config = recorded.fit(keys.max_len, queries.max_len)
        tiles = attention_tiles(keys, queries, config.own, config.other, causal=causal, window=window, own_is_keys=True)
        if tiles.num and heads:
            workers = min(tiles.num, configs.num_workers(q.device, heads))
            _backward_kv[(workers, heads)](
                q,
                k,
                v,
                lse,
                d_out,
                delta,
                d_k,
                d_v,
                *layouts,
                tiles.row,
                tiles.start,
                tiles.num,
                triton.cdiv(tiles.num, workers),
                *numbers,
                *_steps(q, k, v),
                d_k.stride(0),
                d_out.stride(0),
                d_out.stride(1),
                BLOCK_M=config.other,
                BLOCK_N=config.own,
                **meta,
            )
        if shared:
            d_q = d_q.view(queries.num_rows, *q.shape).sum(0).to(q.dtype)
        return d_q, d_k, d_v, None, None, None, None, None, None


def _steps(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])


def attention(
    q_NHD: Tensor,
    k_MHD: Tensor,
    v_MHD: Tensor,
    queries: Layout,
    keys: Layout,
    causal: bool,
    window: int | None,
    scale: float,
) -> Tensor:
    """Attention of each row's queries over the row's keys (see `kernels.jagged_attention.jagged_attention`)."""
    check_dtype(q_NHD)
    q, k, v = lane_dense(q_NHD), lane_dense(k_MHD), lane_dense(v_MHD)
    return _Attention.apply(q, k, v, queries, keys, causal, window, scale, False)


def attention_shared(q_SHD: Tensor, k_MHD: Tensor, v_MHD: Tensor, keys: Layout, scale: float) -> Tensor:
    """Attention of shared queries over each row's keys (see `kernels.jagged_attention.jagged_attention_shared`)."""
    check_dtype(q_SHD)
    q, k, v = lane_dense(q_SHD), lane_dense(k_MHD), lane_dense(v_MHD)
    num, rows = q.shape[0], keys.num_rows
    offsets = torch.arange(rows + 1, device=q.device) * num
    out = _Attention.apply(q, k, v, Layout(offsets, num * rows, num), keys, False, None, scale, True)
    return out.view(rows, *q_SHD.shape)
