"""The definition of the broadcast linear layer: the request row copied beside each candidate, one linear map, fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._checks import accumulate_dtype


def broadcast_linear(x_RK: Tensor, x_CJ: Tensor, w_KO: Tensor, w_JO: Tensor, cand_to_request: Tensor) -> Tensor:
    """[x_R[cand_to_request]; x_C] [w_R; w_C] (see `kernels.broadcast_linear.broadcast_linear`)."""
    dtype = accumulate_dtype(x_CJ)
    joined_CF = torch.cat([x_RK[cand_to_request], x_CJ], dim=1).to(dtype)
    return (joined_CF @ torch.cat([w_KO, w_JO]).to(dtype)).to(x_CJ.dtype)
