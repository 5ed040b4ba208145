"""Metrics of binary predictions: AUC, gAUC, normalised entropy and calibration.

Undefined is None, never a number: AUC of one class, gAUC without a user who has both, NE of a base rate of 0 or 1. Ties count half.

gAUC is only valid on predictions whose histories are frozen before the first scored label: with histories that go on, a user's own
past labels make the within-user comparison wrong (permuted labels give .16, not .5, on KuaiRand).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
MIN_PROBABILITY = 1e-7


def _ranks(values: FloatArray) -> NDArray[np.float64]:
    """Average ranks, from 1; ties share their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def auc(labels: FloatArray, scores: FloatArray) -> float | None:
    """Area under the ROC curve; None unless both classes occur."""
    positive = labels > 0.5
    num_positive = int(positive.sum())
    num_negative = len(labels) - num_positive
    if not num_positive or not num_negative:
        return None
    total = _ranks(scores)[positive].sum()
    return float((total - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def grouped_auc(labels: FloatArray, scores: FloatArray, groups: NDArray[np.integer[Any]]) -> float | None:
    """Mean AUC over groups weighted by their size; groups of one class are dropped (FuxiCTR's convention)."""
    if not len(groups):
        return None
    order = np.argsort(groups, kind="stable")
    labels, scores, groups = labels[order], scores[order], groups[order]
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
    total, weight = 0.0, 0
    for start, end in zip(starts, np.r_[starts[1:], len(groups)], strict=True):
        value = auc(labels[start:end], scores[start:end])
        if value is not None:
            total += value * int(end - start)
            weight += int(end - start)
    return total / weight if weight else None


def log_loss(labels: FloatArray, probabilities: FloatArray) -> float:
    """Mean log loss, nats."""
    p = np.clip(probabilities.astype(np.float64), MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    return float(-np.mean(np.where(labels > 0.5, np.log(p), np.log1p(-p))))


def normalised_entropy(labels: FloatArray, probabilities: FloatArray, base_rate: float) -> float | None:
    """Log loss over the log loss of always predicting `base_rate`, which is the training set's (InterFormer's convention)."""
    if not len(labels) or not 0 < base_rate < 1:
        return None
    return log_loss(labels, probabilities) / log_loss(labels, np.full(len(labels), base_rate))


@dataclass(frozen=True)
class Metrics:
    """Metrics of one objective. `calibration` is the sum of predictions over the sum of labels; `n` counts examples."""

    auc: float | None
    gauc: float | None
    ne: float | None
    calibration: float | None
    n: int
    positives: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def evaluate(
    labels: FloatArray,
    probabilities: FloatArray,
    base_rate: float,
    *,
    groups: NDArray[np.integer[Any]] | None = None,
    frozen_probabilities: FloatArray | None = None,
) -> Metrics:
    """All metrics of one objective.

    Args:
        labels: f[n].
        probabilities: f[n].
        base_rate: of the training set.
        groups: [n]; user of each example, for gAUC.
        frozen_probabilities: f[n]; predictions with frozen histories; gAUC is None without them.
    """
    positives = int((labels > 0.5).sum())
    gauc = None
    if groups is not None and frozen_probabilities is not None:
        gauc = grouped_auc(labels, frozen_probabilities, groups)
    return Metrics(
        auc=auc(labels, probabilities),
        gauc=gauc,
        ne=normalised_entropy(labels, probabilities, base_rate),
        calibration=float(probabilities.sum() / positives) if positives else None,
        n=len(labels),
        positives=positives,
    )
