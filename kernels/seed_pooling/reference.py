"""The definitions of seed pooling and of the sum of Kronecker products, fp32."""

from __future__ import annotations

from torch import Tensor

from kernels._checks import accumulate_dtype
from kernels._jagged import Layout
from kernels.jagged_attention.reference import attention_shared


def seed_pooling(seeds_SHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, keys: Layout, scale: float) -> Tensor:
    """Attention of shared seeds over each row (see `kernels.seed_pooling.seed_pooling`)."""
    return attention_shared(seeds_SHD, k_NHD, v_NHD, keys, scale)


def sum_kron(x_BSD: Tensor, z_PST: Tensor, w_PDE: Tensor) -> Tensor:
    """sum_p z_p^T x w_p, term by term (see `kernels.seed_pooling.sum_kron`)."""
    dtype = accumulate_dtype(x_BSD)
    out = x_BSD.new_zeros((x_BSD.shape[0], z_PST.shape[2], w_PDE.shape[2]), dtype=dtype)
    for z_ST, w_DE in zip(z_PST.to(dtype), w_PDE.to(dtype), strict=True):
        out = out + z_ST.T @ x_BSD.to(dtype) @ w_DE
    return out.to(x_BSD.dtype)
