"""Micro-batches of a Faust stream through the worker's handler, committed after it has returned.

Faust's own acknowledgements are switched off and offsets are committed here, for three reasons found in Faust 0.15.3: `take`
acknowledges its events in a `finally`, so also when the handler failed or was cancelled; events that a stream skips in a rebalance
are acknowledged unseen; and a partition without a committed offset is committed past unacknowledged records. Each of them
loses records when a worker dies at the wrong moment.

Nor is Faust trusted to hand over all records: those that were fetched before a rebalance can come after it as if they were of the new
generation, and what is between the committed offset and them is then never handed over. So a batch has to go on where the last
one, or at first the group, has ended; what is missing in between is read from the broker and handled first.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from faust.types import TP
from prometheus_client import CollectorRegistry

from solaris.app_watch import Place, Watch
from streams.log import Record
from streams.log.delivery import Delivery, is_outage
from streams.log.kafka import KafkaLog
from streams.log.kafka_consumer import to_record

BATCH_RECORDS = 512
"""Records of a micro-batch at most; it fills the FM's batches of users."""
BATCH_PERIOD_S = 0.02
"""Batches begin no closer to each other, since a batch of a few records costs about as much as one of many."""
WAITING_RECORDS = 2 * BATCH_RECORDS
"""Records that wait for the worker, beside Faust's own buffer, so that memory is bounded."""


class BatchMetrics(Protocol):
    """What the app knows of a worker's metrics."""

    registry: CollectorRegistry

    def put_aside(self, topic: str, number: int) -> None:
        """Counts records that no handler could take."""

    def render(self) -> bytes:
        """Text exposition format."""


class BatchWorker(Protocol):
    """What the app knows of `solaris.worker.Worker`, or of one in another process."""

    @property
    def metrics(self) -> BatchMetrics:
        """Its metrics."""

    def handle(self, records: Sequence[Record]) -> None:
        """Handles a batch; when it returns, its rows are written."""

    def drain(self) -> None:
        """Runs work that waits."""


