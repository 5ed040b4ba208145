"""The definition of the grouped matrix product: one product per group, fp32 sums."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._checks import accumulate_dtype
from kernels._jagged import Layout


def grouped_gemm(x_NK: Tensor, w_GKO: Tensor, groups: Layout) -> Tensor:
    """x[rows of group g] w[g] (see `kernels.grouped_gemm.grouped_gemm`)."""
    dtype = accumulate_dtype(x_NK)
    pieces_GK = x_NK[: groups.total].split_with_sizes(groups.lengths.tolist())
    outs = [(x.to(dtype) @ w.to(dtype)).to(x_NK.dtype) for x, w in zip(pieces_GK, w_GKO, strict=True)]
    return torch.cat([*outs, x_NK.new_zeros((x_NK.shape[0] - groups.total, w_GKO.shape[2]))])
