"""Which tile of a jagged operator runs where: valid tiles only, heaviest first, dealt zigzag to the workers.

Jagged rows differ in length by orders of magnitude. Dealing the tiles in order of falling work, and turning round after
each round, gives every worker one tile of each weight class: its load exceeds the mean by at most one tile (see
`worker_of`).
Source: the zigzag assignment of the generalised dot-product attention kernel (PyTorch engineering post, 2026-03).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels._jagged import Layout


@dataclass(frozen=True)
class Tiles:
    """Tiles of a jagged layout in the order of their work, heaviest first.

    Attributes:
        row: row of each tile, int32 [T].
        start: its first entry, counted from the row's start, int32 [T].
        work: tiles of the other side that it reads, int64 [T].
    """

    row: Tensor
    start: Tensor
    work: Tensor

    @property
    def num(self) -> int:
        """Number of tiles."""
        return self.row.numel()


def slot_of(round_index: int, worker: int, num_workers: int) -> int:
    """The place in the sorted list that a worker takes in a round: forward in even rounds, backward in odd ones."""
    return round_index * num_workers + (worker if round_index % 2 == 0 else num_workers - 1 - worker)


def worker_of(num_tiles: int, num_workers: int) -> Tensor:
    """The worker of each tile of a sorted list, int64 [num_tiles].

    With work that never rises along the list, two workers' loads differ by at most the first tile's work.
    """
    slots = torch.arange(num_tiles)
    rounds, place = slots // num_workers, slots % num_workers
    return torch.where(rounds % 2 == 0, place, num_workers - 1 - place)


def loads(work: Tensor, num_workers: int) -> Tensor:
    """Summed work per worker, int64 [num_workers], of tiles whose work is sorted to fall."""
    return torch.zeros(num_workers, dtype=torch.int64).index_add(0, worker_of(work.numel(), num_workers), work.cpu())


def attention_tiles(
    own: Layout,
    other: Layout,
    own_size: int,
    other_size: int,
    *,
    causal: bool = False,
    window: int | None = None,
    own_is_keys: bool = False,
) -> Tiles:
    """Tiles over one side of a jagged attention, weighed by the tiles of the other side that each reads.

    Args:
        own: layout that is cut into tiles of `own_size` entries.
        other: layout that each tile reads in steps of `other_size` entries.
        own_size: entries per tile.
        other_size: entries per step.
        causal: query i of n reads the keys j <= i + (m - n) of m.
        window: largest distance read; None for any.
        own_is_keys: the tiles are keys reading queries (the backward pass of keys and values).
    """
    # A layout may meet itself: the weak table then maps it to itself without keeping it alive.
    memo = own.memo.setdefault(other, {})
    key = ("tiles", own_size, other_size, causal, window, own_is_keys)
    if key not in memo:
        pieces = own.blocks(own_size)
        row, start = pieces.parent_row, pieces.parent_start
        reads = other.lengths[row]
        if causal and own_is_keys:  # key `start` is read by the queries from start - (m - n) on
            reads = torch.minimum(reads, (own.lengths[row] - start).clamp(min=0))
        elif causal:  # the last query of the tile stands that far before the row's last key
            reads = (reads - (own.lengths[row] - start - own_size).clamp(min=0)).clamp(min=0)
        if window is not None:
            reads = reads.clamp(max=own_size + 2 * window)
        memo[key] = sort_tiles(row, start, (reads + other_size - 1) // other_size)
    tiles: Tiles = memo[key]
    return tiles


def sort_tiles(row: Tensor, start: Tensor, work: Tensor) -> Tiles:
    """Tiles in the order of falling work; equal work keeps the order given."""
    order = torch.argsort(work, descending=True, stable=True)
    return Tiles(row[order].to(torch.int32), start[order].to(torch.int32), work[order])
