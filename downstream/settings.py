"""Settings of the ranking API process; environment prefix `SPECRANK_API_`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ApiSettings(BaseSettings):
    """One ranking API process."""

    model_config = SettingsConfigDict(env_prefix="SPECRANK_API_")

    rankers: Path = Field(description="folder with one ranker artifact per variant")
    redis_url: str = Field(description="the store, such as redis://127.0.0.1:6379/0")
    log_url: str | None = Field(
        None, description="where served requests go: kafka://host:port or redis://…; the store's server where absent"
    )
    default_variant: str = "ranker"
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65_535)
    store_timeout_s: float = Field(0.05, gt=0, description="a store slower than this counts as down for that request")
    store_retry_s: float = Field(0.5, ge=0, description="after a failure the store is left alone this long")
    max_pending: int = Field(512, ge=1, description="requests waiting for the scoring thread before new ones get 503")
    reload_s: float = Field(5.0, gt=0, description="how often the folder of rankers is looked at")
