"""Which ads will a user be shown next? A softmax over all ads, learned hour by hour, so that pairs beyond the last slate can be proposed.

Score of an ad = its bias + weights of the surface x log popularity of the ad (on the surface and on all, four half-lives, its age and how
often it was shown before the trace) + (mean vector of what the user was shown + vector of the surface) . vector of the ad + a bias of its
rank in the user's last slate + a bias if he was shown it before. Popularity is a snapshot at the start of the hour; the model scores an
hour before it learns from it; of the user it knows the requests before. So nothing is learned or read from what is still to come.

Shapes: R requests of the trace, b requests of one hour, S surfaces, A ads, N candidates, K ads kept, F features of an ad, D dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from solaris.trace import HOUR_MS, NONE, Trace

DIM = 32
HALF_LIVES_HOURS = (1.0, 4.0, 16.0, 64.0)
NUM_FEATURES = 2 * len(HALF_LIVES_HOURS) + 2
HISTORY = 50  # newest ads of a user whose vectors are averaged
EPOCHS = 3  # over the hours before the first forecast
REPLAYS, REPLAY_HOURS = 2, 72  # after each hour that many older ones of the last days are learned again
LAST_RATE = 0.3  # of the learning rates, from the last epoch on
SAME_SURFACE, SAME_WEIGHT = 0.77, 4.0  # prior of staying on a surface, and its weight in requests


@dataclass(frozen=True)
class Foreseen:
    """Forecasts after each request from `first` on.

    Attributes:
        first: index of the first request.
        ads: i2[r, K]; likeliest ads of the user's next request, best first.
        chances: f4[r, K]; chance that the next request shows the ad.
        shown: i8[c]; index of each shown ad of these requests into the trace's shown ads.
        ranks: i8[c]; rank of each shown ad among all ads at the request that showed it, from what was known before it.
    """

    first: int
    ads: NDArray[np.int16]
    chances: NDArray[np.float32]
    shown: NDArray[np.int64]
    ranks: NDArray[np.int64]


def foresee(trace: Trace, start_ms: int, num: int, *, epochs: int = EPOCHS, seed: int = 0) -> Foreseen:
    """Forecasts the next shown ads after every request from `start_ms` on.

    Args:
        trace: the requests.
        start_ms: before it the model only learns.
        num: K, at most A.
        epochs: over the hours before `start_ms`.
        seed: of the model.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    users, model = _Users(trace), _Model(trace)
    hours = (trace.times_ms - trace.times_ms[0] // HOUR_MS * HOUR_MS) // HOUR_MS
    cuts = np.searchsorted(hours, np.arange(int(hours[-1]) + 2))
    popularity = _Popularity(trace, hours)
    first = int(np.searchsorted(trace.times_ms, start_ms))
    early = int(hours[first]) if first < len(hours) else len(cuts) - 1
    learner = _Learner(trace, model, users, popularity, cuts)
    for epoch in range(epochs):
        if epoch == epochs - 1:
            learner.slow_down()
        for hour in rng.permutation(early) if epoch < epochs - 1 else range(early):
            learner.learn(int(hour))
    first = int(cuts[early])
    ads = np.empty((len(trace) - first, num), dtype=np.int16)
    chances = np.empty(ads.shape, dtype=np.float32)
    shown, ranks = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for hour in range(early, len(cuts) - 1):
        requests = np.arange(cuts[hour], cuts[hour + 1])
        if not len(requests):
            continue
        with torch.no_grad():
            at, rank = learner.ranks(hour)
            best = learner.next_chances(requests, hour).topk(num, dim=1)
        shown.append(at)
        ranks.append(rank)
        ads[requests - first], chances[requests - first] = best.indices.numpy(), best.values.numpy()
        learner.learn(hour)
        for older in rng.integers(max(0, hour - REPLAY_HOURS), hour + 1, REPLAYS).tolist():
            learner.learn(older)
    return Foreseen(first, ads, chances, np.concatenate(shown), np.concatenate(ranks))


class _Users:
    """What each user was shown, in order of time, those before the trace included."""

    def __init__(self, trace: Trace) -> None:
        ads = trace.candidates[trace.shown_request, trace.shown_position]
        users = trace.users[trace.shown_request]
        num_users = int(trace.users.max(initial=NONE)) + 1
        before = trace.histories if len(trace.histories) else np.zeros((num_users, 0), dtype=np.int16)
        owner, place = np.nonzero(before != NONE)
        owner, old = np.concatenate([owner, users]), np.concatenate([before[owner, place], ads])
        moment = np.concatenate([np.full(len(place), NONE), trace.shown_request])
        order = np.lexsort((moment, owner))
        self.ads = old[order].astype(np.int64)
        owner, moment = owner[order], moment[order]
        self.start = np.searchsorted(owner, np.arange(num_users))[trace.users]
        key = owner.astype(np.int64) * (len(trace) + 2) + moment + 1
        mine = trace.users.astype(np.int64) * (len(trace) + 2) + np.arange(len(trace)) + 1
        # of request r the user's entries are [start, before[r]) when it is asked and [start, after[r]) when it was answered
        self.before, self.after = np.searchsorted(key, mine), np.searchsorted(key, mine, side="right")

    def seen(self, requests: NDArray[np.int64], *, answered: bool, limit: int | None = None) -> tuple[Tensor, Tensor]:
        """(owner i8[n] in [0, b), ad i8[n]) of all that the users of the requests i8[b] were shown, or of the newest `limit`."""
        end = (self.after if answered else self.before)[requests]
        start = self.start[requests] if limit is None else np.maximum(self.start[requests], end - limit)
        counts = end - start
        owner = np.repeat(np.arange(len(requests)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        return torch.from_numpy(owner), torch.from_numpy(self.ads[start[owner] + within])


class _Popularity:
    """Popularity of ads at the start of each hour, under each half-life; in half precision, since all hours are kept."""

    def __init__(self, trace: Trace, hours: NDArray[np.int64]) -> None:
        num_hours, num_surfaces = int(hours[-1]) + 1, int(trace.surfaces.max()) + 1
        width = len(HALF_LIVES_HOURS)
        self._own = np.empty((num_hours, width, num_surfaces, trace.num_ads), dtype=np.float16)
        counts = np.zeros((width, num_surfaces, trace.num_ads), dtype=np.float32)
        decay = (0.5 ** (1 / np.array(HALF_LIVES_HOURS, dtype=np.float32)))[:, None, None]
        # 4 / half-life: a constant pace reads alike under all half-lives
        self._scale = (4 / np.array(HALF_LIVES_HOURS, dtype=np.float32))[:, None, None]
        order = np.argsort(trace.shown_request, kind="stable")
        request = trace.shown_request[order]
        ads = trace.candidates[request, trace.shown_position[order]]
        cuts = np.searchsorted(hours[request], np.arange(num_hours + 1))
        for hour in range(num_hours):
            self._own[hour] = counts
            part = slice(cuts[hour], cuts[hour + 1])
            for one in counts:
                np.add.at(one, (trace.surfaces[request[part]], ads[part]), 1.0)
            counts *= decay
        old = trace.histories[trace.histories != NONE]
        ages = trace.ad_ages if len(trace.ad_ages) else np.zeros(trace.num_ads, dtype=np.float32)
        fixed = [np.log1p(np.bincount(old, minlength=trace.num_ads)), np.nan_to_num(ages / 10).clip(0, 6)]
        self._fixed = np.stack(fixed).astype(np.float32)

    def at(self, hour: int, surfaces: NDArray[np.int64]) -> Tensor:
        """f4[s, F, A] of some surfaces i8[s]."""
        counts = self._own[hour].astype(np.float32)
        every = np.log(counts.sum(axis=1, keepdims=True) * self._scale + 0.1)
        own = np.log(counts[:, surfaces] * self._scale + 0.1)
        parts = [own.swapaxes(0, 1), np.broadcast_to(every.swapaxes(0, 1), (len(surfaces), *every[:, 0].shape))]
        fixed = np.broadcast_to(self._fixed, (len(surfaces), *self._fixed.shape))
        return torch.from_numpy(np.concatenate([*parts, fixed], axis=1))


class _Model(nn.Module):
    """The parameters."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        num_surfaces = int(trace.surfaces.max()) + 1
        self.history = nn.EmbeddingBag(trace.num_ads, DIM, mode="mean")
        self.surface = nn.Embedding(num_surfaces, DIM)
        self.ads = nn.Parameter(torch.randn(trace.num_ads, DIM) * 0.05)
        self.bias = nn.Parameter(torch.zeros(trace.num_ads))
        self.common = nn.Parameter(torch.full((NUM_FEATURES,), 0.2))
        self.own = nn.Parameter(torch.zeros(num_surfaces, NUM_FEATURES))
        self.rank = nn.Parameter(torch.zeros(trace.num_candidates))
        self.seen = nn.Parameter(torch.tensor(-2.0))
        for table in (self.history, self.surface):
            nn.init.normal_(table.weight, std=0.05)


class _Learner:
    """Scores and learns the requests of an hour."""

    def __init__(
        self, trace: Trace, model: _Model, users: _Users, popularity: _Popularity, cuts: NDArray[np.int64]
    ) -> None:
        self._trace, self._model, self._users, self._popularity, self._cuts = trace, model, users, popularity, cuts
        weights = [model.common, model.own, model.seen, model.rank]
        tables = [model.history.weight, model.surface.weight, model.ads, model.bias]
        self._optimiser = torch.optim.Adam([{"params": tables, "lr": 3e-3}, {"params": weights, "lr": 3e-2}])
        order = np.argsort(trace.shown_request, kind="stable")
        self._order = order
        self._shown_cuts = np.searchsorted(trace.shown_request[order], cuts)
        self._stay, self._away = _surface_habits(trace)

    def slow_down(self) -> None:
        """Smaller steps from here on."""
        for group in self._optimiser.param_groups:
            group["lr"] *= LAST_RATE

    def scores(self, requests: NDArray[np.int64], surfaces: NDArray[np.int64], hour: int, *, answered: bool) -> Tensor:
        """Scores of all ads for the users of requests i8[b] on surfaces i8[b], before or after the requests were answered. f4[b, A]."""
        model, trace = self._model, self._trace
        kinds, kind = np.unique(surfaces, return_inverse=True)
        weights = model.own[kinds] + model.common
        base = torch.einsum("sfa,sf->sa", self._popularity.at(hour, kinds), weights) + model.bias
        owner, ads = self._users.seen(requests, answered=answered, limit=HISTORY)
        starts = torch.searchsorted(owner, torch.arange(len(requests)))
        vectors = model.history(ads, starts) + model.surface(torch.from_numpy(surfaces))
        result = torch.addmm(base[torch.from_numpy(kind)], vectors, model.ads.T)
        slate = requests if answered else trace.previous[requests]
        known = np.flatnonzero(slate != NONE)
        last = torch.from_numpy(trace.candidates[slate[known]].astype(np.int64))
        ranked = torch.from_numpy(known)[:, None].expand(last.shape), last, model.rank.expand(last.shape)
        owner, ads = self._users.seen(requests, answered=answered)
        once = torch.unique(owner * trace.num_ads + ads)
        seen = once // trace.num_ads, once % trace.num_ads, model.seen.expand(once.shape)
        owner, ads, bias = (torch.cat([x.reshape(-1), y]) for x, y in zip(ranked, seen, strict=True))
        return result.index_put_((owner, ads), bias, accumulate=True)

    def learn(self, hour: int) -> None:
        """One step on the ads shown in an hour."""
        at, local, ads, requests = self._shown_of(hour)
        if not len(at):
            return
        scores = self.scores(requests, self._trace.surfaces[requests].astype(np.int64), hour, answered=False)
        loss = (scores.logsumexp(dim=1)[local] - scores[local, ads]).mean()
        self._optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step()

    def ranks(self, hour: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(index into the shown ads, how many ads score higher) of each ad shown in an hour. i8[c] each."""
        at, local, ads, requests = self._shown_of(hour)
        if not len(at):
            return at, at
        scores = self.scores(requests, self._trace.surfaces[requests].astype(np.int64), hour, answered=False)
        return at, (scores[local] > scores[local, ads][:, None]).sum(dim=1).numpy()

    def next_chances(self, requests: NDArray[np.int64], hour: int) -> Tensor:
        """Chance of each ad to be shown at the next request of the users, whose requests i8[b] were just answered. f4[b, A]."""
        surfaces = self._trace.surfaces[requests].astype(np.int64)
        stay = torch.from_numpy(self._stay[requests])[:, None]
        result = self.scores(requests, surfaces, hour, answered=True).softmax(dim=1)
        moved = np.flatnonzero(self._away[requests] != NONE)
        if len(moved):
            other = self.scores(requests[moved], self._away[requests][moved], hour, answered=True).softmax(dim=1)
            result[moved] = result[moved] * stay[moved] + other * (1 - stay[moved])
        return result

    def _shown_of(self, hour: int) -> tuple[NDArray[np.int64], Tensor, Tensor, NDArray[np.int64]]:
        at = self._order[self._shown_cuts[hour] : self._shown_cuts[hour + 1]]
        trace = self._trace
        request = trace.shown_request[at]
        requests, local = np.unique(request, return_inverse=True)
        ads = trace.candidates[request, trace.shown_position[at]].astype(np.int64)
        return at, torch.from_numpy(local), torch.from_numpy(ads), requests.astype(np.int64)


def _surface_habits(trace: Trace) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Chance that the user's next request stays on the surface of each, and the other surface he used last, -1 without one.

    f4[R] and i8[R]; both from the requests up to each, it included.
    """
    stay = np.empty(len(trace), dtype=np.float32)
    away = np.full(len(trace), NONE, dtype=np.int64)
    same: dict[int, float] = {}
    count: dict[int, int] = {}
    recent: dict[int, tuple[int, int]] = {}
    for r, (user, surface) in enumerate(zip(trace.users.tolist(), trace.surfaces.tolist(), strict=True)):
        last, other = recent.get(user, (surface, NONE))
        if user in count:
            same[user] += surface == last
        else:
            same[user], count[user] = SAME_SURFACE * SAME_WEIGHT, 0
        count[user] += 1
        if surface != last:
            last, other = surface, last
        recent[user] = last, other
        stay[r] = same[user] / (SAME_WEIGHT + count[user] - 1)
        away[r] = other
    return stay, away
