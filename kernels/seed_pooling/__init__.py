"""Hierarchical seed pooling: seeds read a jagged sequence, then Kronecker products mix them into few tokens.

Source: Kunlun (arXiv 2602.10016, section 4.3.2).
"""

from __future__ import annotations

from torch import Tensor

from kernels._checks import check_device, check_floats, check_shape, default_scale
from kernels._jagged import layout_of
from kernels.jagged_attention import cpu as attention_cpu
from kernels.seed_pooling import cpu

__all__ = ["seed_pooling", "sum_kron"]


def seed_pooling(
    seeds_SHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, offsets: Tensor, *, scale: float | None = None
) -> Tensor:
    """Pool each row into S vectors: softmax attention of shared seeds over the row's entries.

    Args:
        seeds_SHD: seed queries [S, H, D], the same for every row and never copied per row.
        k_NHD: packed keys [N, H, D].
        v_NHD: packed values [N, H, D].
        offsets: int64 [B+1].
        scale: factor on q k^T, 1/sqrt(D) by default.

    Returns:
        [B, S, H, D]; zeros for an empty row.

    Raises:
        TypeError: dtypes that are not floating or differ, offsets that are not int64.
        ValueError: shapes, devices or offsets that do not fit.
    """
    check_floats(seeds_SHD=seeds_SHD, k_NHD=k_NHD, v_NHD=v_NHD)
    check_shape("seeds_SHD", seeds_SHD, (None, None, None))
    check_shape("k_NHD", k_NHD, (None, *seeds_SHD.shape[1:]))
    check_shape("v_NHD", v_NHD, tuple(k_NHD.shape))
    check_device("offsets", offsets, seeds_SHD)
    keys = layout_of(offsets, k_NHD.shape[0])
    scale = default_scale(scale, seeds_SHD.shape[-1])
    if seeds_SHD.is_cuda:
        from kernels.jagged_attention import triton

        return triton.attention_shared(seeds_SHD, k_NHD, v_NHD, keys, scale)
    return attention_cpu.attention_shared(seeds_SHD, k_NHD, v_NHD, keys, scale)


def sum_kron(x_BSD: Tensor, z_PST: Tensor, w_PDE: Tensor) -> Tensor:
    """Linear map of a token matrix through a sum of Kronecker products: sum_p z_p^T x w_p.

    Equal to a dense map of the flattened tokens with P (S T + D E) instead of S D T E parameters.

    Args:
        x_BSD: tokens [B, S, D].
        z_PST: token mixers [P, S, T].
        w_PDE: feature mixers [P, D, E].

    Returns:
        [B, T, E].

    Raises:
        TypeError: dtypes that are not floating or differ.
        ValueError: shapes or devices that do not fit.
    """
    check_floats(x_BSD=x_BSD, z_PST=z_PST, w_PDE=w_PDE)
    check_shape("x_BSD", x_BSD, (None, None, None))
    check_shape("z_PST", z_PST, (None, x_BSD.shape[1], None))
    check_shape("w_PDE", w_PDE, (z_PST.shape[0], x_BSD.shape[2], None))
    # Two plain matrix products on every device: the vendor's GEMM is the kernel.
    return cpu.sum_kron(x_BSD, z_PST, w_PDE)
