"""Jagged attention on the CPU: rows padded to one batch, so that one fused call replaces a loop over rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kernels._buckets import Bucket, plan_buckets
from kernels._checks import accumulate_dtype
from kernels._jagged import Layout

KEY_LANES = 16
"""Keys of a row are filled up to a multiple of this: those beyond whole vectors are taken one by one, 11 in 4 times the time of 16."""


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
    plan = plan_buckets(queries, keys)
    padded = zip(plan.buckets, plan.own.pad(q_NHD), plan.other.pad(k_MHD), plan.other.pad(v_MHD), strict=True)
    outs = [_padded(*part, causal, window, scale) for part in padded]
    return plan.own.unpad(outs, q_NHD.shape[0])


def attention_shared(q_SHD: Tensor, k_MHD: Tensor, v_MHD: Tensor, keys: Layout, scale: float) -> Tensor:
    """Attention of shared queries over each row's keys (see `kernels.jagged_attention.jagged_attention_shared`)."""
    plan = plan_buckets(keys)
    outs = []
    for bucket, k_BLHD, v_BLHD in zip(plan.buckets, plan.own.pad(k_MHD), plan.own.pad(v_MHD), strict=True):
        q_BSHD = q_SHD.expand(bucket.own.num_rows, -1, -1, -1)
        outs.append(_fused(q_BSHD, k_BLHD, v_BLHD, _key_mask(bucket.own), scale))
    return plan.rows_to(outs)


def _padded(
    bucket: Bucket,
    q_BLHD: Tensor,
    k_BLHD: Tensor,
    v_BLHD: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
) -> Tensor:
    """Attention over one padded bucket [B, Lq, H, D]."""
    if not causal and window is None:
        return _fused(q_BLHD, k_BLHD, v_BLHD, _key_mask(bucket.other), scale)
    legal_B1QK = _legal(bucket.own, bucket.other, causal, window)[:, None]
    has_key_B1Q1 = legal_B1QK.any(-1, keepdim=True)
    # A query without a key reads all of them, so that its softmax is finite, and is zeroed after.
    out_BLHD = _fused(q_BLHD, k_BLHD, v_BLHD, legal_B1QK | ~has_key_B1Q1, scale)
    return out_BLHD * has_key_B1Q1.transpose(1, 2)


def _fused(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    num_keys = k_BLHD.shape[1]
    spare = -num_keys % KEY_LANES
    if spare:
        k_BLHD, v_BLHD = pad(k_BLHD, (0, 0, 0, 0, 0, spare)), pad(v_BLHD, (0, 0, 0, 0, 0, spare))
        filled = (torch.arange(num_keys + spare, device=k_BLHD.device) < num_keys)[None, None, None]
        mask = filled if mask is None else pad(mask, (0, spare))
    # PyTorch's CPU attention is several times slower in half precision than in fp32, and less exact.
    q_BHLD, k_BHLD, v_BHLD = (x.transpose(1, 2).to(accumulate_dtype(x)) for x in (q_BLHD, k_BLHD, v_BLHD))
    out_BHLD = scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, attn_mask=mask, scale=scale)
    return out_BHLD.transpose(1, 2).to(q_BLHD.dtype)


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
