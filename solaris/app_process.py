"""The worker in a process of its own, beside the one that reads Kafka.

An FM run is some thousand tensor operations, each of which gives the interpreter lock up and wants it back. In a thread beside Faust's
event loop it took about twice its time, and the loop was held up in turn. Batches are handed over by a pipe instead, one at a time.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from kernels.host import keep_loaded
from solaris.worker import Worker
from streams.log import Record

METRICS_PERIOD_S = 1.0
"""How often the worker's metrics come with a reply: collecting them takes a millisecond, and nobody scrapes more often."""

_PR_SET_PDEATHSIG = 1


class WorkerGoneError(BaseException):
    """The worker's process has ended. No `Exception`: no record is to blame for it, so none must be put aside."""


class _Metrics(Collector):
    """The worker's metrics as they last were, and what this process registers beside them."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call
        self.newest: list[Metric] = []
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        return self.newest

    def put_aside(self, topic: str, number: int) -> None:
        """Counts records that no handler could take."""
        self._call("put_aside", topic, number)

    def render(self) -> bytes:
        """Text exposition format."""
        return generate_latest(self.registry)


class WorkerProcess:
    """Makes a worker in a child process and does there what is asked of it here; one call at a time.

    The child is forked, so this has to come before any thread, event loop or accelerator. It ends with this process.

    Args:
        make: makes the worker, in the child.

    Raises:
        Exception: whatever `make` raised.
    """

    def __init__(self, make: Callable[[], Worker]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._pipe, make), name="solaris-worker")
        self._process.start()
        theirs.close()
        self.metrics = _Metrics(self._call)
        try:
            self._reply()
        except BaseException:
            self.close()
            raise

    def handle(self, records: Sequence[Record]) -> None:
        """Handles a batch, see `Worker.handle`."""
        # As plain tuples: a dataclass takes five times as long through a pipe.
        self._call("handle", [(one.topic, one.key, one.value, one.offset) for one in records])

    def drain(self) -> None:
        """Runs work that waits, see `Worker.drain`."""
        self._call("drain")

    def close(self) -> None:
        """Ends the process once it is done with what it has in hand."""
        self._pipe.close()
        self._process.join()

    def _call(self, name: str, *args: Any) -> None:
        try:
            self._pipe.send((name, args))
        except OSError:
            raise WorkerGoneError(self._gone()) from None
        self._reply()

    def _reply(self) -> None:
        try:
            error, metrics = self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerGoneError(self._gone()) from None
        self.metrics.newest = metrics or self.metrics.newest
        if error is not None:
            raise error

    def _gone(self) -> str:
        self._process.join(METRICS_PERIOD_S)
        return f"the worker's process has ended with code {self._process.exitcode}"


@contextmanager
def worker_process(make: Callable[[], Worker]) -> Iterator[WorkerProcess]:
    """A worker in a process of its own, for the length of the context."""
    process = WorkerProcess(make)
    try:
        yield process
    finally:
        process.close()


def _serve(pipe: Connection, parents_end: Connection, make: Callable[[], Worker]) -> None:
    """Does what the parent asks for, until its end of the pipe is closed."""
    parents_end.close()  # or the end of the parent would not be seen
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the parent says when it is over
    try:
        worker, sent_s, error = make(), 0.0, None
        keep_loaded()
    except Exception as failure:
        pipe.send((_portable(failure), None))
        return
    while True:
        metrics = None
        if time.monotonic() - sent_s > METRICS_PERIOD_S:
            metrics, sent_s = list(worker.metrics.registry.collect()), time.monotonic()
        try:
            pipe.send((error, metrics))
            name, args = pipe.recv()
        except (EOFError, OSError):
            return
        error = None
        try:
            if name == "handle":
                worker.handle([Record(*one) for one in args[0]])
            elif name == "drain":
                worker.drain()
            else:
                worker.metrics.put_aside(*args)
        except Exception as failure:
            error = _portable(failure)


def die_with_parent() -> None:
    """A kill of the parent takes this process along at once; where the system cannot, it ends with its call, as the pipe has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _portable(error: Exception) -> Exception:
    """An error as it can go through a pipe: itself where possible, with where it came from."""
    error.add_note("in the worker's process:\n" + "".join(traceback.format_tb(error.__traceback__)))
    try:
        pickle.loads(pickle.dumps(error))  # an error with arguments of its own may pickle, and fail only over there
    except Exception:
        portable = RuntimeError(f"{type(error).__name__}: {error}")
        for note in error.__notes__:
            portable.add_note(note)
        return portable
    return error
