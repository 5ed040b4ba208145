"""Replays test days as live events and ranks over HTTP while Solaris works.

Event time runs as fast as the machine allows, yet causally: requests go out in steps in which each user occurs once, their impressions
follow as activity events, and the next step begins when the worker has caught up. So every request sees exactly what Solaris could
have known, and two replays give the same scores, whatever the speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from rich.progress import Progress

from gem.examples import RequestLog
from solaris.backfill import timeline
from solaris.worker import GROUP, TOPICS
from specrank.demo.config import CONTROL, RANKER, DemoConfig
from streams.dataset import Dataset
from streams.errors import UserError
from streams.events import ACTIVITY_TOPIC, encode_event
from streams.levels import Level
from streams.log import ActivityLog
from streams.requests import SERVED_TOPIC
from streams.tools import event_of
from streams.user_log import UserLog

CATCH_UP_S = 60.0
REQUEST_TIMEOUT_S = 30.0
POLL_S = 0.004
WINDOW = 1_000  # requests and impressions of one window
LOAD_CHUNK = 20_000


Post = Callable[[bytes], tuple[int, bytes]]


class ReplayError(UserError, RuntimeError):
    """The replay cannot go on; the message says why."""


@dataclass
class Replayed:
    """What came back, per request of the replay.

    Attributes:
        requests: indices into the log.
        with_fm, without_fm: f4[C, K]; probabilities of the shown ads, with embeddings and from the control.
        shown_levels: u1[C]; levels of the shown ads.
        level_counts: i8[R, levels]; levels over all candidates.
        latency_ms: f8[R]; round trip as the client sees it. server_ms: f8[R]; time inside the service.
        seconds: duration.
    """

    requests: NDArray[np.int64]
    with_fm: NDArray[np.float32]
    without_fm: NDArray[np.float32]
    shown_levels: NDArray[np.uint8]
    level_counts: NDArray[np.int64]
    latency_ms: NDArray[np.float64]
    server_ms: NDArray[np.float64]
    seconds: float = 0.0

    @classmethod
    def empty(cls, requests: NDArray[np.int64], shown: int, objectives: int) -> Replayed:
        """Zeros to be filled."""
        num = len(requests)
        return cls(
            requests=requests,
            with_fm=np.zeros((shown, objectives), np.float32),
            without_fm=np.zeros((shown, objectives), np.float32),
            shown_levels=np.zeros(shown, np.uint8),
            level_counts=np.zeros((num, len(Level)), np.int64),
            latency_ms=np.zeros(num),
            server_ms=np.zeros(num),
        )


class HttpPost:
    """Posts rank requests over one kept connection per thread."""

    def __init__(self, url: str) -> None:
        self._address = url.removeprefix("http://")
        self._local = threading.local()

    def __call__(self, body: bytes) -> tuple[int, bytes]:
        """(status, content) of the answer.

        Raises:
            OSError: the API is not reachable.
        """
        connection: HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is not None:
            try:
                return self._ask(connection, body)
            except (ConnectionError, HTTPException):
                connection.close()  # kept for too long: the server has closed it, and reads nothing that is sent on it
        connection = self._local.connection = HTTPConnection(self._address, timeout=REQUEST_TIMEOUT_S)
        return self._ask(connection, body)

    @staticmethod
    def _ask(connection: HTTPConnection, body: bytes) -> tuple[int, bytes]:
        connection.request("POST", "/v1/rank", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()


@dataclass
class Replay:
    """One replay against running services."""

    config: DemoConfig
    dataset: Dataset
    log: RequestLog
    requests: NDArray[np.int64]
    slates: NDArray[np.uint64]
    broker: ActivityLog
    post: Post
    check: Callable[[], None] = lambda: None

    def load_history(self, events: UserLog, before_ms: int) -> int:
        """Writes the replayed users' events before the replay into the user log; returns how many."""
        users, rows = self.dataset.all_events
        keep = np.flatnonzero(np.isin(users, self.log.users[self.requests]) & (rows["time_ms"] < before_ms))
        for start in range(0, len(keep), LOAD_CHUNK):
            part = keep[start : start + LOAD_CHUNK]
            events.append(users[part], rows[part])
        return len(keep)

    def steps(self) -> Iterator[tuple[list[int], list[int]]]:
        """(positions of requests, indices of impressions) of each step.

        Requests are taken in windows of time. Within a window a user's items are spread over steps so that his request never shares
        a step with an earlier item of his; within a step requests go first. What users see does not depend on each other.
        """
        items = [(is_event, index) for _, is_event, index in timeline(self.log, self.requests)]
        users = self.log.users[self.requests]
        _, local = self.log.candidate_indices(self.requests)
        for start in range(0, len(items), WINDOW):
            steps: list[tuple[list[int], list[int]]] = []
            last: dict[int, int] = {}
            for is_event, index in items[start : start + WINDOW]:
                user = int(users[local[index] if is_event else index])
                number = last.get(user, 0) + (not is_event and user in last)
                last[user] = number
                if number == len(steps):
                    steps.append(([], []))
                steps[number][is_event].append(index)
            yield from steps

    def run(self, on_step: Callable[[int], None] = lambda done: None) -> Replayed:
        """Replays all steps.

        Args:
            on_step: called before each step with the number of requests done.

        Raises:
            ReplayError: the API refuses a request, or the worker does not catch up.
        """
        num = len(self.requests)
        at, local = self.log.candidate_indices(self.requests)
        first = np.searchsorted(local, np.arange(num + 1))
        result = Replayed.empty(self.requests, len(at), len(self.dataset.schema.objectives))
        start = time.perf_counter()
        served = self.broker.published(SERVED_TOPIC)
        done = 0
        with Progress(transient=True) as bar, ThreadPoolExecutor(self.config.concurrency) as pool:
            task = bar.add_task("replay", total=num)

            def one(position: int) -> None:
                place = slice(int(first[position]), int(first[position + 1]))
                self._rank(position, at[place], place, result)

            for requests, impressions in self.steps():
                on_step(done)
                for _ in pool.map(one, requests):
                    pass
                done += len(requests)
                # Slates first, as in production, where an impression follows the answer.
                expected = served + done
                self._wait(lambda: self.broker.published(SERVED_TOPIC) >= expected)  # noqa: B023 - waited for at once
                self._publish(at[impressions])
                self._wait(lambda: not any(self.broker.lag(topic, GROUP) for topic in TOPICS))
                bar.update(task, completed=done)
        result.seconds = time.perf_counter() - start
        return result

    def _rank(self, position: int, shown: NDArray[np.int64], place: slice, result: Replayed) -> None:
        request = self.requests[position]
        body = {
            "user_id": int(self.dataset.raw_users[self.log.events[shown[0]]]),
            "surface": self.dataset.schema.surfaces[self.log.surfaces[request]],
            "time_ms": int(self.log.times_ms[request]),
            "candidates": self._raw_ads(self.slates[position]),
            "variant": RANKER,
        }
        start = time.perf_counter()
        answer = self._post(body)
        result.latency_ms[position] = (time.perf_counter() - start) * 1e3
        result.server_ms[position] = answer["timings_ms"]["total"]
        # The shown ads again from the control, which reads no embeddings: the same request without Solaris.
        own = self._raw_ads(self.log.ads[shown])
        control = self._post({**body, "candidates": list(dict.fromkeys(own)), "variant": CONTROL, "shadow": True})
        by_ad = {candidate["ad_id"]: candidate for candidate in answer["candidates"]}
        control_by_ad = {candidate["ad_id"]: candidate for candidate in control["candidates"]}
        objectives = self.dataset.schema.objectives
        for offset, ad in enumerate(own):
            row = place.start + offset
            result.with_fm[row] = [by_ad[ad]["probabilities"][name] for name in objectives]
            result.without_fm[row] = [control_by_ad[ad]["probabilities"][name] for name in objectives]
            result.shown_levels[row] = Level.from_label(by_ad[ad]["level"])
        for candidate in answer["candidates"]:
            result.level_counts[position, Level.from_label(candidate["level"])] += 1

    def _post(self, body: dict[str, object]) -> Any:
        status, content = self.post(orjson.dumps(body))
        if status != 200:
            raise ReplayError(f"the ranking API answered {status}: {content[:200].decode(errors='replace')}")
        return orjson.loads(content)

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + CATCH_UP_S
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise ReplayError(f"the worker did not catch up within {CATCH_UP_S:.0f} s")
            time.sleep(POLL_S)

    def _raw_ads(self, ads: NDArray[np.uint64]) -> list[int]:
        return [self.dataset.raw_ads[ad] for ad in ads.tolist()]

    def _publish(self, impressions: NDArray[np.int64]) -> None:
        events = self.log.events[impressions].tolist()
        keys = self.dataset.users[events].tolist()
        records = [
            (f"{key:016x}", encode_event(event_of(self.dataset, index)))
            for key, index in zip(keys, events, strict=True)
        ]
        self.broker.publish_many(ACTIVITY_TOPIC, records)
