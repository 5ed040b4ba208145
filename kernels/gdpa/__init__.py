"""Generalised dot-product attention: attention whose softmax is replaced by an element-wise activation.

Two weight matrices generated per example with an activation between them are attention from events (queries) to
generated keys and values: a personalised feed-forward network. Source: Kunlun (arXiv 2602.10016, section 4.3.1);
InterFormer (arXiv 2411.09852) for the personalised network; the norm layout of `gdpa_pffn` from the PyTorch post on
free normalisation (2026-07).
"""

from __future__ import annotations

from torch import Tensor

from kernels._checks import check_device, check_floats, check_shape, check_window
from kernels._jagged import Layout, layout_of
from kernels.gdpa import cpu
from kernels.gdpa.activations import ACTIVATIONS, check_activation

__all__ = ["ACTIVATIONS", "gdpa", "gdpa_pffn"]


def gdpa(
    q_NHD: Tensor,
    k_BKHD: Tensor,
    v_BKHD: Tensor,
    offsets: Tensor,
    *,
    activation: str = "gelu",
    scale_before: float = 1.0,
    scale_after: float = 1.0,
    window: int | None = None,
) -> Tensor:
    """scale_after * act(scale_before * q k^T) v, with jagged queries and K dense keys per row.

    Args:
        q_NHD: packed queries [N, H, D].
        k_BKHD: keys [B, K, H, D].
        v_BKHD: values [B, K, H, D].
        offsets: int64 [B+1], rows of the queries.
        activation: one of `ACTIVATIONS`; `fast_gelu` is meant for |score| <= 1.
        scale_before: factor on the score before the activation (1/tau in the paper).
        scale_after: factor after the activation (the convention of HSTU).
        window: query i reads the keys j with |i - j| <= window only; None for all.

    Returns:
        [N, H, D]; zeros for entries past the last offset.

    Raises:
        TypeError: dtypes that are not floating or differ, offsets that are not int64.
        ValueError: shapes, devices, offsets, window or activation that do not fit.
    """
    rows = _check(q_NHD, k_BKHD, v_BKHD, offsets, activation, window)
    if q_NHD.is_cuda:
        from kernels.gdpa import triton

        return triton.gdpa(q_NHD, k_BKHD, v_BKHD, rows, activation, scale_before, scale_after, window)
    return cpu.gdpa(q_NHD, k_BKHD, v_BKHD, rows, activation, scale_before, scale_after, window)


def gdpa_pffn(
    q_NHD: Tensor,
    k_BKHD: Tensor,
    v_BKHD: Tensor,
    offsets: Tensor,
    *,
    activation: str = "gelu",
    scale_before: float = 1.0,
    scale_after: float = 1.0,
    window: int | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The personalised feed-forward block around `gdpa`, with both of its norms and residuals.

    With qhat = LayerNorm(q) and a = gdpa(qhat, k, v) + qhat, the result is RMSNorm(a) + q. Both norms run over all H *
    D features of an entry and have no weights.

    Args:
        q_NHD: packed queries [N, H, D].
        k_BKHD: keys [B, K, H, D].
        v_BKHD: values [B, K, H, D].
        offsets: int64 [B+1], rows of the queries.
        activation: one of `ACTIVATIONS`; `fast_gelu` is meant for |score| <= 1.
        scale_before: factor on the score before the activation.
        scale_after: factor after the activation.
        window: query i reads the keys j with |i - j| <= window only; None for all.
        eps: added to the variance and to the mean square.

    Returns:
        [N, H, D]; zeros for entries past the last offset.

    Raises:
        TypeError: dtypes that are not floating or differ, offsets that are not int64.
        ValueError: shapes, devices, offsets, window, activation or eps that do not fit.
    """
    rows = _check(q_NHD, k_BKHD, v_BKHD, offsets, activation, window)
    if eps <= 0.0:
        raise ValueError(f"eps: expected a value > 0, found {eps}")
    if q_NHD.is_cuda:
        from kernels.gdpa import triton_pffn

        return triton_pffn.gdpa_pffn(q_NHD, k_BKHD, v_BKHD, rows, activation, scale_before, scale_after, window, eps)
    return cpu.gdpa_pffn(q_NHD, k_BKHD, v_BKHD, rows, activation, scale_before, scale_after, window, eps)


def _check(
    q_NHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor, offsets: Tensor, activation: str, window: int | None
) -> Layout:
    check_floats(q_NHD=q_NHD, k_BKHD=k_BKHD, v_BKHD=v_BKHD)
    check_shape("q_NHD", q_NHD, (None, None, None))
    check_device("offsets", offsets, q_NHD)
    check_window(window)
    check_activation(activation)
    rows = layout_of(offsets, q_NHD.shape[0])
    check_shape("k_BKHD", k_BKHD, (rows.num_rows, None, *q_NHD.shape[1:]))
    check_shape("v_BKHD", v_BKHD, tuple(k_BKHD.shape))
    return rows