class Batches:
    """Hands batches to a worker, one at a time: the order of each user's records is kept.

    Args:
        worker: its methods run in one thread of their own, so that the event loop is never held up; if the worker is in another process,
            the thread waits for it.
        log: where records that the worker cannot take are put aside.
        group: the consumer's group.
        topics: in each batch their records come in this order.
        stop: ends waiting in outages.
        watch: told of what was done.

    Attributes:
        rejected: records of each topic that were put aside.
        in_hand: whether the worker is at work, an outage of its store included; committing is not its work.
    """

    def __init__(
        self,
        worker: BatchWorker,
        log: KafkaLog,
        group: str,
        topics: Sequence[str],
        stop: threading.Event,
        watch: Watch,
    ) -> None:
        self._worker, self._watch, self._stop = worker, watch, stop
        self._order = {topic: place for place, topic in enumerate(topics)}
        self.rejected: Counter[str] = Counter()
        self._delivery = Delivery(log, group, self._work, stop, self.rejected)
        self._log, self._group = log, group
        self._generation: object = None
        self._reached: dict[Place, int] = {}
        self._pool = ThreadPoolExecutor(1, "solaris-handler")
        self._turn = asyncio.Lock()
        self._waiting: deque[Any] = deque()
        self._arrived, self._room = asyncio.Event(), asyncio.Event()
        self._working: asyncio.Task[None] | None = None
        self._committing: asyncio.Task[None] | None = None
        self.in_hand = False

    @property
    def failure(self) -> BaseException | None:
        """What ended the work; nothing will be handled any more."""
        tasks = (self._working, self._committing)
        ended = [task for task in tasks if task is not None and task.done() and not task.cancelled()]
        return next((task.exception() for task in ended if task.exception() is not None), None)

    async def put(self, app: Any, event: Any) -> None:
        """Takes an event for the next batch; while the worker is busy, `WAITING_RECORDS` of them.

        Faust's `take` would not do: it hands over and collects in turns, so that either Faust or the worker is idle.
        """
        if self._working is None:
            self._working = asyncio.create_task(self._work_on(app))
        while len(self._waiting) >= WAITING_RECORDS:
            self._room.clear()
            await self._room.wait()
        self._waiting.append(event)
        self._arrived.set()

    async def _work_on(self, app: Any) -> None:
        begun_s = 0.0
        while True:
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            await asyncio.sleep(begun_s + BATCH_PERIOD_S - time.monotonic())
            begun_s = time.monotonic()
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH_RECORDS))]
            self._room.set()
            await self.handle(app, batch)

    async def handle(self, app: Any, events: Sequence[Any]) -> None:
        """Handles the events of one micro-batch, and begins to commit them."""
        async with self._turn:
            generation = app.consumer_generation_id
            # What a rebalance made void is read again by whoever owns it now.
            messages = [event.message for event in events if event.message.generation_id == generation]
            messages.sort(key=lambda message: self._order[message.topic])  # stable
            if generation != self._generation:
                self._generation = generation
                self._reached.clear()  # others may have been at work in between
            if not messages or not await self._run(lambda: self._deliver(messages)):
                return
            await self._committed()
            self._committing = asyncio.create_task(self._commit(app, generation, messages))

    async def _commit(self, app: Any, generation: object, messages: Sequence[Any]) -> None:
        """Commits what was handled, while the worker is at the next batch already."""
        if app.consumer_generation_id != generation:
            self._watch.errors.labels("commit").inc()
            return
        offsets = {TP(message.topic, message.partition): message.offset + 1 for message in messages}
        ours = app.consumer.assignment()
        offsets = {place: offset for place, offset in offsets.items() if place in ours}
        # Faust has no public way to commit offsets of one's own choice. It waits for a broker that is away.
        if not offsets or not await app.consumer._commit(offsets):
            self._watch.errors.labels("commit").inc()
            return
        for topic, number in Counter(message.topic for message in messages).items():
            self._watch.records.labels(topic).inc(number)

    async def _committed(self) -> None:
        """Waits for the last commit; they never overtake each other."""
        if self._committing is not None:
            await self._committing

    def _deliver(self, messages: Sequence[Any]) -> bool:
        before = Counter(self.rejected)
        whole: list[Record] = []
        done = self._delivery.until_done(lambda: whole.extend(self._with_skipped(messages)))
        for start in range(0, len(whole), BATCH_RECORDS):  # more than one batch, where records were skipped
            done = done and self._delivery.deliver(whole[start : start + BATCH_RECORDS], lambda _: None)
        for topic, number in (self.rejected - before).items():
            self._worker.metrics.put_aside(topic, number)
        return done

    def _with_skipped(self, messages: Sequence[Any]) -> list[Record]:
        """The records of messages, with those before them that Faust did not hand over."""
        reached, whole = dict(self._reached), list[Record]()
        for topic in {m.topic for m in messages if (m.topic, m.partition) not in reached}:
            committed = self._log.positions(topic, self._group)
            reached = {(topic, partition): offset for partition, (offset, _) in committed.items()} | reached
        for m in messages:
            place, offset = (m.topic, m.partition), m.offset
            expected = reached.get(place, 0)
            if expected < offset:
                skipped = self._log.read(*place, expected, offset)  # none, where offsets belong to no record
                self._watch.errors.labels("skipped").inc(len(skipped))
                whole += skipped
            whole.append(to_record(m.topic, m.partition, offset, m.key, m.value))
            reached[place] = max(expected, offset + 1)
        self._reached = reached
        return whole

    def _work(self, records: Sequence[Record]) -> None:
        try:
            self._worker.handle(records)
        except Exception as error:
            self._watch.errors.labels("store" if is_outage(error) else "handler").inc()
            raise

    async def drain(self) -> None:
        """Runs work that waits for budget, unless the worker is busy."""
        if not self._turn.locked() and not self._stop.is_set():
            async with self._turn:
                await self._run(lambda: self._delivery.until_done(self._worker.drain))

    async def finish(self) -> None:
        """Waits for what is in hand, and for its commit, whatever comes of it: see `failure`."""
        async with self._turn:
            if self._committing is not None and not self._committing.done():
                await asyncio.wait([self._committing])

    def close(self) -> None:
        """Ends the work, and the handler's thread once it is free."""
        if self._working is not None:
            self._working.cancel()
        self._pool.shutdown(wait=False)

    async def _run(self, action: Callable[[], bool]) -> bool:
        self.in_hand = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, action)
        finally:
            self.in_hand = False
