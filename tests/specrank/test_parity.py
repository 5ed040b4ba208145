"""Training and serving see the same: a log replayed through the running system against the same log offline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from downstream.fetch import Fetcher
from downstream.inputs import many_requests, one_request
from downstream.train import nothing, take
from gem.examples import RequestLog
from solaris.backfill import part_of, served_features, served_states
from specrank.demo.config import DemoConfig
from specrank.demo.replay import Replay
from streams.dataset import Dataset
from streams.embedded import EmbeddedValkey
from streams.features import FmFeatures
from streams.log.valkey import ValkeyLog
from streams.retrieval import CausalRetrieval
from streams.tools import event_of
from streams.user_log import UserLog
from tests.system import System, running

NUM_USERS, CANDIDATES = 40, 30


@pytest.fixture(scope="module")
def chosen(log: RequestLog, dataset: Dataset) -> tuple[np.ndarray, np.ndarray, int]:
    """(requests, slates, start) of some users' test days."""
    _, test_ms = dataset.schema.split_ms()
    test = log.between(test_ms, None)
    users = np.unique(log.users[test])[:NUM_USERS]
    requests = test[np.isin(log.users[test], users)]
    retrieval = CausalRetrieval(dataset, test_ms)
    shown = [log.ads[log.offsets[r] : log.offsets[r + 1]] for r in requests]
    slates = retrieval.fill(log.users[requests], log.surfaces[requests], log.times_ms[requests], shown, CANDIDATES)
    return requests, slates, test_ms


class RecordingReplay(Replay):
    """Keeps, for each request, what fetching and encoding gave at the moment it was served."""

    def __init__(self, *args: object, fetcher: Fetcher) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.fetcher, self.inputs, self.features = fetcher, {}, {}

    def _rank(self, position, shown, place, result) -> None:  # type: ignore[no-untyped-def]
        request = self.requests[position]
        user, surface = int(self.log.users[request]), int(self.log.surfaces[request])
        time_ms, ads = int(self.log.times_ms[request]), self.log.ads[shown]
        fetched = self.fetcher.fetch(user, surface, time_ms, ads)
        batch = self.log.encoder.encode(
            np.array([user], np.uint64),
            np.array([surface]),
            np.array([time_ms]),
            fetched.history,
            np.array([0, len(fetched.history)]),
            ads,
            np.zeros(len(ads), np.int64),
        )
        self.inputs[position] = one_request(batch, fetched.features, self.log.encoder.num_surfaces)
        self.features[position] = fetched.features
        super()._rank(position, shown, place, result)


def test_replayed_features_equal_offline_features(
    system: System, store: EmbeddedValkey, chosen: tuple[np.ndarray, np.ndarray, int], tmp_path: Path
) -> None:
    requests, slates, test_ms = chosen
    log = system.log
    representer = system.representer
    config = DemoConfig(candidates=CANDIDATES, run=tmp_path)
    worker = system.worker(store.client(), slate_size=CANDIDATES)
    fetcher = Fetcher(store.client(), representer.layout, representer.version, history=10)
    with system.api(store.url) as http, running(worker):
        broker = ValkeyLog(store.client())

        def post(body: bytes) -> tuple[int, bytes]:
            answer = http.post("/v1/rank", content=body)
            return answer.status_code, answer.content

        replay = RecordingReplay(config, system.dataset, log, requests, slates, broker, post, fetcher=fetcher)
        replay.load_history(UserLog(store.client()), test_ms)
        replayed = replay.run()
    states = served_states(log, requests, slates, 1_024)
    offline = served_features(log, requests, slates, part_of(states, log, requests, requests), representer)
    at, local = log.candidate_indices(requests)
    assert len(set(offline.level.tolist())) >= 3, "the replay must meet several levels"
    encoded, _ = log.encode(requests, 10)
    padded, _ = many_requests(encoded, offline, log.encoder.num_surfaces)
    for position in range(len(requests)):
        mine = np.flatnonzero(local == position)
        served: FmFeatures = replay.features[position]
        expected = take(offline, mine)
        assert served.level.tolist() == expected.level.tolist()
        assert served.age_ms.tolist() == expected.age_ms.tolist()
        assert served.same_surface.tolist() == expected.same_surface.tolist()
        np.testing.assert_allclose(served.pair, expected.pair, atol=4e-3)
        np.testing.assert_allclose(served.user[0], expected.user[0], atol=2e-3)
        online = replay.inputs[position]
        length = online["event_ad"].shape[1]
        for name in ("surface", "hour", "user_categories", "user_dense", "event_ad", "event_facts", "event_mask", "ad"):
            row = padded[name][position]
            cut = row[:length] if name.startswith("event_") else row[: len(mine)] if name == "ad" else row
            assert np.array_equal(online[name][0], cut), name
            if name.startswith("event_"):
                assert not row[length:].any()
    assert replayed.shown_levels.tolist() == offline.level.tolist()


def test_later_events_change_no_score(system: System, store: EmbeddedValkey, log: RequestLog) -> None:
    dataset = system.dataset
    request = int(log.between(dataset.schema.split_ms()[1], None)[500])
    user, time_ms = int(log.users[request]), int(log.times_ms[request])
    events = UserLog(store.client())
    users, rows = dataset.all_events
    mine = users == user
    earlier = mine & (rows["time_ms"] < time_ms)
    events.append(users[earlier], rows[earlier])
    body = {
        "user_id": int(dataset.raw_users[log.events[log.offsets[request]]]),
        "surface": dataset.schema.surfaces[log.surfaces[request]],
        "time_ms": time_ms,
        "candidates": [int(x) for x in list(dataset.raw_ads.values())[:20]],
        "shadow": True,
    }
    worker = system.worker(store.client())
    worker.compute(np.array([user], np.uint64))
    with system.api(store.url) as http:
        before = http.post("/v1/rank", json=body).json()["candidates"]
        assert before[0]["level"] in ("user", "user_aggregate"), (
            "an embedding must be read, else the test shows nothing"
        )
        perturbed = rows[mine & (rows["time_ms"] >= time_ms)].copy()
        assert len(perturbed) > 0
        perturbed["time_ms"][0] = time_ms  # at the very moment of the request
        perturbed["actions"] ^= 0b10
        events.append(np.full(len(perturbed), user, np.uint64), perturbed)
        assert http.post("/v1/rank", json=body).json()["candidates"] == before
        shift = rows[earlier][-1:].copy()
        shift["event_id"], shift["time_ms"] = 1, time_ms - 1
        events.append(np.array([user], np.uint64), shift)
        assert http.post("/v1/rank", json=body).json()["candidates"] != before, "an earlier event must matter"


def test_features_of_requests_before_solaris_are_none(system: System) -> None:
    layout = system.representer.layout
    features = nothing(4, layout)
    assert not features.level.any()
    assert features.user.shape == (4, layout.user_dim)


def test_events_of_the_replay_carry_the_log_row(system: System) -> None:
    from streams.events import event_rows

    indices = [0, 17, 4_000, len(system.dataset.rows) - 1]
    users, rows = event_rows([event_of(system.dataset, index) for index in indices], system.dataset.schema)
    assert users.tolist() == system.dataset.users[indices].tolist()
    assert rows.tolist() == system.dataset.rows[indices].tolist()
