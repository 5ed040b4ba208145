"""The jobs behind the command line that compose several packages."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import redis
import torch

from downstream.export import save_ranker
from downstream.ranker import RankerConfig
from downstream.table_file import read_table
from downstream.train import RankerTable, RankerTrainConfig, nothing, train_ranker
from gem.checkpoint import save_model
from gem.config import GemConfig, Vocabulary
from gem.engine import GemEngine
from gem.examples import RequestLog
from gem.train import TrainConfig, Trainer, base_rates, days_of, evaluate_predictions, predict
from kernels.host import use_one_core
from loopfm.augment import Augmented, augment, pair_embeddings
from loopfm.autoencoder import AutoencoderConfig, fit_autoencoder, load_autoencoder, save_autoencoder
from loopfm.represent import Representer
from solaris.worker import GROUP
from streams.artifact import ArtifactError
from streams.dataset import load_dataset, load_schema
from streams.errors import UserError
from streams.events import ACTIVITY_TOPIC, to_epoch_ms
from streams.features import FmLayout
from streams.log.address import open_log
from streams.tools import events_of, inspect_topics, inspect_user, lines_of, produce, replay


def train_gem(data: Path, out: Path, resume: Path | None) -> None:
    """Trains GEM up to the test days; writes the artifact and prints metrics."""
    use_one_core()
    log = RequestLog.of(load_dataset(data))
    _, test_ms = log.encoder.schema.split_ms()
    config = TrainConfig()
    torch.manual_seed(config.seed)
    model = GemConfig().build(Vocabulary.of(log.encoder))
    learned, test = log.between(None, test_ms), log.between(test_ms, None)
    Trainer(model, log, config).fit(days_of(log, learned), resume=resume)
    version = save_model(out, model, log.encoder)
    online, frozen = predict(model, log, test), predict(model, log, test, frozen_ms=test_ms)
    metrics = evaluate_predictions(log, test, online, base_rates(log, learned), frozen=frozen)
    _print({"version": version, "metrics": {name: found.to_dict() for name, found in metrics.items()}})


def augment_log(data: Path, gem: Path, autoencoder: Path, out: Path) -> None:
    """Writes FM labels and representations of the days from the test split on."""
    use_one_core()
    log = RequestLog.of(load_dataset(data))
    valid_ms, test_ms = log.encoder.schema.split_ms()
    engine = GemEngine.load(gem)
    if not autoencoder.exists():
        found = pair_embeddings(engine, log, log.between(valid_ms, test_ms))
        save_autoencoder(autoencoder, fit_autoencoder(found, AutoencoderConfig(found.shape[1])))
    representer = Representer(engine, *load_autoencoder(autoencoder))
    augmented = augment(representer, log, log.between(test_ms, None))
    augmented.write(out)
    _print({"rows": len(augmented.events), "fm_version": f"{augmented.version:016x}", "written": str(out)})


def distill_ranker(data: Path, table: Path, out: Path) -> None:
    """Trains a ranker without embeddings on the whole log, with soft labels where the augmented table has them."""
    use_one_core()
    log = RequestLog.of(load_dataset(data))
    augmented = Augmented.read(table)
    requests = log.between(None, None)
    at, _ = log.candidate_indices(requests)
    teacher = np.zeros((len(at), augmented.logits.shape[1]), dtype=np.float32)
    has_teacher = np.zeros(len(at), dtype=bool)
    place = np.full(len(log.events), -1)
    place[log.events[at]] = np.arange(len(at))
    if len(augmented.events) and augmented.events.max() >= len(place):
        raise ArtifactError(
            f"{table} names event {augmented.events.max()}, the log has {len(place)}: it belongs to another log"
        )
    rows = place[augmented.events]
    teacher[rows] = 1 / (1 + np.exp(-augmented.logits))
    has_teacher[rows] = True
    layout = FmLayout(augmented.z.shape[1], 1, augmented.logits.shape[1])
    examples = RankerTable(log, requests, nothing(len(at), layout), teacher, has_teacher)
    _train_and_save(examples, layout, augmented.version, RankerConfig(use_fm=False), out)


def train_downstream(data: Path, table: Path, out: Path, *, use_fm: bool) -> None:
    """Trains a ranker on a table of served features and exports it."""
    use_one_core()
    log = RequestLog.of(load_dataset(data))
    examples, layout, fm_version = read_table(table, log)
    _train_and_save(examples, layout, fm_version, RankerConfig(use_fm=use_fm), out)


def produce_lines(address: str, source: str, data: Path) -> None:
    """Publishes JSON lines; ends with code 1 if any was refused."""
    schema = load_schema(data)
    with lines_of(source) as lines:
        result = produce(open_log(address, (ACTIVITY_TOPIC,)), lines, schema)
    _print({"published": result.published, "refused": result.refused, "first_reasons": result.reasons})
    if result.refused:
        sys.exit(1)


def replay_log(address: str, data: Path, speed: float | None, start: str | None, end: str | None) -> None:
    """Publishes the events of a log."""
    dataset = load_dataset(data)
    first, last = (None if text is None else _moment(text) for text in (start, end))
    _print({"published": replay(open_log(address, (ACTIVITY_TOPIC,)), events_of(dataset, first, last), speed)})


def _moment(text: str) -> int:
    try:
        return to_epoch_ms(datetime.fromisoformat(text))
    except ValueError as error:
        raise UserError(f"{text!r} is no moment such as 2022-05-05T00:00:00+08:00: {error}") from error


def inspect_streams(address: str, store: str | None, user: str | None, data: Path) -> None:
    """Prints topics and, where asked for, a user."""
    found: dict[str, object] = {"topics": inspect_topics(open_log(address), GROUP)}
    if user is not None:
        if store is None:
            raise UserError("--user needs --store, the address of the store")
        found["user"] = inspect_user(redis.Redis.from_url(store), user, load_schema(data))
    _print(found)


def _train_and_save(examples: RankerTable, layout: FmLayout, fm_version: int, config: RankerConfig, out: Path) -> None:
    ranker = train_ranker(examples, layout, config, RankerTrainConfig(), name=out.name)
    version = save_ranker(out, ranker, examples.log.encoder, layout, fm_version)
    _print({"version": version, "written": str(out)})


def _print(result: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(result, indent=2, default=float) + "\n")
