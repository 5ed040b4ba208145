from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from gem.metrics import auc, evaluate, grouped_auc, normalised_entropy

examples = st.lists(st.tuples(st.booleans(), st.integers(0, 6)), min_size=2, max_size=60)


@given(examples)
def test_auc_equals_scikit_learn_ties_included(pairs: list[tuple[bool, int]]) -> None:
    labels, scores = np.array([p[0] for p in pairs], float), np.array([p[1] for p in pairs], float)
    found = auc(labels, scores)
    if len(set(labels.tolist())) < 2:
        assert found is None
    else:
        assert found == pytest.approx(roc_auc_score(labels, scores))


def test_a_constant_predictor_scores_one_half_in_any_order() -> None:
    labels = np.array([1, 1, 0, 0, 0.0])
    assert auc(labels, np.ones(5)) == auc(labels[::-1], np.ones(5)) == 0.5


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 3)), min_size=2, max_size=60))
def test_grouped_auc_is_the_weighted_mean_of_groups(rows: list[tuple[bool, int, int]]) -> None:
    labels, scores = np.array([r[0] for r in rows], float), np.array([r[1] for r in rows], float)
    groups = np.array([r[2] for r in rows])
    total = weight = 0.0
    for group in set(groups.tolist()):
        mine = groups == group
        if len(set(labels[mine].tolist())) == 2:
            total += roc_auc_score(labels[mine], scores[mine]) * mine.sum()
            weight += mine.sum()
    found = grouped_auc(labels, scores, groups)
    assert found is None if not weight else found == pytest.approx(total / weight)


def test_normalised_entropy_is_one_for_the_base_rate_and_follows_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(500) < 0.3).astype(float)
    p = np.clip(rng.random(500), 0.01, 0.99)
    assert normalised_entropy(labels, np.full(500, 0.25), 0.25) == pytest.approx(1.0)
    expected = sklearn_log_loss(labels, p) / sklearn_log_loss(labels, np.full(500, 0.25))
    assert normalised_entropy(labels, p, 0.25) == pytest.approx(expected)


def test_undefined_is_none_with_counts() -> None:
    found = evaluate(np.zeros(4), np.full(4, 0.2), 0.3, groups=np.arange(4), frozen_probabilities=np.full(4, 0.2))
    assert (found.auc, found.gauc, found.calibration, found.n, found.positives) == (None, None, None, 4, 0)
    empty = evaluate(np.zeros(0), np.zeros(0), 0.3, groups=np.zeros(0, int), frozen_probabilities=np.zeros(0))
    assert (empty.auc, empty.gauc, empty.ne, empty.n) == (None, None, None, 0)
    assert evaluate(np.ones(2), np.ones(2), 0.3, groups=np.arange(2)).gauc is None, "no frozen predictions, no gAUC"
