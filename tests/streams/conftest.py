from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.kafka_broker import broker, kafka_address, unique  # noqa: F401 - fixtures
from tests.time_zones import pytest_generate_tests, time_zone  # noqa: F401 - fixture and hook
from tests.valkey import client, server  # noqa: F401 - fixtures

# The server is flushed by the examples themselves, so that sharing a fixture between examples is sound.
settings.register_profile(
    "streams", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("streams")
