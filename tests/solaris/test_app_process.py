"""The worker's own process: what goes to it, what comes back, and how either end finds out that the other has gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from solaris.app_process import WorkerGoneError, WorkerProcess, worker_process
from solaris.metrics import WorkerMetrics
from solaris.worker import Worker
from streams.log import Record, Retry

BATCH = [Record("t", "7", b"\x00value", "0:1"), Record("t", "8", b"", "0:2")]
DEADLINE_S = 20.0


class OddError(Exception):
    """It pickles, but cannot be made again from what it pickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"odd {first} {second}")


class Stub:
    """Stands for a worker: writes what it was given, and fails as the key says."""

    def __init__(self, path: Path) -> None:
        self.metrics, self._path = WorkerMetrics(), path

    def handle(self, records: Sequence[Record]) -> None:
        key = records[0].key
        if key == "outage":
            raise Retry("the store is away")
        if key == "odd":
            raise OddError(1, 2)
        if key == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self.metrics.events(len(records), len(records))
        self._path.write_text(f"{os.getpid()} {records!r}")

    def drain(self) -> None:
        self._path.write_text(f"{os.getpid()} drained")


@contextmanager
def stub(path: Path) -> Iterator[WorkerProcess]:
    with worker_process(lambda: cast(Worker, Stub(path))) as process:
        yield process


def record(key: str) -> list[Record]:
    return [Record("t", key, b"", "0:0")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_calls_are_done_in_another_process(tmp_path: Path) -> None:
    told = tmp_path / "told"
    with stub(told) as process:
        process.handle(BATCH)
        pid, text = told.read_text().split(" ", 1)
        assert int(pid) != os.getpid() and text == repr(BATCH)
        process.drain()
        assert told.read_text() == f"{pid} drained"
    assert gone(int(pid))


def test_errors_come_back_as_they_are(tmp_path: Path) -> None:
    with stub(tmp_path / "told") as process:
        with pytest.raises(Retry, match="the store is away") as caught:
            process.handle(record("outage"))
        assert "in handle" in caught.value.__notes__[0], "where it happened"
        with pytest.raises(RuntimeError, match="OddError: odd 1 2"):
            process.handle(record("odd"))
        process.handle(BATCH)


def test_a_worker_that_cannot_be_made_says_why() -> None:
    def make() -> Worker:
        raise FileNotFoundError("no model at x")

    with pytest.raises(FileNotFoundError, match="no model at x"):
        WorkerProcess(make)


def test_metrics_are_those_of_both_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solaris.app_process.METRICS_PERIOD_S", 0.0)
    with stub(tmp_path / "told") as process:
        process.handle(BATCH)
        process.metrics.put_aside("t", 3)
        text = process.metrics.render().decode()
    assert "solaris_events_total 2.0" in text
    assert 'solaris_rejected_total{topic="t"} 3.0' in text


def test_a_process_that_has_gone_is_no_fault_of_a_record(tmp_path: Path) -> None:
    with stub(tmp_path / "told") as process:
        for _ in range(2):
            with pytest.raises(WorkerGoneError, match="ended with code -9"):
                process.handle(record("die"))
    assert not issubclass(WorkerGoneError, Exception), "or the records would be put aside one by one"


def test_it_ends_with_its_parent_and_not_by_a_signal_to_both(tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = f"""
        from pathlib import Path
        from tests.solaris.test_app_process import BATCH, Stub, WorkerProcess
        process = WorkerProcess(lambda: Stub(Path({str(told)!r})))
        process.handle(BATCH)
        print("ready", flush=True)
        input()
        process.drain()
        print("drained", flush=True)
        input()
    """
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], **options)
    assert parent.stdin is not None and parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    pid = int(told.read_text().split()[0])
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "drained\n" and alive(pid)
    parent.kill()
    parent.communicate()
    assert gone(pid)
