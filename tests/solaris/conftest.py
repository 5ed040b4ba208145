from __future__ import annotations

from tests.kafka_broker import broker, kafka_address, unique  # noqa: F401 - fixtures
