"""The worker: events to the user log, served requests to slates, and micro-batches of users through the FM to the store.

Everything a worker writes is a function of the user's log and slate as they stand, merged by event time: records may come twice, late
or to two workers at once, and the store ends the same. Records are committed after their rows are written; only work beyond the budget
waits in memory, and what a kill takes of it is found again in idle time (`solaris.refill`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import redis

from loopfm.represent import Representer
from solaris.budget import Cost, TokenBucket
from solaris.compute import Computer, Done
from solaris.metrics import WorkerMetrics
from solaris.price import Price
from solaris.queue import Job, SpeculationQueue
from solaris.refill import Refill
from solaris.speculator import Speculator
from streams.events import ACTIVITY_TOPIC, EventError, decode_event, event_row, time_problem
from streams.log import ActivityLog, Record, Retry, reject
from streams.log.delivery import is_outage
from streams.recent import Recent
from streams.requests import SERVED_TOPIC, ServedRecordError, ServedRequest, decode_served
from streams.rows import LOG_ROW
from streams.schema import FeatureSchema
from streams.store import StoreContentionError
from streams.user_log import FOREVER_MS, UserLog

GROUP = "solaris"
TOPICS = (SERVED_TOPIC, ACTIVITY_TOPIC)  # slates before the events that trigger them
REFILL_SHARE = 0.01  # value of refilling a user after a change of the FM, against one who was just active

SPARE = 0.95  # with so much of the bucket full nothing is too cheap to be computed: the budget would be lost
KEPT_COUNTS = 100_000  # users of whom it is remembered how many events have come since their last run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerConfig:
    """How a worker works.

    Attributes:
        slate_size: pairs speculated per user.
        micro_batch: users of one FM run.
        max_jobs: users that wait at most.
        max_rows: pair rows that the store keeps of a user, which bounds his bytes.
        min_events: new events that a user must have before f_R runs for him again.
        flops_per_s: FM budget; None = unbounded.
        max_records: records of one batch.
        explore_pairs: pairs beyond a user's own slate that a job may add: ads that rise, and ads of similar users.
        event_values: by name of an event type, how many plain events such an event is worth; the greatest counts.
    """

    slate_size: int = 100
    micro_batch: int = 256
    max_jobs: int = 10_000
    max_rows: int = 1_024
    min_events: int = 1
    flops_per_s: float | None = None
    max_records: int = 512
    explore_pairs: int = 0
    event_values: Mapping[str, float] = field(default_factory=dict)


class Worker:
    """One worker process."""

    def __init__(self, client: redis.Redis, log: ActivityLog, representer: Representer, config: WorkerConfig) -> None:
        self.config, self.metrics = config, WorkerMetrics()
        self._log = log
        self._schema: FeatureSchema = representer.engine.encoder.schema
        self._event_values = event_values(config.event_values, self._schema)
        self._events = UserLog(client)
        self._cost = Cost(*representer.engine.flops())
        self._speculator = Speculator(
            client, representer.layout, representer.version, self._cost, config.slate_size, config.explore_pairs
        )
        self._computer = Computer(
            client, representer, self._speculator, max_rows=config.max_rows, min_events=config.min_events
        )
        self._queue = SpeculationQueue(config.max_jobs)
        self._bucket = TokenBucket(config.flops_per_s)
        self._price = Price(config.flops_per_s)
        self._rejected: list[tuple[Record, str]] = []
        self._events_since = Recent[int, int](KEPT_COUNTS)
        self._refill = Refill(client, self._computer.users, representer.version)

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
        self._rejected = []
        try:
            served = self._served(records)
            self._speculator.remember(served)
            # The impressions of a request follow it at once and change what the FM knows of the user: they are the moment to
            # compute, and a run for the served request alone would be thrown away.
            due = self._append(records)
            for user in self._overtaken(served, due):
                due[user] = 1.0
            for user, events in due.items():
                if len(self._queue) >= self.config.max_jobs:
                    self._work()  # before anything is dropped, if the budget allows
                self._queue.put(Job(user, self._speculator.value(user) * events))
            self._work()
            self._set_aside()
        except Exception as error:
            raise _retried(error) from error

    def drain(self) -> None:
        """Runs waiting jobs as far as the budget goes; with nothing to do, looks for rows that are behind.

        Raises:
            Retry: the store is away; the jobs wait on.
        """
        try:
            self._work()
            if not len(self._queue):
                for user in self._refill.step():
                    self._queue.put(Job(user, self._speculator.value(user) * REFILL_SHARE))
        except Exception as error:
            raise _retried(error) from error

    def _work(self) -> None:
        if self._refill.retired is None:
            self._computer.pairs.retired = self._computer.users.retired = self._refill.start()
        while jobs := self._next_jobs():
            self._run_jobs(jobs)
        self.metrics.queue(self._queue, self._price.value)

    def _run_jobs(self, jobs: list[Job]) -> None:
        """Runs jobs together; if they fail, one by one, and a user whose job cannot be done is left out and counted."""
        start = time.perf_counter()
        try:
            done = self.compute([job.user for job in jobs])
        except Exception as error:
            if _passes(error):
                self._put_back(jobs)
                raise
            if len(jobs) > 1:
                for number, job in enumerate(jobs):
                    try:
                        self._run_jobs([job])
                    except Exception:  # the store: the job itself was put back
                        self._put_back(jobs[number + 1 :])
                        raise
                return
            logger.exception("the rows of user %016x cannot be computed", jobs[0].user)
            self.metrics.failed.inc()
            return
        self._bucket.spend(done.flops)
        self._price.observe(done.asked, self._cost.pair_flops, self._bucket.fill)
        self.metrics.ran(done, time.perf_counter() - start)

    def _put_back(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._queue.put(job)

    def compute(self, users: Sequence[int]) -> Done:
        """Computes and writes the rows of distinct users as their logs and slates stand."""
        price = 0.0 if self._bucket.fill > SPARE else self._price.value
        done = self._computer.run(users, price, self._events_since)
        for user in done.lost:
            self._queue.put(Job(user, self._speculator.value(user)))
        return done

    def _next_jobs(self) -> list[Job]:
        most = self._bucket.jobs(self._cost.of(self.config.slate_size), self.config.micro_batch)
        jobs: list[Job] = []
        while len(jobs) < most and (job := self._queue.pop()) is not None:
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
                    problem = time_problem(request.time_ms)
                    if problem:
                        raise ServedRecordError(problem)
                    served.append(request)
                except ServedRecordError as error:
                    self._rejected.append((record, str(error)))
        return served

    def _append(self, records: Sequence[Record]) -> dict[int, float]:
        """Appends events to the user log; returns whose, and how many plain events theirs are worth."""
        users, rows = [], []
        for record in records:
            if record.topic == ACTIVITY_TOPIC:
                try:
                    user, row = event_row(decode_event(record.value), self._schema)
                except EventError as error:
                    self._rejected.append((record, str(error)))
                    continue
                users.append(user)
                rows.append(row)
        due: dict[int, float] = {}
        if users:
            array = np.array(rows, dtype=LOG_ROW)
            new = self._events.append(np.array(users, dtype=np.uint64), array)
            self.metrics.events(len(users), new)
            for user, mask in zip(users, array["actions"].tolist(), strict=True):
                due[user] = due.get(user, 0.0) + self._event_value(mask)
                if self.config.min_events > 1:
                    self._events_since[user] = self._events_since.get(user, 0) + 1
        return due

    def _event_value(self, mask: int) -> float:
        return max((value for bit, value in self._event_values if mask >> bit & 1), default=1.0)

    def _overtaken(self, served: Sequence[ServedRequest], due: Mapping[int, float]) -> list[int]:
        """Users whose slate came after the events that follow it, as happens between topics: nothing else would trigger them."""
        asked: dict[int, int] = {}
        for request in served:
            if request.user not in due:
                asked[request.user] = min(request.time_ms, asked.get(request.user, request.time_ms))
        users = np.fromiter(asked, dtype=np.uint64, count=len(asked))
        newest, offsets = self._events.histories(users, np.full(len(users), FOREVER_MS, dtype=np.int64), 1)
        times = newest["time_ms"]
        return [
            user
            for user, start, end in zip(asked, offsets[:-1], offsets[1:], strict=True)
            if end > start and times[start] >= asked[user]
        ]

    def _set_aside(self) -> None:
        """Publishes what was rejected, once the rest of the batch is done: a batch that fails comes again, and its rejections with it."""
        for record, reason in self._rejected:
            reject(self._log, record, reason)
            self.metrics.put_aside(record.topic, 1)


def event_values(values: Mapping[str, float], schema: FeatureSchema) -> list[tuple[int, float]]:
    """(bit of the event type, value) of each name.

    Raises:
        ValueError: naming an event type that the schema does not have, or a value that is not positive.
    """
    unknown = sorted(set(values) - set(schema.event_types))
    if unknown:
        raise ValueError(
            f"unknown event type {unknown[0]!r} in event_values; legal values: {', '.join(schema.event_types)}"
        )
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"event_values: {name} is worth {value}, expected a positive number")
    return [(schema.event_types.index(name), float(value)) for name, value in values.items()]


def _passes(error: Exception) -> bool:
    """Whether the same work may be tried again as it is."""
    return is_outage(error) or isinstance(error, OSError | StoreContentionError)


def _retried(error: Exception) -> Exception:
    return Retry(f"the store is away: {error}") if _passes(error) and not isinstance(error, Retry) else error
