"""A whole system on the mini log, small enough for tests: FM, autoencoder, rankers, worker and API, against a real store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import redis
import torch
from fastapi.testclient import TestClient

from downstream.api import create_app
from downstream.export import save_ranker
from downstream.ranker import Ranker, RankerConfig
from downstream.settings import ApiSettings
from gem.checkpoint import save_model
from gem.config import GemConfig, Vocabulary
from gem.examples import RequestLog
from gem.train import TrainConfig, Trainer
from loopfm.autoencoder import AutoencoderConfig, fit_autoencoder, save_autoencoder
from loopfm.represent import Representer
from solaris.worker import Worker, WorkerConfig
from streams.dataset import Dataset
from streams.log.valkey import ValkeyLog

GEM = GemConfig(dim=16, heads=2, layers=2, history=20, num_seeds=8, pair_dim=24, user_dim=8, expert_hidden=32)


@dataclass(frozen=True)
class System:
    """Artifacts of one small system."""

    folder: Path
    dataset: Dataset
    log: RequestLog

    @property
    def representer(self) -> Representer:
        """The FM, loaded anew."""
        return Representer.load(self.folder / "gem", self.folder / "autoencoder")

    def worker(self, client: redis.Redis, **config: object) -> Worker:
        """A worker in this process."""
        return Worker(client, ValkeyLog(client), self.representer, WorkerConfig(**config))  # type: ignore[arg-type]

    @contextmanager
    def api(self, url: str, **settings: object) -> Iterator[TestClient]:
        """The ranking API in this process."""
        values = ApiSettings(rankers=self.folder / "rankers", redis_url=url, store_timeout_s=2.0, **settings)  # type: ignore[arg-type]
        with TestClient(create_app(values, ValkeyLog(redis.Redis.from_url(url)))) as client:
            yield client


def build(folder: Path, dataset: Dataset, log: RequestLog) -> System:
    """Trains a little, so that outputs depend on inputs, and writes all artifacts."""
    torch.manual_seed(0)
    model = GEM.build(Vocabulary.of(log.encoder))
    Trainer(model, log, TrainConfig(batch=256, warmup=2)).fit([np.arange(3_000)], progress=False)
    save_model(folder / "gem", model, log.encoder)
    rng = np.random.default_rng(0)
    autoencoder = fit_autoencoder(
        rng.normal(size=(500, GEM.pair_dim)).astype(np.float32),
        AutoencoderConfig(GEM.pair_dim, z_dim=8, prefixes=(4,), steps=20),
    )
    save_autoencoder(folder / "autoencoder", autoencoder)
    representer = Representer.load(folder / "gem", folder / "autoencoder")
    for name, use_fm in (("ranker", True), ("control", False)):
        ranker = Ranker(RankerConfig(use_fm=use_fm), log.encoder, representer.layout)
        save_ranker(folder / "rankers" / name, ranker, log.encoder, representer.layout, representer.version)
    return System(folder, dataset, log)


@contextmanager
def running(worker: Worker, name: str = "worker-0") -> Iterator[None]:
    """A worker that consumes in a thread."""
    stop = threading.Event()
    thread = threading.Thread(target=worker.run, args=(name, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
