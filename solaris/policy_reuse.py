"""The baseline that most would build first: a logistic regression on whether a pair is asked for again within the TTL."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from solaris.policy_value import PairFeatures, chunks
from solaris.trace import Trace

NUM_SAMPLES = 200_000


def reuse_probability(
    trace: Trace,
    ttl_ms: int,
    pair_features: PairFeatures,
    uses: NDArray[np.int16],
    fits_ms: list[int],
    *,
    seed: int = 0,
) -> NDArray[np.float32]:
    """P(the pair is asked for again within the TTL), by a model fitted on what is known at each of `fits_ms`. f4[R, N].

    Args:
        trace: the requests. ttl_ms: of the rows. pair_features: of the requests.
        uses: i2[R, N]; asks of each pair within the TTL; read only where it has passed by the time of the fit.
        fits_ms: rising; each fit serves until the next; zeros before the first.
        seed: of the sample.
    """
    result = np.zeros(trace.candidates.shape, dtype=np.float32)
    rng = np.random.default_rng(seed)
    for fit_ms, end_ms in zip(fits_ms, [*fits_ms[1:], int(trace.times_ms[-1]) + 1], strict=True):
        known = int(np.searchsorted(trace.times_ms, fit_ms - ttl_ms))
        serve = np.arange(*np.searchsorted(trace.times_ms, [fit_ms, end_ms]))
        num = min(known, max(1, NUM_SAMPLES // trace.num_candidates))
        sample = np.sort(rng.choice(known, num, replace=False)) if known else np.zeros(0, dtype=np.int64)
        label = uses[sample].ravel() > 0
        if not label.any() or label.all():
            result[serve] = label.mean() if len(label) else 0.0
            continue
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200))
        model.fit(_table(pair_features, sample), label)
        for part in chunks(serve):
            result[part] = model.predict_proba(_table(pair_features, part))[:, 1].reshape(len(part), -1)
    return result


def _table(pair_features: PairFeatures, requests: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.log1p(np.nan_to_num(pair_features.simple(requests), nan=400.0))
