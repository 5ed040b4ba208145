"""Replays test days as live events and ranks over HTTP while Solaris works.

Event time runs as fast as the machine allows, yet causally: requests go out in steps in which each user occurs once, their impressions
follow as activity events, and the next step begins when the worker has caught up. So every request sees exactly what Solaris could
have known, and two replays give the same scores, whatever the speed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import numpy as np
import orjson
from numpy.typing import NDArray
from rich.progress import Progress

from gem.examples import RequestLog
from solaris.backfill import timeline
from solaris.worker import GROUP
from specrank.demo.config import CONTROL, RANKER, DemoConfig
from streams.dataset import Dataset
from streams.events import ACTIVITY_TOPIC, ActivityEvent, encode_event
from streams.levels import Level
from streams.log import ActivityLog
from streams.requests import SERVED_TOPIC
from streams.user_log import UserLog

CATCH_UP_S = 60.0
POLL_S = 0.002
LOAD_CHUNK = 20_000


class ReplayError(RuntimeError):
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
    seconds: float


@dataclass
class Replay:
    """One replay against running services."""

    config: DemoConfig
    dataset: Dataset
    log: RequestLog
    requests: NDArray[np.int64]
    slates: NDArray[np.uint64]
    broker: ActivityLog
    url: str
    check: Callable[[], None] = lambda: None
    transport: httpx.AsyncBaseTransport | None = None
    published_served: int = field(default=0, init=False)

    def load_history(self, events: UserLog, before_ms: int) -> int:
        """Writes the replayed users' events before the replay into the user log; returns how many."""
        users, rows = self.dataset.all_events
        keep = np.flatnonzero(np.isin(users, self.log.users[self.requests]) & (rows["time_ms"] < before_ms))
        for start in range(0, len(keep), LOAD_CHUNK):
            part = keep[start : start + LOAD_CHUNK]
            events.append(users[part], rows[part])
        return len(keep)

    def steps(self) -> Iterator[tuple[list[int], list[int]]]:
        """(positions of requests, indices of impressions) of each step, in order of time.

        Within a step requests go first. A user's request never follows a request or an impression of his in the same step.
        """
        users = self.log.users[self.requests]
        _, local = self.log.candidate_indices(self.requests)
        requests: list[int] = []
        impressions: list[int] = []
        seen: set[int] = set()
        for _, is_event, index in timeline(self.log, self.requests):
            user = int(users[local[index] if is_event else index])
            if not is_event and (user in seen or len(requests) == self.config.batch):
                yield requests, impressions
                requests, impressions, seen = [], [], set()
            (impressions if is_event else requests).append(index)
            seen.add(user)
        if requests or impressions:
            yield requests, impressions

    def run(self, on_step: Callable[[int], None] | None = None) -> Replayed:
        """Replays all steps.

        Args:
            on_step: called before each step with the number of requests done.

        Raises:
            ReplayError: the API refuses a request, or the worker does not catch up.
        """
        return asyncio.run(self._run(on_step or (lambda _: None)))

    async def _run(self, on_step: Callable[[int], None]) -> Replayed:
        num = len(self.requests)
        at, local = self.log.candidate_indices(self.requests)
        first = np.searchsorted(local, np.arange(num + 1))
        objectives = self.dataset.schema.objectives
        result = Replayed(
            requests=self.requests,
            with_fm=np.zeros((len(at), len(objectives)), np.float32),
            without_fm=np.zeros((len(at), len(objectives)), np.float32),
            shown_levels=np.zeros(len(at), np.uint8),
            level_counts=np.zeros((num, len(Level)), np.int64),
            latency_ms=np.zeros(num),
            server_ms=np.zeros(num),
            seconds=0.0,
        )
        start = time.perf_counter()
        self.published_served = self.broker.published(SERVED_TOPIC)
        limits = httpx.Limits(max_connections=self.config.concurrency)
        with Progress(transient=True) as bar:
            task = bar.add_task("replay", total=num)
            async with httpx.AsyncClient(base_url=self.url, limits=limits, timeout=30.0, transport=self.transport) as client:
                gate = asyncio.Semaphore(self.config.concurrency)

                async def one(position: int) -> None:
                    shown = at[first[position] : first[position + 1]]
                    async with gate:
                        await self._rank(client, position, shown, slice(first[position], first[position + 1]), result)

                done = 0
                for step, impressions in self.steps():
                    on_step(done)
                    await asyncio.gather(*(one(position) for position in step))
                    self.published_served += len(step)
                    await self._catch_up(served_only=True)
                    self._publish(at[impressions])
                    await self._catch_up()
                    done += len(step)
                    bar.update(task, completed=done)
        result.seconds = time.perf_counter() - start
        return result

    async def _rank(
        self, client: httpx.AsyncClient, position: int, shown: NDArray[np.int64], place: slice, result: Replayed
    ) -> None:
        request = self.requests[position]
        body = {
            "user_id": int(self.dataset.raw_users[self.log.events[shown[0]]]),
            "surface": self.dataset.schema.surfaces[self.log.surfaces[request]],
            "time_ms": int(self.log.times_ms[request]),
            "candidates": self._raw_ads(self.slates[position]),
            "variant": RANKER,
        }
        start = time.perf_counter()
        answer = await self._post(client, body)
        result.latency_ms[position] = (time.perf_counter() - start) * 1e3
        result.server_ms[position] = answer["timings_ms"]["total"]
        # The shown ads again from the control, which reads no embeddings: the same request without Solaris.
        own = self._raw_ads(self.log.ads[shown])
        control = await self._post(
            client, {**body, "candidates": list(dict.fromkeys(own)), "variant": CONTROL, "shadow": True}
        )
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

    async def _post(self, client: httpx.AsyncClient, body: dict[str, object]) -> dict[str, object]:
        response = await client.post("/v1/rank", content=orjson.dumps(body))
        if response.status_code != 200:
            raise ReplayError(f"the ranking API answered {response.status_code}: {response.text[:200]}")
        answer: dict[str, object] = orjson.loads(response.content)
        return answer

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

    async def _catch_up(self, *, served_only: bool = False) -> None:
        deadline = time.monotonic() + CATCH_UP_S
        while time.monotonic() < deadline:
            if self.broker.published(SERVED_TOPIC) >= self.published_served and (
                served_only or not (self.broker.lag(SERVED_TOPIC, GROUP) or self.broker.lag(ACTIVITY_TOPIC, GROUP))
            ):
                return
            self.check()
            await asyncio.sleep(POLL_S)
        raise ReplayError(f"the worker did not catch up within {CATCH_UP_S:.0f} s")


def event_of(dataset: Dataset, index: int) -> ActivityEvent:
    """The activity event of one impression of a dataset, as a producer would publish it."""
    row = dataset.rows[index]
    mask = int(row["actions"])
    return ActivityEvent(
        event_id=index,
        user_id=int(dataset.raw_users[index]),
        ad_id=dataset.raw_ads[int(row["ad"])],
        surface=dataset.schema.surfaces[int(row["surface"])],
        time_ms=int(row["time_ms"]),
        event_types=[name for bit, name in enumerate(dataset.schema.event_types) if mask >> bit & 1],
        value=float(row["value"]),
    )
