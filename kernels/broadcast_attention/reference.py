"""The definition of broadcast attention: one candidate at a time over its request's keys, fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._checks import accumulate_dtype
from kernels._jagged import Layout
from kernels.jagged_attention.reference import one_row


def attention(
    q_CQHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, keys: Layout, cand_to_request: Tensor, scale: float
) -> Tensor:
    """Attention of each candidate over its request (see `kernels.broadcast_attention.broadcast_attention`)."""
    dtype = accumulate_dtype(q_CQHD)
    ends = keys.offsets.tolist()
    outs = []
    for q_QHD, b in zip(q_CQHD, cand_to_request.tolist(), strict=True):
        k_LHD, v_LHD = (x[ends[b] : ends[b + 1]].to(dtype) for x in (k_NHD, v_NHD))
        outs.append(one_row(q_QHD.to(dtype), k_LHD, v_LHD, False, None, scale).to(q_CQHD.dtype))
    return torch.stack(outs) if outs else torch.zeros_like(q_CQHD)
