"""The definition of generalised dot-product attention: one row at a time, fp32, the scores written out."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._checks import accumulate_dtype
from kernels._jagged import Layout
from kernels.gdpa.activations import ACTIVATIONS


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
    """scale_after * act(scale_before * q k^T) v row by row (see `kernels.gdpa.gdpa`)."""
    dtype = accumulate_dtype(q_NHD)
    act = ACTIVATIONS[activation]
    ends = rows.offsets.tolist()
    outs = []
    for b in range(rows.num_rows):
        q_LHD = q_NHD[ends[b] : ends[b + 1]].to(dtype)
        score_HLK = scale_before * torch.einsum("nhd,mhd->hnm", q_LHD, k_BKHD[b].to(dtype))
        if window is not None:
            i_L = torch.arange(q_LHD.shape[0], device=q_NHD.device)
            j_K = torch.arange(k_BKHD.shape[1], device=q_NHD.device)
            score_HLK = score_HLK.masked_fill((i_L[:, None] - j_K).abs() > window, 0.0)
        outs.append(scale_after * torch.einsum("hnm,mhd->nhd", act(score_HLK), v_BKHD[b].to(dtype)))
    tail = q_NHD.new_zeros((q_NHD.shape[0] - rows.total, *q_NHD.shape[1:]))
    return torch.cat([*(out.to(q_NHD.dtype) for out in outs), tail])


def gdpa_pffn(
    q_NHD: Tensor,
    k_BKHD: Tensor,
    v_BKHD: Tensor,
    rows: Layout,
    activation: str,
    scale_before: float,
    scale_after: float,
    window: int | None,
    eps: float,
) -> Tensor:
    """RMSNorm(gdpa(LN(q)) + LN(q)) + q (see `kernels.gdpa.gdpa_pffn`)."""
    dtype = accumulate_dtype(q_NHD)
    q = q_NHD[: rows.total].to(dtype)
    centred = q - q.mean((1, 2), keepdim=True)
    qhat = centred / (centred.square().mean((1, 2), keepdim=True) + eps).sqrt()
    k, v = k_BKHD.to(dtype), v_BKHD.to(dtype)
    a = gdpa(qhat, k, v, rows, activation, scale_before, scale_after, window) + qhat
    out = a / (a.square().mean((1, 2), keepdim=True) + eps).sqrt() + q
    tail = q_NHD.new_zeros((q_NHD.shape[0] - rows.total, *q_NHD.shape[1:]))
    return torch.cat([out.to(q_NHD.dtype), tail])
