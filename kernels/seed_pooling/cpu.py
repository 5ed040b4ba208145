"""The sum of Kronecker products as two matrix products, in the cheaper order."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_kron(x_BSD: Tensor, z_PST: Tensor, w_PDE: Tensor) -> Tensor:
    """sum_p z_p^T x w_p (see `kernels.seed_pooling.sum_kron`); the sum over p rides on the second product."""
    num_p, num_s, num_t = z_PST.shape
    num_b, _, num_d = x_BSD.shape
    num_e = w_PDE.shape[2]
    tokens_first = num_t * num_d * (num_s + num_e)
    features_first = num_s * num_e * (num_d + num_t)
    if tokens_first <= features_first:
        mix_TPS = z_PST.permute(2, 0, 1).reshape(num_t * num_p, num_s)
        mixed_BTF = torch.matmul(mix_TPS, x_BSD).view(num_b, num_t, num_p * num_d)
        return mixed_BTF @ w_PDE.reshape(num_p * num_d, num_e)
    wide_DF = w_PDE.permute(1, 0, 2).reshape(num_d, num_p * num_e)
    mixed_BFE = (x_BSD @ wide_DF).view(num_b, num_s * num_p, num_e)
    return z_PST.permute(2, 1, 0).reshape(num_t, num_s * num_p) @ mixed_BFE
