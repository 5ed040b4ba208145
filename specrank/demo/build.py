"""Builds the demo's models: GEM day by day, the representation autoencoder, served features, and two rankers."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from downstream.table_file import write_table
from downstream.train import RankerTable, join, nothing
from gem.checkpoint import save_model
from gem.config import Vocabulary
from gem.engine import GemEngine
from gem.examples import RequestLog
from gem.train import DAY_MS, Trainer, base_rates, days_of, evaluate_predictions, per_surface, predict
from loopfm.augment import Augmented, augment, pair_embeddings
from loopfm.autoencoder import Autoencoder, AutoencoderConfig, fit_autoencoder, save_autoencoder
from loopfm.represent import Representer
from solaris.backfill import ServedStates, part_of, served_features, served_states
from solaris.worker import WorkerConfig
from specrank.demo.config import CONTROL, RANKER, DemoConfig
from specrank.demo.services import ServiceError
from streams.features import FmFeatures
from streams.retrieval import CausalRetrieval

Say = Callable[[str], None]


@dataclass
class Candidates:
    """Candidates of requests from the first Solaris day on: i8[R] requests, u8[R, N] slates."""

    requests: NDArray[np.int64]
    slates: NDArray[np.uint64]


@dataclass
class Backfill:
    """Collects, day by day, what the FM of the day before would have given."""

    log: RequestLog
    candidates: Candidates
    states: ServedStates
    representer: Representer | None = None
    augmented: list[Augmented] = field(default_factory=list)
    features: list[FmFeatures] = field(default_factory=list)
    unexplained: list[float] = field(default_factory=list)

    def day(self, engine: GemEngine, day: NDArray[np.int64], previous: NDArray[np.int64]) -> None:
        """Runs an FM that has not seen the day over it; the autoencoder is fitted once, on the day before."""
        if self.representer is None:
            autoencoder, self.unexplained = _fit(engine, self.log, previous)
        else:
            autoencoder = self.representer.autoencoder
        self.representer = Representer(engine, autoencoder, "unsaved")
        part = part_of(self.states, self.log, self.candidates.requests, day)
        self.augmented.append(augment(self.representer, self.log, day))
        self.features.append(served_features(self.log, day, self.candidates.slates, part, self.representer))


def fill_candidates(retrieval: CausalRetrieval, log: RequestLog, requests: NDArray[np.int64], num: int) -> Candidates:
    """Fills requests to `num` candidates around those really shown."""
    shown = [log.ads[log.offsets[r] : log.offsets[r + 1]] for r in requests]
    slates = retrieval.fill(log.users[requests], log.surfaces[requests], log.times_ms[requests], shown, num)
    return Candidates(requests, slates)


@dataclass
class Built:
    """What `build` leaves: the FM that serves, its layout's representer and metrics."""

    representer: Representer
    metrics: dict[str, Any]
    base: NDArray[np.float32]
    candidates: Candidates


def build(
    config: DemoConfig, log: RequestLog, retrieval: CausalRetrieval, say: Say, lap: Callable[[str], None]
) -> Built:
    """Trains everything and writes the artifacts to `config.models`."""
    _, test_ms = log.encoder.schema.split_ms()
    days = days_of(log, log.between(None, test_ms))
    first = test_ms - config.solaris_days * DAY_MS
    learned = log.between(first, test_ms)
    with ThreadPoolExecutor(1) as pool:
        # A second thread finds the candidates, and then backfills each day with a copy of the FM as it was before that day, while
        # training goes on: torch and numpy release the interpreter while they compute.
        prepared: Future[Backfill] = pool.submit(_prepare, config, log, retrieval, learned)
        filled: list[Future[None]] = []
        torch.manual_seed(config.training.seed)
        model = config.gem.build(Vocabulary.of(log.encoder))
        say(f"gem: {sum(p.numel() for p in model.parameters()):,} parameters, {len(days)} days of training")

        def before_day(index: int, day: NDArray[np.int64]) -> None:
            if log.times_ms[day[0]] >= first:
                # The FM of this moment has no version yet: it serves nobody.
                engine = GemEngine(copy.deepcopy(model), log.encoder, "0")
                filled.append(pool.submit(lambda: prepared.result().day(engine, day, days[index - 1])))

        Trainer(model, log, config.training).fit(days, before_day=before_day)
        lap("gem")
        for done in filled:
            done.result()
    backfill = prepared.result()
    lap("backfill")
    gem_version = save_model(config.models / "gem", model, log.encoder)
    assert backfill.representer is not None
    autoencoder = backfill.representer.autoencoder
    autoencoder_version = save_autoencoder(config.models / "autoencoder", autoencoder)
    representer = Representer(GemEngine(model, log.encoder, gem_version), autoencoder, autoencoder_version)
    _write_table(config, log, backfill, representer, first)
    base = base_rates(log, log.between(None, test_ms))
    running = [_train_ranker(config, name) for name in (RANKER, CONTROL)]
    test = log.between(test_ms, None)
    online, frozen = predict(model, log, test), predict(model, log, test, frozen_ms=test_ms)
    metrics = {
        "gem": {k: m.to_dict() for k, m in evaluate_predictions(log, test, online, base, frozen=frozen).items()},
        "gem_by_surface": per_surface(
            lambda surface: evaluate_predictions(log, test, online, base, frozen=frozen, surface=surface),
            log.encoder.schema.surfaces,
        ),
        "autoencoder_unexplained": [round(x, 4) for x in backfill.unexplained],
    }
    for name, process in zip((RANKER, CONTROL), running, strict=True):
        if process.wait():
            raise ServiceError(f"training of {name} failed; see {config.run / f'{name}.log'}")
    lap("rankers")
    return Built(representer, metrics, base, backfill.candidates)


def _prepare(config: DemoConfig, log: RequestLog, retrieval: CausalRetrieval, learned: NDArray[np.int64]) -> Backfill:
    candidates = fill_candidates(retrieval, log, learned, config.candidates)
    return Backfill(log, candidates, served_states(log, learned, candidates.slates, WorkerConfig.max_rows))


def _fit(engine: GemEngine, log: RequestLog, requests: NDArray[np.int64]) -> tuple[Autoencoder, list[float]]:
    found = pair_embeddings(engine, log, requests)
    autoencoder = fit_autoencoder(found, AutoencoderConfig(found.shape[1]))
    return autoencoder, autoencoder.unexplained(torch.from_numpy(found))


def _write_table(
    config: DemoConfig, log: RequestLog, backfill: Backfill, representer: Representer, first_ms: int
) -> None:
    earlier = log.between(None, first_ms)
    num = len(log.candidate_indices(earlier)[0])
    logits = np.concatenate([part.logits for part in backfill.augmented])
    table = RankerTable(
        log,
        np.concatenate([earlier, backfill.candidates.requests]),
        join([nothing(num, representer.layout), *backfill.features]),
        teacher=np.concatenate([np.zeros((num, logits.shape[1])), 1 / (1 + np.exp(-logits))]).astype(np.float32),
        has_teacher=np.concatenate([np.zeros(num, dtype=bool), np.ones(len(logits), dtype=bool)]),
    )
    write_table(config.run / "table.npz", table, representer.layout, representer.version)


def _train_ranker(config: DemoConfig, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "specrank", "downstream", "train", "--data", str(config.data)]
    command += ["--table", str(config.run / "table.npz"), "--out", str(config.rankers / name)]
    command += ["--no-fm"] if name == CONTROL else []
    with open(config.run / f"{name}.log", "wb") as log_file:
        return subprocess.Popen(command, stdout=log_file, stderr=subprocess.STDOUT)
