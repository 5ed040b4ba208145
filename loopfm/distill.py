"""Soft-label distillation with an auxiliary head (ExFM, arXiv 2502.17494).

L = h(y_s, y) + w · h(y_d, clip(α · y_FM)), the gradient of the second term into the backbone scaled by β. The teacher has a head of its
own, so that its bias never enters the head that serves.

Shapes: C examples, K objectives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class DistillConfig:
    """Amplifiers of the auxiliary loss: w (loss weight), α (label scale), β (gradient into the backbone)."""

    weight: float = 0.5
    label_scale: float = 1.0
    gradient_scale: float = 1.0


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return gradient * ctx.scale, None


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Identity whose gradient is multiplied by `scale`: what the auxiliary head sends into the backbone."""
    scaled: Tensor = _ScaleGradient.apply(x, scale)  # type: ignore[no-untyped-call]
    return scaled


def distillation_loss(
    serving: Tensor, auxiliary: Tensor, labels: Tensor, teacher: Tensor, has_teacher: Tensor, config: DistillConfig
) -> Tensor:
    """Mean loss over examples and objectives.

    Args:
        serving: logits of the serving head, [C, K].
        auxiliary: logits of the distillation head, [C, K], computed on `scale_gradient(hidden, config.gradient_scale)`.
        labels: [C, K].
        teacher: FM probabilities, [C, K]; anything where there is none.
        has_teacher: bool [C].
        config: amplifiers.
    """
    task = F.binary_cross_entropy_with_logits(serving, labels)
    if not bool(has_teacher.any()):
        return task
    target = (config.label_scale * teacher[has_teacher]).clamp(0.0, 1.0).detach()
    # Weighted by the share of examples with a teacher, so that a batch without many is not ruled by the few.
    share = has_teacher.float().mean()
    return task + config.weight * share * F.binary_cross_entropy_with_logits(auxiliary[has_teacher], target)
