"""Generalised dot-product attention on the CPU: rows padded to one batch, two batched matrix products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels._buckets import plan_buckets
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
    """scale_after * act(scale_before * q k^T) v over padded buckets (see `kernels.gdpa.gdpa`)."""
    # The scales go onto the short generated side, not onto the scores.
    k_BHDK = (k_BKHD * scale_before if scale_before != 1.0 else k_BKHD).permute(0, 2, 3, 1)
    v_BHKD = (v_BKHD * scale_after if scale_after != 1.0 else v_BKHD).transpose(1, 2)
    plan = plan_buckets(rows)
    outs = []
    for q_BLHD, k, v in zip(plan.own.pad(q_NHD), plan.rows_of(k_BHDK), plan.rows_of(v_BHKD), strict=True):
        score_BHLK = q_BLHD.transpose(1, 2) @ k
        if window is not None:
            i_L = torch.arange(score_BHLK.shape[2], device=q_NHD.device)
            j_K = torch.arange(score_BHLK.shape[3], device=q_NHD.device)
            score_BHLK = score_BHLK.masked_fill((i_L[:, None] - j_K).abs() > window, 0.0)
        outs.append((ACTIVATIONS[activation](score_BHLK) @ v).transpose(1, 2))
    return plan.own.unpad(outs, q_NHD.shape[0])


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
    q = q_NHD[: rows.total]
    features = q.shape[1:]
    qhat = functional.layer_norm(q, features, eps=eps)
    a = gdpa(qhat, k_BKHD, v_BKHD, rows, activation, scale_before, scale_after, window) + qhat
    out = functional.rms_norm(a, features, eps=eps) + q
    if rows.total == q_NHD.shape[0]:
        return out
    return torch.cat([out, out.new_zeros((q_NHD.shape[0] - rows.total, *features))])
