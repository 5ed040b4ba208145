"""The definition of block attention: a full softmax over each row under a block-diagonal mask, fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._checks import accumulate_dtype
from kernels._jagged import Layout


def attention(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, rows: Layout, block_size: int, scale: float) -> Tensor:
    """Attention of each entry over its own block (see `kernels.block_attention.block_attention`)."""
    dtype = accumulate_dtype(q_NHD)
    ends = rows.offsets.tolist()
    outs = []
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        q_LHD, k_LHD, v_LHD = (x[start:end].to(dtype) for x in (q_NHD, k_NHD, v_NHD))
        block_L = torch.arange(end - start, device=q_NHD.device) // block_size
        score_HLL = scale * torch.einsum("nhd,mhd->hnm", q_LHD, k_LHD)
        score_HLL = score_HLL.masked_fill(block_L[:, None] != block_L, float("-inf"))
        outs.append(torch.einsum("hnm,mhd->nhd", torch.softmax(score_HLL, dim=-1), v_LHD).to(q_NHD.dtype))
    return torch.cat([*outs, q_NHD.new_zeros((q_NHD.shape[0] - rows.total, *q_NHD.shape[1:]))])
