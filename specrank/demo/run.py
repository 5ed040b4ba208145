"""`make demo`: from the log on disk to a report, and on request to a system that is left running."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from downstream.serve import bind
from downstream.train import RankerTable, predict_ranker
from downstream.weights import load_weights
from gem.examples import RequestLog
from gem.train import DAY_MS
from kernels.host import use_one_core
from solaris.backfill import part_of, served_features, served_states
from solaris.worker import TOPICS, WorkerConfig
from specrank.demo.build import Built, Candidates, build, fill_candidates
from specrank.demo.config import CONTROL, RANKER, DemoConfig
from specrank.demo.replay import HttpPost, Replay, Replayed
from specrank.demo.report import coverage, percentiles, plot, served_metrics, show, write
from specrank.demo.services import api, embedded_store, log_address, start_worker
from streams.dataset import Dataset, load_dataset
from streams.log.address import open_log
from streams.retrieval import CausalRetrieval
from streams.schema import SchemaError
from streams.user_log import UserLog

SERVE_PORT = 8000
MARKER = ".specrank-demo"  # lies in a folder that a demo made, and may empty


@dataclass
class Stages:
    """Seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)
    _then: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """Ends a stage."""
        now = time.perf_counter()
        self.seconds[name] = round(now - self._then, 1)
        self._then = now


def run_demo(config: DemoConfig, *, serve: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Runs the demo and returns the report.

    Args:
        config: recipe.
        serve: leave the system running until interrupted.
        console: where to print.

    Raises:
        streams.schema.SchemaError: the data are missing or do not fit.
        downstream.serve.PortBusyError: with `serve`, the port is taken.
    """
    console = console or Console()
    if serve:
        bind("127.0.0.1", SERVE_PORT).close()  # find out now, not in five minutes
    use_one_core()
    stages = Stages()
    dataset = load_dataset(config.data)
    _empty(config.run)
    log = RequestLog.of(dataset)
    _, test_ms = dataset.schema.split_ms()
    retrieval = CausalRetrieval(dataset, test_ms - config.solaris_days * DAY_MS)
    stages.lap("load")
    built = build(config, log, retrieval, console.print, stages.lap)
    test = log.between(test_ms, None)
    chosen = test[_sampled(log.users[test], config.user_share)]
    filled = fill_candidates(retrieval, log, chosen, config.candidates)
    stages.lap("candidates")
    with embedded_store() as store:
        broker = open_log(log_address(config, store.url), TOPICS)
        with start_worker(config, store.url) as worker, api(config, store.url) as url:
            replay = Replay(config, dataset, log, chosen, filled.slates, broker, HttpPost(url), worker.check)
            events = replay.load_history(UserLog(store.client()), test_ms)
            console.print(
                f"replay: {len(chosen):,} requests of {len(np.unique(log.users[chosen])):,} users, {events:,} earlier events"
            )
            stages.lap("services")
            replayed = replay.run()
            fm_calls = _metric(url, "specrank_fm_calls")
            stages.lap("replay")
            report = _report(config, log, built, filled, replayed, fm_calls)
            plot(config.run / "report.png", log, replayed)
            stages.lap("report")
            report["seconds"] = stages.seconds | {"total": round(sum(stages.seconds.values()), 1)}
            write(config.run / "report.json", report)
            show(report, console)
            console.print(f"saved {config.run}/report.json and {config.run}/report.png")
            if serve:
                with api(config, store.url, SERVE_PORT) as address:
                    _wait_for_person(console, address, dataset, filled, log)
    return report


def _empty(folder: Path) -> None:
    """Makes the run's folder, or empties the one of an earlier run; never a folder that something else made."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
        raise SchemaError(f"folder {folder} is not empty and not of an earlier demo; choose another with --run")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()


def _sampled(users: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Whether each user is of the sample: by identity, so that a user is in it with all of his requests."""
    sampled: NDArray[np.bool_] = (users >> np.uint64(32)).astype(np.float64) < share * 2**32
    return sampled


def _report(
    config: DemoConfig, log: RequestLog, built: Built, filled: Candidates, replayed: Replayed, fm_calls: int
) -> dict[str, Any]:
    frozen = _frozen_predictions(config, log, built, filled)
    return {
        **built.metrics,
        "served_with": served_metrics(log, replayed, replayed.with_fm, frozen[RANKER], built.base),
        "served_without": served_metrics(log, replayed, replayed.without_fm, frozen[CONTROL], built.base),
        "coverage": coverage(replayed.level_counts.sum(0)),
        "coverage_shown": coverage(np.bincount(replayed.shown_levels, minlength=replayed.level_counts.shape[1])),
        "latency_ms": percentiles(replayed.latency_ms),
        "server_ms": percentiles(replayed.server_ms),
        "fm_calls_on_path": fm_calls,
        "replay": {
            "requests": len(replayed.requests),
            "users": len(np.unique(log.users[replayed.requests])),
            "candidates": config.candidates,
            "log": "embedded Valkey Streams" if config.kafka is None else "Kafka and Faust",
            "candidates_from": "causal retrieval (popularity and affinity), shown ads put in",
            "requests_per_s": round(len(replayed.requests) / replayed.seconds, 1),
            "metrics_use": "shown ads only",
            "gauc_uses": "histories and store frozen at the split; with histories that go on it is invalid",
        },
    }


def _frozen_predictions(
    config: DemoConfig, log: RequestLog, built: Built, filled: Candidates
) -> dict[str, NDArray[np.float32]]:
    """Predictions for the replayed requests in a world where nothing was learned after the split, for gAUC."""
    _, test_ms = log.encoder.schema.split_ms()
    of_sample = np.isin(log.users[built.candidates.requests], log.users[filled.requests])
    requests = np.concatenate([built.candidates.requests[of_sample], filled.requests])
    slates = np.concatenate([built.candidates.slates[of_sample], filled.slates])
    states = served_states(log, requests, slates, WorkerConfig.max_rows, frozen_ms=test_ms)
    part = part_of(states, log, requests, filled.requests)
    features = served_features(log, filled.requests, slates, part, built.representer)
    layout = built.representer.layout
    empty = np.zeros((len(features.level), layout.num_objectives), dtype=np.float32)
    table = RankerTable(log, filled.requests, features, empty, np.zeros(len(empty), dtype=bool), frozen_ms=test_ms)
    return {
        name: predict_ranker(load_weights(config.rankers / name, log.encoder, layout), table)
        for name in (RANKER, CONTROL)
    }


def _metric(url: str, name: str) -> int:
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return int(float(line.split()[1]))
    raise RuntimeError(f"the API has no metric {name}")


def _wait_for_person(console: Console, address: str, dataset: Dataset, filled: Candidates, log: RequestLog) -> None:
    request = filled.requests[-1]
    user = int(dataset.raw_users[log.events[log.offsets[request]]])
    ads = [dataset.raw_ads[ad] for ad in filled.slates[-1][:5].tolist()]
    body = f'{{"user_id": {user}, "surface": "{dataset.schema.surfaces[log.surfaces[request]]}", "candidates": {ads}'
    body += f', "time_ms": {int(log.times_ms[request]) + 3_600_000}}}'
    console.print(f"\nserving at {address} (docs at {address}/docs); try:")
    console.print(f"  curl -s {address}/v1/rank -d '{body}'", soft_wrap=True, highlight=False)
    console.print("Ctrl-C ends it.")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
