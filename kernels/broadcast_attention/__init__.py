"""Attention of candidates over their request's keys, broadcast inside the operator.

Source: in-kernel broadcast optimisation of request/candidate models (PyTorch engineering post, 2026-05); see also ROCS
(arXiv 2607.27744).
"""

from __future__ import annotations

from torch import Tensor

from kernels._checks import check_device, check_floats, check_index, check_shape, default_scale
from kernels._jagged import layout_of
from kernels.broadcast_attention.grouping import group_by_request
from kernels.jagged_attention import cpu

__all__ = ["broadcast_attention"]


def broadcast_attention(
    q_CQHD: Tensor,
    k_NHD: Tensor,
    v_NHD: Tensor,
    offsets: Tensor,
    cand_to_request: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """Full softmax attention in which the queries of candidate c read the keys of row `cand_to_request[c]`.

    Keys and values are never copied per candidate: the queries of a request's candidates are grouped into one jagged
    row, so that one pass over the keys serves them all. Sorted `cand_to_request` saves a reordering of the queries.

    Args:
        q_CQHD: queries [C, Q, H, D], Q per candidate.
        k_NHD: packed keys of the requests [N, H, D].
        v_NHD: packed values of the requests [N, H, D].
        offsets: int64 [B+1], rows of the requests.
        cand_to_request: int64 [C], values in [0, B).
        scale: factor on q k^T, 1/sqrt(D) by default.

    Returns:
        [C, Q, H, D]; zeros where the request's row is empty.

    Raises:
        TypeError: dtypes that are not floating or differ, offsets or indices that are not int64.
        ValueError: shapes, devices, offsets or indices that do not fit.
    """
    check_floats(q_CQHD=q_CQHD, k_NHD=k_NHD, v_NHD=v_NHD)
    check_shape("q_CQHD", q_CQHD, (None, None, None, None))
    check_shape("k_NHD", k_NHD, (None, *q_CQHD.shape[2:]))
    check_shape("v_NHD", v_NHD, tuple(k_NHD.shape))
    check_device("offsets", offsets, q_CQHD)
    check_device("cand_to_request", cand_to_request, q_CQHD)
    keys = layout_of(offsets, k_NHD.shape[0])
    check_index("cand_to_request", cand_to_request, q_CQHD.shape[0], keys.num_rows)
    scale = default_scale(scale, q_CQHD.shape[-1])
    num_queries = q_CQHD.shape[1]
    groups = group_by_request(cand_to_request, keys.num_rows, num_queries)
    q_NHD = groups.gather(q_CQHD).flatten(0, 1)
    if q_CQHD.is_cuda:
        from kernels.jagged_attention import triton

        out_NHD = triton.attention(q_NHD, k_NHD, v_NHD, groups.queries, keys, False, None, scale)
    else:
        out_NHD = cpu.attention(q_NHD, k_NHD, v_NHD, groups.queries, keys, False, None, scale)
    return groups.scatter(out_NHD.view(q_CQHD.shape))
