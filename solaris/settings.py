"""Settings of a worker process; environment prefix `SPECRANK_WORKER_`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from solaris.worker import WorkerConfig


class WorkerSettings(BaseSettings):
    """One Solaris worker process."""

    model_config = SettingsConfigDict(env_prefix="SPECRANK_WORKER_")

    gem: Path = Field(description="artifact of the foundation model")
    autoencoder: Path = Field(description="artifact of the representation autoencoder")
    redis_url: str = Field(description="store and embedded log, such as redis://127.0.0.1:6379/0")
    kafka_bootstrap_servers: str | None = Field(
        None, description="host:port of some brokers; the embedded log where absent"
    )
    consumer: str = Field("worker-0", description="name in the consumer group; a restarted worker keeps its name")
    slate_size: int = Field(100, ge=1)
    min_events: int = Field(1, ge=1, description="new events of a user before the FM's request side runs for him again")
    explore_pairs: int = Field(
        0, ge=0, description="pairs beyond a user's own slate that a job may add: rising ads, ads of similar users"
    )
    event_values: dict[str, float] = Field(
        default_factory=dict, description='by event type, how many plain events one is worth, such as {"is_like": 5}'
    )
    max_rows: int = Field(1_024, ge=1, description="pair rows that the store keeps of a user, which bounds his bytes")
    flops_per_s: float | None = Field(None, gt=0, description="FM budget; unbounded where absent")
    health_port: int | None = Field(
        None, ge=0, le=65_535, description="serves /health, /ready and /metrics where given"
    )

    def worker_config(self) -> WorkerConfig:
        """What these settings say of the work."""
        return WorkerConfig(
            slate_size=self.slate_size,
            flops_per_s=self.flops_per_s,
            min_events=self.min_events,
            event_values=self.event_values,
            explore_pairs=self.explore_pairs,
            max_rows=self.max_rows,
        )
