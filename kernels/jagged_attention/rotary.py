"""Rotary temporal encoding (ROTE): angles from the position and from the logarithm of a time gap.

Source: Kunlun (arXiv 2602.10016, section 4.2). How positions and time gaps share the rotary pairs is not published;
here a configurable share of the pairs turns with log(1 + gap / scale) and the rest with the position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._checks import accumulate_dtype, check_device, check_floats, check_shape


def rotary(
    x_NHD: Tensor,
    position_N: Tensor,
    time_gap_ms_N: Tensor | None = None,
    *,
    time_share: float = 0.5,
    time_scale_ms: float = 3.6e6,
    base: float = 10000.0,
) -> Tensor:
    """Turn pairs of features by angles that grow with position and with the log of a time gap.

    Feature d is paired with feature d + D/2. The first pairs use the position, the last `time_share` of them use
    log(1 + gap / time_scale_ms); each group has its own geometric ladder of frequencies from 1 down to 1/base.

    Args:
        x_NHD: queries or keys [N, H, D], D even.
        position_N: positions [N], any integer or floating dtype.
        time_gap_ms_N: time gaps [N] in milliseconds, >= 0; None lets every pair use the position.
        time_share: share of pairs, 0..1, that turn with the time gap.
        time_scale_ms: gap at which the logarithm starts to bend, in milliseconds; one hour by default.
        base: ratio of the fastest to the slowest frequency of a ladder.

    Returns:
        [N, H, D] in the dtype of `x_NHD`.

    Raises:
        TypeError: `x_NHD` is not floating.
        ValueError: shapes, devices, odd D, or options out of range; a negative gap (read on the CPU only).
    """
    check_floats(x_NHD=x_NHD)
    check_shape("x_NHD", x_NHD, (None, None, None))
    num, width = x_NHD.shape[0], x_NHD.shape[-1]
    if width % 2:
        raise ValueError(f"x_NHD: expected an even head width D, found {width}")
    if not 0.0 <= time_share <= 1.0:
        raise ValueError(f"time_share: expected a share in [0, 1], found {time_share}")
    if time_scale_ms <= 0.0 or base <= 0.0:
        raise ValueError(f"time_scale_ms and base: expected values > 0, found {time_scale_ms} and {base}")
    check_shape("position_N", position_N, (num,))
    check_device("position_N", position_N, x_NHD)
    dtype = accumulate_dtype(x_NHD)
    num_pairs = width // 2
    num_time = round(time_share * num_pairs) if time_gap_ms_N is not None else 0
    angle_NP = position_N.to(dtype)[:, None] * _ladder(num_pairs - num_time, base, x_NHD.device, dtype)
    if time_gap_ms_N is not None:
        check_shape("time_gap_ms_N", time_gap_ms_N, (num,))
        check_device("time_gap_ms_N", time_gap_ms_N, x_NHD)
        if not time_gap_ms_N.is_cuda and num and bool((time_gap_ms_N < 0).any()):
            row = int((time_gap_ms_N < 0).nonzero()[0, 0])
            raise ValueError(f"time_gap_ms_N: row {row} expected a gap >= 0, found {time_gap_ms_N[row].item()}")
        # fp64 quotient: millisecond gaps of years do not fit the 24 bits of fp32.
        log_gap_N = torch.log1p(time_gap_ms_N.to(torch.float64) / time_scale_ms).to(dtype)
        time_NP = log_gap_N[:, None] * _ladder(num_time, base, x_NHD.device, dtype)
        angle_NP = torch.cat([angle_NP, time_NP], dim=1)
    if x_NHD.is_cuda:
        from kernels.jagged_attention import triton_rotary

        return triton_rotary.rotate(x_NHD, angle_NP)
    return rotate(x_NHD, angle_NP)


def rotate(x_NHD: Tensor, angle_NP: Tensor) -> Tensor:
    """Pairs (d, d + D/2) of every head turned by angles [N, D/2], in the dtype of the angles; the definition."""
    cos_N1P, sin_N1P = angle_NP.cos()[:, None], angle_NP.sin()[:, None]
    first_NHP, second_NHP = x_NHD.to(angle_NP.dtype).chunk(2, dim=-1)
    turned = [first_NHP * cos_N1P - second_NHP * sin_N1P, second_NHP * cos_N1P + first_NHP * sin_N1P]
    return torch.cat(turned, dim=-1).to(x_NHD.dtype)


def _ladder(num: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    steps = torch.arange(num, device=device, dtype=dtype) / max(num, 1)
    return torch.as_tensor(base, device=device, dtype=dtype) ** -steps
