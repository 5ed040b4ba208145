"""Jagged attention on the CPU: rows padded to one batch, so that one fused call replaces a loop over rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels._jagged import Layout, pad_layout, unpad_layout


def attention(
    q_NHD: Tensor,
    k_MHD: Tensor,
    v_MHD: Tensor,
    queries: Layout,
    keys: Layout,
    causal: bool,
    window: int | None,
    scale: float,
) -> Tensor:
    """Attention of each row's queries over the row's keys (see `kernels.jagged_attention.jagged_attention`)."""
    q_BHLD = pad_layout(q_NHD, queries).transpose(1, 2)
    k_BHLD = pad_layout(k_MHD, keys).transpose(1, 2)
    v_BHLD = pad_layout(v_MHD, keys).transpose(1, 2)
    has_key: Tensor | None = None
    if causal or window is not None:
        legal_B1QK = _legal(queries, keys, causal, window)[:, None]
        has_key = legal_B1QK.any(-1, keepdim=True)
        mask: Tensor | None = legal_B1QK | ~has_key
    else:
        mask = _key_mask(keys)
    out_BHLD = scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, attn_mask=mask, scale=scale)
    if has_key is not None:
        out_BHLD = out_BHLD * has_key
    return unpad_layout(out_BHLD.transpose(1, 2), queries, q_NHD.shape[0])


def attention_shared(q_SHD: Tensor, k_MHD: Tensor, v_MHD: Tensor, keys: Layout, scale: float) -> Tensor:
    """Attention of shared queries over each row's keys (see `kernels.jagged_attention.jagged_attention_shared`)."""
    q_BHSD = q_SHD.transpose(0, 1).expand(keys.num_rows, -1, -1, -1)
    k_BHLD = pad_layout(k_MHD, keys).transpose(1, 2)
    v_BHLD = pad_layout(v_MHD, keys).transpose(1, 2)
    out_BHSD = scaled_dot_product_attention(q_BHSD, k_BHLD, v_BHLD, attn_mask=_key_mask(keys), scale=scale)
    return out_BHSD.transpose(1, 2)


def _key_mask(keys: Layout) -> Tensor | None:
    """Which padded keys count, bool [B, 1, 1, L]; None when all do.

    An empty row keeps its first padded key: that key and its value are zeros, so the row's output is zero, and no
    softmax runs over an empty set.
    """
    if keys.is_uniform:
        return None
    first_L = torch.arange(keys.padded_len, device=keys.mask.device) == 0
    return (keys.mask | first_L)[:, None, None, :]


def _legal(queries: Layout, keys: Layout, causal: bool, window: int | None) -> Tensor:
    """Which padded query may read which padded key, bool [B, Lq, Lk]."""
    device = keys.mask.device
    shift_B11 = (keys.lengths - queries.lengths)[:, None, None]
    i_Q1 = torch.arange(queries.padded_len, device=device)[:, None]
    distance_BQK = i_Q1 + shift_B11 - torch.arange(keys.padded_len, device=device)
    legal_BQK = keys.mask[:, None, :].expand_as(distance_BQK)
    if causal:
        legal_BQK = legal_BQK & (distance_BQK >= 0)
    if window is not None:
        legal_BQK = legal_BQK & (distance_BQK.abs() <= window)
    return legal_BQK
