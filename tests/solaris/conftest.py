from __future__ import annotations

from tests.kafka_broker import broker, kafka_address, unique  # noqa: F401 - fixtures
from tests.solaris.kafka_app import kafka_log  # noqa: F401 - fixture
from tests.time_zones import pytest_generate_tests, time_zone  # noqa: F401 - fixture and hook
from tests.valkey import client, server  # noqa: F401 - fixtures
