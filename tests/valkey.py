"""A real server for tests, and a client of it that begins with nothing stored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from streams.embedded import EmbeddedValkey


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(unix_socket=True, appendonly=False) as running:
        yield running


@pytest.fixture
def client(server: EmbeddedValkey) -> Iterator[redis.Redis]:
    with server.client() as connected:
        connected.flushall()
        yield connected
