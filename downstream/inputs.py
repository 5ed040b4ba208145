"""What a ranker is fed: dense arrays from an encoded batch and resolved FM features, the same in training and in serving.

Shapes: B requests, N candidates per request, L history events per request (padded), K objectives, P - 1 = z and logits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streams.encode import RequestBatch
from streams.features import FmFeatures
from streams.levels import Level

NUM_LEVELS = len(Level)
FM_STATE = NUM_LEVELS + 2  # level one-hot, same surface, log age
MINUTE_MS = 60_000.0

# Inputs of the exported graph, request side first. An own ranker takes the same.
REQUEST_INPUTS = (
    "surface",  # i8[B]
    "hour",  # i8[B]
    "user_categories",  # i8[B, Fu]
    "user_dense",  # f4[B, Du]
    "event_ad",  # i8[B, L]; rows of the ad table, 0 = padding
    "event_facts",  # f4[B, L, E + S + 3]; actions, surface indicators, value, log gap
    "event_mask",  # f4[B, L]; 1 where there is an event
    "fm_user",  # f4[B, U]
)
CANDIDATE_INPUTS = (
    "ad",  # i8[B, N]
    "fm_pair",  # f4[B, N, P - 1]
    "fm_state",  # f4[B, N, FM_STATE]
)
Inputs = dict[str, NDArray[np.generic]]


def event_facts(batch: RequestBatch, num_surfaces: int) -> NDArray[np.float32]:
    """f4[T, E + S + 3]: what each event was, where and how long ago."""
    num_types = batch.event_actions.shape[1]
    facts = np.zeros((len(batch.event_ad), num_types + num_surfaces + 3), dtype=np.float32)
    facts[:, :num_types] = batch.event_actions
    facts[np.arange(len(facts)), num_types + batch.event_surface] = 1.0
    facts[:, -2] = batch.event_value
    facts[:, -1] = np.log1p(batch.event_gap_ms / MINUTE_MS) / 10
    return facts


def fm_state(features: FmFeatures) -> NDArray[np.float32]:
    """f4[m, FM_STATE]: level, whether the surface fits, age."""
    state = np.zeros((len(features.level), FM_STATE), dtype=np.float32)
    state[np.arange(len(state)), features.level] = 1.0
    state[:, -2] = features.same_surface
    state[:, -1] = np.log1p(np.maximum(features.age_ms, 0) / MINUTE_MS) / 10
    return state


def one_request(batch: RequestBatch, features: FmFeatures, num_surfaces: int) -> Inputs:
    """Inputs of a batch that holds one request: nothing to pad, B = 1."""
    return {
        "surface": batch.surface,
        "hour": batch.hour,
        "user_categories": batch.user_categories,
        "user_dense": batch.user_dense,
        "event_ad": batch.history_ad[batch.event_ad][None],
        "event_facts": event_facts(batch, num_surfaces)[None],
        "event_mask": np.ones((1, len(batch.event_ad)), dtype=np.float32),
        "fm_user": features.user,
        "ad": batch.ad[None],
        "fm_pair": features.pair[None],
        "fm_state": fm_state(features)[None],
    }


def many_requests(batch: RequestBatch, features: FmFeatures, num_surfaces: int) -> tuple[Inputs, NDArray[np.bool_]]:
    """Padded inputs of a batch, and the mask bool [B, N] of its candidates; `features` is aligned with the candidates."""
    num = len(batch.surface)
    lengths, counts = np.diff(batch.offsets), np.bincount(batch.request, minlength=num)
    events = _mask(lengths)
    candidates = _mask(counts)
    fm_user = np.zeros((num, features.user.shape[1]), dtype=np.float32)
    fm_user[batch.request] = features.user
    return {
        "surface": batch.surface,
        "hour": batch.hour,
        "user_categories": batch.user_categories,
        "user_dense": batch.user_dense,
        "event_ad": _spread(batch.history_ad[batch.event_ad], events),
        "event_facts": _spread(event_facts(batch, num_surfaces), events),
        "event_mask": events.astype(np.float32),
        "fm_user": fm_user,
        "ad": _spread(batch.ad, candidates),
        "fm_pair": _spread(features.pair, candidates),
        "fm_state": _spread(fm_state(features), candidates),
    }, candidates


def _mask(counts: NDArray[np.integer]) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = np.arange(max(int(counts.max(initial=0)), 1)) < counts[:, None]
    return mask


def _spread(packed: NDArray[np.generic], mask: NDArray[np.bool_]) -> NDArray[np.generic]:
    padded = np.zeros((*mask.shape, *packed.shape[1:]), dtype=packed.dtype)
    padded[mask] = packed
    return padded
