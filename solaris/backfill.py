"""What the store would have held: the embeddings that past requests would have been served with, had Solaris run then.

A ranker must learn from features as served, with their levels, ages and zeros. Before the first deployment no served log exists; this
replays the worker's rules (`solaris.worker`) over the log of events and requests, and computes only the rows that a shown ad would
have read. A test holds it equal to a real replay through the store.

Shapes: R requests, N candidates of a request, C shown ads, S states (moments at which a user's rows are computed).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gem.examples import RequestLog
from loopfm.represent import Representer, aggregate_sample
from streams.features import FmFeatures, resolve

NONE = -1
STATE_BATCH = 512


@dataclass(frozen=True)
class ServedStates:
    """Which state each shown ad's pair row, and each request's user row, would have come from.

    Attributes:
        users: u8[S]. state_ms: i8[S]; newest event that the state knows. surfaces: i8[S].
        slate: i8[S]; request whose candidates were the user's slate then, -1 where he had none.
        pair_state: i8[C]; state of the row of each shown ad, -1 where there is none.
        user_state: i8[C]; state of the user row, -1 where there is none.
    """

    users: NDArray[np.uint64]
    state_ms: NDArray[np.int64]
    surfaces: NDArray[np.int64]
    slate: NDArray[np.int64]
    pair_state: NDArray[np.int64]
    user_state: NDArray[np.int64]


def part_of(
    states: ServedStates, log: RequestLog, requests: NDArray[np.int64], part: NDArray[np.int64]
) -> ServedStates:
    """The states of some of the requests: `part` is a run of `requests`."""
    if not len(part):
        return replace(states, pair_state=states.pair_state[:0], user_state=states.user_state[:0])
    _, local = log.candidate_indices(requests)
    first, last = np.searchsorted(requests, [part[0], part[-1]])
    low, high = np.searchsorted(local, [first, last + 1])
    return replace(states, pair_state=states.pair_state[low:high], user_state=states.user_state[low:high])


@dataclass
class _User:
    """Rows of one user: slate ads, pair rows (ad -> (state_ms, state)), newest state."""

    slate: list[int] = field(default_factory=list)
    slate_request: int = NONE
    surface: int = 0
    pairs: dict[int, tuple[int, int]] = field(default_factory=dict)
    newest: int = NONE
    newest_ms: int = NONE


def served_states(
    log: RequestLog,
    requests: NDArray[np.int64],
    slates: NDArray[np.uint64],
    max_rows: int,
    *,
    frozen_ms: int | None = None,
) -> ServedStates:
    """Replays the worker's rules over requests.

    Args:
        log: with the events of all users.
        requests: i8[R], in order of time; Solaris runs from the first of them on.
        slates: u8[R, N]; candidates of each request, all of which become the user's slate.
        max_rows: pair rows that the store keeps of a user.
        frozen_ms: from this moment on requests only read: no event triggers, no slate changes (for per-user metrics).
    """
    at, local = log.candidate_indices(requests)
    pair_state = np.full(len(at), NONE, dtype=np.int64)
    user_state = np.full(len(at), NONE, dtype=np.int64)
    shown_from = np.searchsorted(local, np.arange(len(requests) + 1))
    states: list[tuple[int, int, int, int]] = []
    users: dict[int, _User] = {}
    for time_ms, is_event, position in timeline(log, requests):
        index = int(local[position]) if is_event else position
        user_id = int(log.users[requests[index]])
        user = users.setdefault(user_id, _User())
        if not is_event:
            for c in range(shown_from[index], shown_from[index + 1]):
                row = user.pairs.get(int(log.ads[at[c]]))
                if row is not None and row[0] < time_ms:
                    pair_state[c] = row[1]
                if user.newest_ms < time_ms:
                    user_state[c] = user.newest
            if frozen_ms is not None and time_ms >= frozen_ms:
                continue
            user.slate, user.slate_request = slates[index].tolist(), index
            user.surface = int(log.surfaces[requests[index]])
        elif user.newest_ms < time_ms and (frozen_ms is None or time_ms < frozen_ms):
            # An event is a trigger: the user's rows are computed anew, knowing it.
            state = len(states)
            states.append((user_id, time_ms, user.surface, user.slate_request))
            user.newest, user.newest_ms = state, time_ms
            user.pairs.update(dict.fromkeys(user.slate, (time_ms, state)))
            if len(user.pairs) > max_rows:
                kept = sorted(user.pairs, key=lambda ad: (user.pairs[ad][0], ad))[-max_rows:]
                user.pairs = {ad: user.pairs[ad] for ad in kept}
    columns = np.array(states, dtype=object).reshape(-1, 4)
    return ServedStates(
        users=columns[:, 0].astype(np.uint64),
        state_ms=columns[:, 1].astype(np.int64),
        surfaces=columns[:, 2].astype(np.int64),
        slate=columns[:, 3].astype(np.int64),
        pair_state=pair_state,
        user_state=user_state,
    )


def timeline(log: RequestLog, requests: NDArray[np.int64]) -> Iterator[tuple[int, bool, int]]:
    """Requests and their impressions in the order in which a worker sees them, a request before its own impressions.

    Yields:
        (time in ms, whether it is an impression, index into `requests` or into their shown ads).
    """
    at, _ = log.candidate_indices(requests)
    times = np.concatenate([log.times_ms[requests], log.event_times_ms[at]])
    is_event = np.concatenate([np.zeros(len(requests), bool), np.ones(len(at), bool)])
    index = np.concatenate([np.arange(len(requests)), np.arange(len(at))])
    for i in np.lexsort((is_event, times)):
        yield int(times[i]), bool(is_event[i]), int(index[i])


def served_features(
    log: RequestLog,
    requests: NDArray[np.int64],
    slates: NDArray[np.uint64],
    states: ServedStates,
    representer: Representer,
) -> FmFeatures:
    """Computes the rows that shown ads would have read, and resolves them as serving does; `user` is f4[C, U].

    Args:
        log: as given to `served_states`. requests: i8[R]; those of `states`.
        slates: of all requests that were given to `served_states`.
        states: its result, or the part of it (`part_of`) that belongs to these requests.
        representer: the FM whose rows these are.
    """
    layout = representer.layout
    at, local = log.candidate_indices(requests)
    ads, times = log.ads[at], log.times_ms[requests][local]
    pair = np.zeros((len(at), layout.pair_dim), dtype=np.float32)
    user = np.zeros((len(at), layout.user_row_dim), dtype=np.float32)
    needed = np.unique(np.concatenate([states.pair_state, states.user_state]))
    needed = needed[needed >= 0]
    for start in range(0, len(needed), STATE_BATCH):
        part = needed[start : start + STATE_BATCH]
        readers = np.flatnonzero((states.pair_state >= part[0]) & (states.pair_state <= part[-1]))
        of_user = np.flatnonzero((states.user_state >= part[0]) & (states.user_state <= part[-1]))
        samples = [_sample(slates, slate) for slate in states.slate[part]]
        counts = np.array([len(sample) for sample in samples])
        # Each state's candidates: the sample that stands for the user, then the ads that are read.
        asked = np.concatenate([*samples, ads[readers]])
        owner = np.concatenate(
            [np.repeat(np.arange(len(part)), counts), np.searchsorted(part, states.pair_state[readers])]
        )
        users, pairs = compute_states(representer, log, states, part, asked, owner)
        num_samples = int(counts.sum())
        offsets = np.concatenate([[0], np.cumsum(counts)])
        rows = representer.user_rows(users, pairs[:num_samples], offsets, asked[:num_samples])
        pair[readers] = pairs[num_samples:]
        user[of_user] = rows[np.searchsorted(part, states.user_state[of_user])]
    # The store keeps f16.
    pair, user = pair.astype(np.float16).astype(np.float32), user.astype(np.float16).astype(np.float32)
    pair_age = np.where(states.pair_state >= 0, times - states.state_ms[states.pair_state], NONE)
    user_age = np.where(states.user_state >= 0, times - states.state_ms[states.user_state], NONE)
    return resolve(pair, pair_age, user, user_age, log.surfaces[requests][local], layout)


def compute_states(
    representer: Representer,
    log: RequestLog,
    states: ServedStates,
    part: NDArray[np.int64],
    ads: NDArray[np.uint64],
    owner: NDArray[np.int64],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(user embeddings f4[s, U], pair vectors f4[c, P]) of some states for ads u8[c], whose states are part[owner]."""
    order = np.argsort(owner, kind="stable")
    history, offsets = log.log.histories(states.users[part], states.state_ms[part] + 1, representer.engine.history)
    users, found = representer.at_states(
        states.users[part], states.state_ms[part], states.surfaces[part], history, offsets, ads[order], owner[order]
    )
    pairs = np.empty_like(found)
    pairs[order] = found
    return users, pairs


def _sample(slates: NDArray[np.uint64], slate: int) -> NDArray[np.uint64]:
    return slates[slate][aggregate_sample(slates[slate])] if slate >= 0 else slates[:0].reshape(-1)
