"""Fixtures shared by all packages: the mini log, and one small system trained on it."""

from __future__ import annotations

import os

# Before torch is imported anywhere: two busy torch threads on a small machine collapse.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from gem.examples import RequestLog
from kernels.host import use_one_core
from streams.dataset import Dataset, load_dataset
from streams.embedded import EmbeddedValkey
from tests.system import System, build

use_one_core()
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

ROOT = Path(__file__).parent.parent
MINI = ROOT / "data" / "kuairand" / "mini"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=5, help="workers killed by the chaos test")
    parser.addoption("--broker-restarts", type=int, default=1, help="brokers killed and started again by it")


@pytest.fixture(scope="session")
def dataset() -> Dataset:
    """The 600 users with most impressions."""
    return load_dataset(MINI)


@pytest.fixture(scope="session")
def log(dataset: Dataset) -> RequestLog:
    """Their requests."""
    return RequestLog.of(dataset)


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[EmbeddedValkey]:
    """A real server for tests outside `streams`."""
    with EmbeddedValkey(appendonly=False) as server:
        yield server


@pytest.fixture
def store(valkey_server: EmbeddedValkey) -> EmbeddedValkey:
    """The server, emptied."""
    valkey_server.client().flushall()
    return valkey_server


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory, dataset: Dataset, log: RequestLog) -> System:
    """Artifacts of a small system trained on the mini log."""
    return build(tmp_path_factory.mktemp("system"), dataset, log)
