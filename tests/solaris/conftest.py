from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from kafka_broker import broker, kafka_address, unique  # noqa: E402, F401 - fixtures
