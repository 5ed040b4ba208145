"""The definition of jagged attention: one row at a time, fp32, the scores written out."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._checks import accumulate_dtype
from kernels._jagged import Layout


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
    dtype = accumulate_dtype(q_NHD)
    q_ends, k_ends = queries.offsets.tolist(), keys.offsets.tolist()
    rows = []
    for b in range(queries.num_rows):
        q_nHD = q_NHD[q_ends[b] : q_ends[b + 1]].to(dtype)
        k_mHD = k_MHD[k_ends[b] : k_ends[b + 1]].to(dtype)
        v_mHD = v_MHD[k_ends[b] : k_ends[b + 1]].to(dtype)
        rows.append(one_row(q_nHD, k_mHD, v_mHD, causal, window, scale))
    tail = q_NHD.new_zeros((q_NHD.shape[0] - queries.total, *q_NHD.shape[1:]))
    return torch.cat([*(row.to(q_NHD.dtype) for row in rows), tail])


def attention_shared(q_SHD: Tensor, k_MHD: Tensor, v_MHD: Tensor, keys: Layout, scale: float) -> Tensor:
    """Attention of shared queries over each row's keys (see `kernels.jagged_attention.jagged_attention_shared`)."""
    dtype = accumulate_dtype(q_SHD)
    ends = keys.offsets.tolist()
    rows = [
        one_row(q_SHD.to(dtype), k_MHD[s:e].to(dtype), v_MHD[s:e].to(dtype), False, None, scale).to(q_SHD.dtype)
        for s, e in zip(ends[:-1], ends[1:], strict=True)
    ]
    return torch.stack(rows) if rows else q_SHD.new_zeros((0, *q_SHD.shape))


def one_row(q_nHD: Tensor, k_mHD: Tensor, v_mHD: Tensor, causal: bool, window: int | None, scale: float) -> Tensor:
    """Attention of n queries over m keys; zeros where the mask leaves a query nothing to read."""
    n, m = q_nHD.shape[0], k_mHD.shape[0]
    distance_nm = (torch.arange(n) + (m - n))[:, None] - torch.arange(m)
    legal_nm = torch.ones(n, m, dtype=torch.bool)
    if causal:
        legal_nm &= distance_nm >= 0
    if window is not None:
        legal_nm &= distance_nm.abs() <= window
    legal_nm = legal_nm.to(q_nHD.device)
    score_Hnm = scale * torch.einsum("nhd,mhd->hnm", q_nHD, k_mHD)
    score_Hnm = score_Hnm.masked_fill(~legal_nm, float("-inf"))
    # A query with nothing to read has only -inf scores: softmax would give NaN, the definition says zero.
    score_Hnm = score_Hnm.masked_fill(~legal_nm.any(-1, keepdim=True), 0.0)
    weight_Hnm = torch.softmax(score_Hnm, dim=-1).masked_fill(~legal_nm, 0.0)
    return torch.einsum("hnm,mhd->nhd", weight_Hnm, v_mHD)
