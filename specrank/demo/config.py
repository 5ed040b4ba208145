"""What the demo does, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gem.config import GemConfig
from gem.train import TrainConfig

RANKER, CONTROL = "ranker", "control"


@dataclass(frozen=True)
class DemoConfig:
    """Recipe of the demo.

    Attributes:
        data: the log. run: where models and the report go.
        solaris_days: last days before the test on which served features are backfilled for the rankers to learn from.
        candidates: N of a request; also the slate size.
        user_share: share of users whose test days are replayed.
        concurrency: HTTP requests at a time.
        kafka: brokers, host:port; the embedded log where absent.
    """

    data: Path = Path("data/kuairand")
    run: Path = Path("runs/demo")
    solaris_days: int = 4
    candidates: int = 100
    user_share: float = 0.15
    concurrency: int = 2
    kafka: str | None = None
    gem: GemConfig = field(default_factory=GemConfig)
    training: TrainConfig = field(default_factory=TrainConfig)

    @property
    def models(self) -> Path:
        """Folder of the artifacts."""
        return self.run / "models"

    @property
    def rankers(self) -> Path:
        """Folder of the rankers' artifacts."""
        return self.models / "rankers"
