"""Jagged rows padded in a few buckets of like length, for the CPU forms.

One padded batch costs its longest row for every row. Rows are split into at most four buckets, each twice as long as
the next, and rows without work are left out; one scatter fills all buckets and one gather empties them, so buckets cost
no extra copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels._jagged import Layout, pad_layout, unpad_layout

NUM_BUCKETS = 4
WORTH_IT = 0.7  # share of the plain padded area above which buckets save less than their own overhead


@dataclass(frozen=True)
class Bucket:
    """Rows of like length.

    Attributes:
        rows: rows of the batch, int64 [b].
        own: their layout on the side that is cut (queries).
        other: their layout on the side that is read (keys); equal to `own` where there is one side only.
    """

    rows: Tensor
    own: Layout
    other: Layout


class Side:
    """One side of all buckets: which packed entries they hold, and where these lie in the flat padded buffer."""

    def __init__(self, whole: Layout, rows: list[Tensor], parts: list[Layout]) -> None:
        """Lay the padded parts one after another."""
        self.parts = parts
        self.sizes = [part.num_rows * part.padded_len for part in parts]
        entries, index, base = [], [], 0
        for part, part_rows, size in zip(parts, rows, self.sizes, strict=True):
            entries.append(whole.offsets[part_rows][part.row] + part.position)
            index.append(base + part.padded_index)
            base += size
        self.entries, self.index = torch.cat(entries), torch.cat(index)

    def pad(self, x_N: Tensor) -> list[Tensor]:
        """Packed entries [N, ...] as one padded tensor [b, L, ...] per bucket."""
        flat: Tensor = _Spread.apply(x_N, self.entries, self.index, sum(self.sizes))  # type: ignore[no-untyped-call]
        return [
            x.view(part.num_rows, part.padded_len, *x_N.shape[1:])
            for x, part in zip(flat.split_with_sizes(self.sizes), self.parts, strict=True)
        ]

    def unpad(self, padded: list[Tensor], num_packed: int) -> Tensor:
        """The packed entries [num_packed, ...] of the buckets; zeros for entries that are in none."""
        flat = torch.cat([x.flatten(0, 1) for x in padded])
        out: Tensor = _Collect.apply(flat, self.entries, self.index, num_packed)  # type: ignore[no-untyped-call]
        return out


class Whole(Side):
    """A single bucket of all rows: the plain padded form, which needs no index where rows are equally long."""

    def __init__(self, whole: Layout) -> None:
        """Keep the layout."""
        self.whole = whole

    def pad(self, x_N: Tensor) -> list[Tensor]:
        """See `Side.pad`."""
        return [pad_layout(x_N, self.whole)]

    def unpad(self, padded: list[Tensor], num_packed: int) -> Tensor:
        """See `Side.unpad`."""
        return unpad_layout(padded[0], self.whole, num_packed)


@dataclass(frozen=True)
class Plan:
    """The buckets of a batch and both sides of them."""

    buckets: list[Bucket]
    own: Side
    other: Side
    num_rows: int

    @property
    def is_whole(self) -> bool:
        """Whether one bucket holds every row in order."""
        return isinstance(self.own, Whole)

    def rows_of(self, x_B: Tensor) -> list[Tensor]:
        """One [b, ...] per bucket of a tensor with one entry per row [B, ...]."""
        return [x_B] if self.is_whole else [x_B.index_select(0, bucket.rows) for bucket in self.buckets]

    def rows_to(self, parts: list[Tensor]) -> Tensor:
        """One entry per row [B, ...] of the buckets' [b, ...]; zeros for rows that are in none."""
        if self.is_whole:
            return parts[0]
        joined = torch.cat(parts)
        rows = torch.cat([bucket.rows for bucket in self.buckets])
        return joined.new_zeros((self.num_rows, *joined.shape[1:])).index_copy(0, rows, joined)


def plan_buckets(own: Layout, other: Layout | None = None) -> Plan:
    """Buckets for rows that cost own length times other length, or own length alone; remembered with the layout."""
    memo = own.memo.setdefault(other if other is not None else own, {})
    key = ("buckets", other is None)
    if key not in memo:
        memo[key] = _plan(own, other)
    plan: Plan = memo[key]
    return plan


def _plan(own: Layout, other: Layout | None) -> Plan:
    # Only the weak table may refer to `own` from its own memo: the plan keeps a shallow copy.
    own = own.copy()
    other_or_own = own if other is None else other.copy()
    whole = Plan([Bucket(torch.arange(own.num_rows), own, other_or_own)], Whole(own), Whole(other_or_own), own.num_rows)
    if own.is_uniform and other_or_own.is_uniform:  # also a single row, as in serving: nothing to gain, decided at once
        return whole
    working = own.lengths > 0 if other is None else (own.lengths > 0) & (other.lengths > 0)
    if not bool(working.any()):
        return whole
    size = torch.maximum(own.lengths, other_or_own.lengths)
    # Bucket c holds sizes in (largest / 2^(c+1), largest / 2^c]; the last one all smaller sizes too.
    largest = int(size[working].max())
    bucket_of_row = sum((size * 2**c <= largest).long() for c in range(1, NUM_BUCKETS))
    rows = [(working & (bucket_of_row == c)).nonzero()[:, 0] for c in range(NUM_BUCKETS)]
    rows = [r for r in rows if r.numel()]
    buckets = [Bucket(r, own.select(r), other_or_own.select(r)) for r in rows]

    def area(num_rows: int, x: Layout, y: Layout) -> int:
        return num_rows * x.max_len * (y.max_len if other is not None else 1)

    bucketed = sum(area(len(b.rows), b.own, b.other) for b in buckets)
    if bucketed > WORTH_IT * area(own.num_rows, own, other_or_own):
        return whole
    own_side = Side(own, rows, [b.own for b in buckets])
    other_side = own_side if other is None else Side(other_or_own, rows, [b.other for b in buckets])
    return Plan(buckets, own_side, other_side, own.num_rows)


class _Spread(torch.autograd.Function):
    """flat[index] = x[entries], zero elsewhere; no index occurs twice, so the adjoint is `_Collect`."""

    @staticmethod
    def forward(ctx, x_N: Tensor, entries: Tensor, index: Tensor, size: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.where, ctx.num_packed = (entries, index), x_N.shape[0]
        flat = x_N.new_zeros((size, *x_N.shape[1:]))
        flat[index] = x_N.index_select(0, entries)
        return flat

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        return _Collect.apply(grad, *ctx.where, ctx.num_packed), None, None, None  # type: ignore[no-untyped-call]


class _Collect(torch.autograd.Function):
    """out[entries] = flat[index], zero elsewhere: the adjoint of `_Spread`."""

    @staticmethod
    def forward(ctx, flat: Tensor, entries: Tensor, index: Tensor, num: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.where, ctx.size = (entries, index), flat.shape[0]
        out = flat.new_zeros((num, *flat.shape[1:]))
        out[entries] = flat.index_select(0, index)
        return out

    @staticmethod
    def backward(ctx, grad_N: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        return _Spread.apply(grad_N, *ctx.where, ctx.size), None, None, None  # type: ignore[no-untyped-call]
