"""Candidates grouped by request: the permutation that sorts them and the jagged layout of their queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels._jagged import Layout, Remembered


@dataclass(frozen=True)
class Groups:
    """Candidates in the order of their requests.

    Attributes:
        order: position in the caller's order of each grouped candidate, int64 [C]; None when they are sorted already.
        back: the inverse permutation, int64 [C], or None.
        queries: layout of the grouped queries, one jagged row per request.
    """

    order: Tensor | None
    back: Tensor | None
    queries: Layout

    def gather(self, x_C: Tensor) -> Tensor:
        """Bring [C, ...] from the caller's order to the grouped one."""
        return x_C if self.order is None else x_C[self.order]

    def scatter(self, x_C: Tensor) -> Tensor:
        """Bring [C, ...] from the grouped order back to the caller's."""
        return x_C if self.back is None else x_C[self.back]


_groups: Remembered[Groups] = Remembered()


def group_by_request(cand_to_request: Tensor, num_requests: int, num_queries: int) -> Groups:
    """Group candidates whose indices were checked; remembered per tensor and version, as every layer asks again.

    Args:
        cand_to_request: int64 [C], values in [0, num_requests).
        num_requests: B.
        num_queries: queries per candidate.
    """
    return _groups.get(
        cand_to_request,
        lambda: _group(cand_to_request, num_requests, num_queries),
        num_requests,
        num_queries,
    )


def _group(cand_to_request: Tensor, num_requests: int, num_queries: int) -> Groups:
    counts_B = torch.bincount(cand_to_request, minlength=num_requests) * num_queries
    offsets = torch.nn.functional.pad(counts_B.cumsum(0), (1, 0))
    largest = int(counts_B.max()) if num_requests else 0
    queries = Layout(offsets, cand_to_request.numel() * num_queries, largest)
    if cand_to_request.numel() < 2 or bool((cand_to_request.diff() >= 0).all()):
        return Groups(None, None, queries)
    order = torch.argsort(cand_to_request, stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return Groups(order, back, queries)
