"""The worker: events to the user log, served requests to slates, and micro-batches of users through the FM to the store.

Everything a worker writes is a function of the user's log and slate as they stand, merged by event time: records may come twice, late
or to two workers at once, and the store ends the same. Records are committed after their rows are written; only work beyond the budget
waits in memory, where a kill loses it until the user's next event.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import redis
from numpy.typing import NDArray

from loopfm.represent import Representer
from solaris.budget import Cost, TokenBucket
from solaris.metrics import WorkerMetrics
from solaris.queue import Job, SpeculationQueue
from solaris.speculator import Slate, Speculator
from streams.events import ACTIVITY_TOPIC, EventError, decode_event, event_row
from streams.features import PAIRS, USER, USER_ROW, store_of
from streams.log import ActivityLog, Record, Retry, reject
from streams.log.delivery import CLIENT_OUTAGES
from streams.requests import SERVED_TOPIC, ServedRecordError, ServedRequest, decode_served
from streams.rows import LOG_ROW
from streams.schema import FeatureSchema
from streams.store import Rows, StoreContentionError
from streams.user_log import UserLog

GROUP = "solaris"
TOPICS = (SERVED_TOPIC, ACTIVITY_TOPIC)  # slates before the events that trigger them
EVENT_VALUE = 1.0  # an event is worth as much as one certain miss
FOREVER_MS = 2**53  # above any event time, and exact as a score of the log

STORE_OUTAGES = (*CLIENT_OUTAGES, OSError, StoreContentionError)
"""What passes by itself: the same work may be tried again as it is."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerConfig:
    """How a worker works.

    Attributes:
        slate_size: pairs speculated per user.
        micro_batch: users of one FM run.
        max_jobs: users that wait at most.
        max_rows: pair rows that the store keeps of a user.
        flops_per_s: FM budget; None = unbounded.
        max_records: records of one batch.
    """

    slate_size: int = 100
    micro_batch: int = 32
    max_jobs: int = 10_000
    max_rows: int = 1_024
    flops_per_s: float | None = None
    max_records: int = 512


