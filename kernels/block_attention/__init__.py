"""Softmax attention restricted to blocks of a row: cost linear in the row's length.

Source: Kunlun (arXiv 2602.10016) uses a sliding window; blocks that attend only to themselves are its published
successor.
"""

from __future__ import annotations

from torch import Tensor

from kernels._checks import check_device, check_floats, check_shape, default_scale
from kernels._jagged import layout_of
from kernels.jagged_attention import cpu

__all__ = ["block_attention"]


def block_attention(
    q_NHD: Tensor,
    k_NHD: Tensor,
    v_NHD: Tensor,
    offsets: Tensor,
    *,
    block_size: int = 64,
    scale: float | None = None,
) -> Tensor:
    """Block-diagonal softmax attention: entry i of a row reads the entries of its own block, i // block_size, only.

    Blocks restart at each row's start; the last block of a row may be shorter.

    Args:
        q_NHD: packed queries [N, H, D].
        k_NHD: packed keys [N, H, D].
        v_NHD: packed values [N, H, D].
        offsets: int64 [B+1].
        block_size: entries per block.
        scale: factor on q k^T, 1/sqrt(D) by default.

    Returns:
        [N, H, D]; zeros for entries past the last offset.

    Raises:
        TypeError: dtypes that are not floating or differ, offsets that are not int64.
        ValueError: shapes, devices, offsets or block size that do not fit.
    """
    check_floats(q_NHD=q_NHD, k_NHD=k_NHD, v_NHD=v_NHD)
    check_shape("q_NHD", q_NHD, (None, None, None))
    check_shape("k_NHD", k_NHD, tuple(q_NHD.shape))
    check_shape("v_NHD", v_NHD, tuple(q_NHD.shape))
    check_device("offsets", offsets, q_NHD)
    if block_size < 1:
        raise ValueError(f"block_size: expected at least 1, found {block_size}")
    blocks = layout_of(offsets, q_NHD.shape[0]).blocks(block_size)
    scale = default_scale(scale, q_NHD.shape[-1])
    if q_NHD.is_cuda:
        from kernels.block_attention import triton

        return triton.attention(q_NHD, k_NHD, v_NHD, blocks, block_size, scale)
    # A block is a jagged row of its own: the padded form of jagged attention is already linear in the row's length.
    return cpu.attention(q_NHD, k_NHD, v_NHD, blocks, blocks, False, None, scale)
