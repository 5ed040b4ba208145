"""Settings of a worker process; environment prefix `SPECRANK_WORKER_`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


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
    flops_per_s: float | None = Field(None, gt=0, description="FM budget; unbounded where absent")
    health_port: int | None = Field(
        None, ge=0, le=65_535, description="serves /health, /ready and /metrics where given"
    )