class Worker:
    """One worker process."""

    def __init__(self, client: redis.Redis, log: ActivityLog, representer: Representer, config: WorkerConfig) -> None:
        self.config, self.metrics = config, WorkerMetrics()
        self._log, self._representer = log, representer
        self._schema: FeatureSchema = representer.engine.encoder.schema
        self._client = client
        self._events = UserLog(client)
        self._speculator = Speculator(client, config.slate_size)
        layout = representer.layout
        self._pairs = store_of(client, PAIRS, layout, max_rows=config.max_rows)
        self._users = store_of(client, USER, layout, max_rows=1)
        self._queue = SpeculationQueue(config.max_jobs)
        self._bucket = TokenBucket(config.flops_per_s)
        self._cost = Cost(*representer.engine.flops())

    def run(self, consumer: str, stop: threading.Event) -> None:
        """Consumes until `stop` is set."""
        self._log.consume(
            TOPICS,
            GROUP,
            self.handle,
            consumer=consumer,
            max_records=self.config.max_records,
            stop=stop,
            on_idle=self.drain,
        )

    def handle(self, records: Sequence[Record]) -> None:
        """Handles a batch of records of both topics; when it returns, their rows are written.

        Raises:
            Retry: the store is away; nothing of the batch may be committed.
        """
        try:
            served = self._served(records)
            gains = self._speculator.remember(served)
            # The impressions of a request follow it at once and change what the FM knows of the user: they are the moment to
            # compute, and a run for the served request alone would be thrown away.
            due = Counter(self._append(records))
            for user in self._overtaken(served, due):
                due[user] += 1
            for user, events in due.items():
                self._queue.put(Job(user, gains.get(user, 0.0) + EVENT_VALUE * events))
            self.drain()
        except STORE_OUTAGES as error:
            raise Retry(f"the store is away: {error}") from error

    def drain(self) -> None:
        """Runs waiting jobs, best first, as far as the budget goes.

        Raises:
            Retry: the store is away; the jobs wait on.
        """
        while True:
            jobs = self._next_jobs()
            self.metrics.queue(len(self._queue), self._queue.dropped, self._queue.coalesced)
            if not jobs:
                return
            self._run_jobs(jobs)

    def _run_jobs(self, jobs: list[Job]) -> None:
        """Runs jobs together; if they fail, one by one, and a user whose job cannot be done is left out and counted."""
        try:
            self.compute(np.array([job.user for job in jobs], dtype=np.uint64))
        except STORE_OUTAGES as error:
            for job in jobs:
                self._queue.put(job)
            raise Retry(f"the store is away: {error}") from error
        except Exception:
            if len(jobs) > 1:
                for job in jobs:
                    self._run_jobs([job])
                return
            logger.exception("the rows of user %016x cannot be computed", jobs[0].user)
            self.metrics.failed.inc()

    def _next_jobs(self) -> list[Job]:
        jobs: list[Job] = []
        while len(jobs) < self.config.micro_batch and len(self._queue):
            if not self._bucket.take(self._cost.of(self.config.slate_size)):
                break
            job = self._queue.pop()
            if job is None:
                break
            jobs.append(job)
        return jobs

    def _served(self, records: Sequence[Record]) -> list[ServedRequest]:
        served = []
        for record in records:
            if record.topic == SERVED_TOPIC:
                try:
                    request = decode_served(record.value)
                    if not 0 <= request.surface < len(self._schema.surfaces):
                        raise ServedRecordError(
                            f"surface {request.surface} of a served request; legal values: 0 to {len(self._schema.surfaces) - 1}"
                        )
                    served.append(request)
                except ServedRecordError as error:
                    self._reject(record, str(error))
        return served

    def _append(self, records: Sequence[Record]) -> list[int]:
        """Appends events to the user log; returns whose."""
        users, rows = [], []
        for record in records:
            if record.topic == ACTIVITY_TOPIC:
                try:
                    user, row = event_row(decode_event(record.value), self._schema)
                except EventError as error:
                    self._reject(record, str(error))
                    continue
                users.append(user)
                rows.append(row)
        if users:
            new = self._events.append(np.array(users, dtype=np.uint64), np.array(rows, dtype=LOG_ROW))
            self.metrics.events(len(users), new)
        return users

    def _overtaken(self, served: Sequence[ServedRequest], due: Counter[int]) -> list[int]:
        """Users whose slate came after the events that follow it, as happens between topics: nothing else would trigger them."""
        asked = {request.user: request.time_ms for request in served if request.user not in due}
        users = np.fromiter(asked, dtype=np.uint64, count=len(asked))
        newest, offsets = self._events.histories(users, np.full(len(users), FOREVER_MS, dtype=np.int64), 1)
        times = newest["time_ms"]
        return [
            user
            for user, start, end in zip(asked, offsets[:-1], offsets[1:], strict=True)
            if end > start and times[start] >= asked[user]
        ]

    def _reject(self, record: Record, reason: str) -> None:
        reject(self._log, record, reason)
        self.metrics.rejected.labels(record.topic).inc()

    def compute(self, users: NDArray[np.uint64]) -> None:
        """Computes and writes the rows of users as their logs and slates stand."""
        start = time.perf_counter()
        slates = self._speculator.slates(users)
        history, offsets = self._events.histories(
            users, np.full(len(users), FOREVER_MS, dtype=np.int64), self._representer.engine.history
        )
        # A user without any event has no state to compute; his first event will bring him back.
        counts = np.diff(offsets)
        kept = np.flatnonzero(counts > 0)
        if not len(kept):
            return
        users, slates = users[kept], [slates[i] for i in kept]
        offsets = np.concatenate([[0], np.cumsum(counts[kept])])
        state_ms = history["time_ms"][offsets[1:] - 1]
        self._write(users, slates, state_ms, history, offsets)
        self.metrics.ran(len(users), sum(len(slate.ads) for slate in slates), time.perf_counter() - start)

    def _write(
        self,
        users: NDArray[np.uint64],
        slates: list[Slate],
        state_ms: NDArray[np.int64],
        history: NDArray[np.void],
        offsets: NDArray[np.int64],
    ) -> None:
        sizes = np.array([len(slate.ads) for slate in slates])
        ads = np.concatenate([slate.ads for slate in slates])
        surfaces = np.array([slate.surface for slate in slates])
        owner = np.repeat(np.arange(len(users)), sizes)
        embeddings, pairs = self._representer.at_states(users, state_ms, surfaces, history, offsets, ads, owner)
        cuts = np.concatenate([[0], np.cumsum(sizes)])
        own = self._representer.user_rows(embeddings, pairs, cuts, ads)
        version = self._representer.version
        with_slate = np.flatnonzero(sizes > 0)
        self._pairs.write(
            users[with_slate],
            [_rows(ads[cuts[b] : cuts[b + 1]], state_ms[b], version, pairs[cuts[b] : cuts[b + 1]]) for b in with_slate],
        )
        own_ad = np.array([USER_ROW], dtype=np.uint64)
        self._users.write(users, [_rows(own_ad, state_ms[b], version, own[b : b + 1]) for b in range(len(users))])


def _rows(ads: NDArray[np.uint64], state_ms: int, version: int, vectors: NDArray[np.float32]) -> Rows:
    return Rows(ads, np.full(len(ads), state_ms, dtype=np.int64), np.full(len(ads), version, dtype=np.uint64), vectors)
