from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from hypothesis import HealthCheck, settings

from streams.embedded import EmbeddedValkey
from tests.kafka_broker import broker, kafka_address, unique  # noqa: F401 - fixtures
from tests.time_zones import pytest_generate_tests, time_zone  # noqa: F401 - fixture and hook

# The server is flushed by the examples themselves, so that sharing a fixture between examples is sound.
settings.register_profile(
    "streams", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("streams")


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(unix_socket=True, appendonly=False) as running:
        yield running


@pytest.fixture
def client(server: EmbeddedValkey) -> Iterator[redis.Redis]:
    with server.client() as connected:
        connected.flushall()
        yield connected
