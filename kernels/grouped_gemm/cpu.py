"""The grouped matrix product on the CPU: one product per group in the dtype of the inputs, whose GEMM sums in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._jagged import Layout


def grouped_gemm(x_NK: Tensor, w_GKO: Tensor, groups: Layout) -> Tensor:
    """x[rows of group g] w[g] (see `kernels.grouped_gemm.grouped_gemm`)."""
    pieces_GK = x_NK[: groups.total].split_with_sizes(groups.lengths.tolist())
    outs = [x @ w for x, w in zip(pieces_GK, w_GKO, strict=True)]
    if not outs:  # nothing to compute, but the result still depends on both inputs
        outs = [x_NK[:0] @ w_GKO.sum(0)]
    return torch.cat([*outs, x_NK.new_zeros((x_NK.shape[0] - groups.total, w_GKO.shape[2]))])
