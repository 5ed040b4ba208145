"""Matrix products of ragged groups of rows, each with its own weight, and small linears fused into one product.

Source: grouped GEMM and horizontal fusion as in adaptive ranking models (engineering post, 2026-03).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels._checks import check_device, check_floats, check_shape
from kernels._jagged import layout_of
from kernels.grouped_gemm import cpu

__all__ = ["fused_linears", "grouped_gemm"]


def grouped_gemm(x_NK: Tensor, w_GKO: Tensor, offsets: Tensor) -> Tensor:
    """x[rows of group g] w[g] for every group; groups may be empty.

    Args:
        x_NK: rows packed by group [N, K].
        w_GKO: one weight per group [G, K, O].
        offsets: int64 [G+1], rows of each group.

    Returns:
        [N, O]; zeros for rows past the last offset.

    Raises:
        TypeError: dtypes that are not floating or differ, offsets that are not int64.
        ValueError: shapes, devices or offsets that do not fit.
    """
    check_floats(x_NK=x_NK, w_GKO=w_GKO)
    check_shape("x_NK", x_NK, (None, None))
    check_device("offsets", offsets, x_NK)
    groups = layout_of(offsets, x_NK.shape[0])
    check_shape("w_GKO", w_GKO, (groups.num_rows, x_NK.shape[1], None))
    if x_NK.is_cuda:
        from kernels.grouped_gemm import triton

        return triton.grouped_gemm(x_NK, w_GKO, groups)
    # Groups are weights, few and large: a product per group wastes nothing, a padded batch would.
    return cpu.grouped_gemm(x_NK, w_GKO, groups)


def fused_linears(x_NK: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Several linear maps of one input as one matrix product: [x w for w in weights].

    Args:
        x_NK: input [..., K].
        weights: matrices [K, O_i].

    Returns:
        One [..., O_i] per weight, views of one result.

    Raises:
        TypeError: dtypes that are not floating or differ.
        ValueError: no weights, or shapes or devices that do not fit.
    """
    if not weights:
        raise ValueError("weights: expected at least one matrix, found none")
    for i, w_KO in enumerate(weights):
        check_floats(x_NK=x_NK, **{f"weights[{i}]": w_KO})
        check_shape(f"weights[{i}]", w_KO, (x_NK.shape[-1], None))
    joined = x_NK @ torch.cat(list(weights), dim=1)
    return list(joined.split_with_sizes([w.shape[1] for w in weights], dim=-1))
