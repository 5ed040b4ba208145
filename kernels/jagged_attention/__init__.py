"""Softmax attention inside jagged rows, with own or shared queries, and rotary temporal encoding.

Source: Jagged Flash Attention (arXiv 2409.15373); rotary temporal encoding as in Kunlun (arXiv 2602.10016, section
4.2).
"""

from __future__ import annotations

from torch import Tensor

from kernels._checks import check_device, check_floats, check_shape, check_window, default_scale
from kernels._jagged import layout_of
from kernels.jagged_attention import cpu
from kernels.jagged_attention.rotary import rotary

__all__ = ["jagged_attention", "jagged_attention_shared", "rotary"]


def jagged_attention(
    q_NHD: Tensor,
    k_MHD: Tensor,
    v_MHD: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention in which the queries of row b read the keys of row b.

    Query i of a row with n queries and m keys stands at position p = i + (m - n): queries are the row's last entries.
    With `causal` it reads the keys j <= p, with `window` those with |p - j| <= window.

    Args:
        q_NHD: packed queries [N, H, D].
        k_MHD: packed keys [M, H, D].
        v_MHD: packed values [M, H, D].
        q_offsets: int64 [B+1], rows of the queries.
        k_offsets: int64 [B+1], rows of the keys.
        causal: keys after the query's position are not read.
        window: largest distance read, in entries; None for any.
        scale: factor on q k^T, 1/sqrt(D) by default.

    Returns:
        [N, H, D]; zeros for a query without any key to read and for entries past the last offset.

    Raises:
        TypeError: dtypes that are not floating or differ, offsets that are not int64.
        ValueError: shapes, devices, offsets or window that do not fit.
    """
    check_floats(q_NHD=q_NHD, k_MHD=k_MHD, v_MHD=v_MHD)
    check_shape("q_NHD", q_NHD, (None, None, None))
    check_shape("k_MHD", k_MHD, (None, *q_NHD.shape[1:]))
    check_shape("v_MHD", v_MHD, tuple(k_MHD.shape))
    check_device("q_offsets", q_offsets, q_NHD)
    check_device("k_offsets", k_offsets, q_NHD)
    check_window(window)
    queries = layout_of(q_offsets, q_NHD.shape[0], name="q_offsets")
    keys = layout_of(k_offsets, k_MHD.shape[0], name="k_offsets")
    check_shape("k_offsets", k_offsets, tuple(q_offsets.shape))
    scale = default_scale(scale, q_NHD.shape[-1])
    if q_NHD.is_cuda:
        from kernels.jagged_attention import triton

        return triton.attention(q_NHD, k_MHD, v_MHD, queries, keys, causal, window, scale)
    return cpu.attention(q_NHD, k_MHD, v_MHD, queries, keys, causal, window, scale)


def jagged_attention_shared(
    q_SHD: Tensor, k_MHD: Tensor, v_MHD: Tensor, k_offsets: Tensor, *, scale: float | None = None
) -> Tensor:
    """Softmax attention of the same queries over the keys of every row, without a copy of the queries per row.

    Args:
        q_SHD: shared queries [S, H, D].
        k_MHD: packed keys [M, H, D].
        v_MHD: packed values [M, H, D].
        k_offsets: int64 [B+1], rows of the keys.
        scale: factor on q k^T, 1/sqrt(D) by default.

    Returns:
        [B, S, H, D]; zeros for an empty row.

    Raises:
        TypeError: dtypes that are not floating or differ, offsets that are not int64.
        ValueError: shapes, devices or offsets that do not fit.
    """
    check_floats(q_SHD=q_SHD, k_MHD=k_MHD, v_MHD=v_MHD)
    check_shape("q_SHD", q_SHD, (None, None, None))
    check_shape("k_MHD", k_MHD, (None, *q_SHD.shape[1:]))
    check_shape("v_MHD", v_MHD, tuple(k_MHD.shape))
    check_device("k_offsets", k_offsets, q_SHD)
    keys = layout_of(k_offsets, k_MHD.shape[0], name="k_offsets")
    scale = default_scale(scale, q_SHD.shape[-1])
    if q_SHD.is_cuda:
        from kernels.jagged_attention import triton

        return triton.attention_shared(q_SHD, k_MHD, v_MHD, keys, scale)
    return cpu.attention_shared(q_SHD, k_MHD, v_MHD, keys, scale)
