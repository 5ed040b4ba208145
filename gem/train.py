"""Training of GEM: one pass over the log in the order of its days, so that each day is predicted before it is learned."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from tqdm import tqdm

from gem.batch import TensorBatch
from gem.checkpoint import load_resume, save_resume
from gem.examples import RequestLog
from gem.metrics import Metrics, evaluate
from gem.model import Gem
from streams.artifact import ArtifactError

DAY_MS = 86_400_000
EVAL_BATCH = 1024
OnDay = Callable[[int, NDArray[np.int64]], None]


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Attributes:
        batch: requests per step.
        learning_rate: peak of Adam's rate, after a linear warm-up and before a cosine decay.
        table_learning_rate: the same for embedding tables.
        final_rate: share of the peak that is left at the end.
        warmup: steps.
        weight_decay: of dense weights.
        clip: gradient norm of dense weights.
        objective_weights: loss weight per objective; 1 where shorter.
        seed: of shuffling and dropout.
    """

    batch: int = 512
    learning_rate: float = 3e-3
    table_learning_rate: float = 3e-3
    final_rate: float = 0.1
    warmup: int = 40
    weight_decay: float = 1e-4
    clip: float = 1.0
    objective_weights: tuple[float, ...] = ()
    seed: int = 0


def days_of(log: RequestLog, requests: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Splits requests, in order of time, by the schema's local day."""
    local = log.times_ms[requests] + round(log.encoder.schema.utc_offset_hours * 3_600_000)
    return np.split(requests, np.flatnonzero(np.diff(local // DAY_MS)) + 1)


def prepare_allocator() -> None:
    """Lets glibc keep freed memory: a training step frees and asks for the same large buffers, and page faults cost more than the maths."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 2**30)
        libc.mallopt(m_trim_threshold, 2**30)
    except (OSError, AttributeError):
        pass  # another C library: slower, not wrong


class Trainer:
    """Trains a model; owns the optimiser and the schedule."""

    def __init__(self, model: Gem, log: RequestLog, config: TrainConfig) -> None:
        self.model, self.log, self.config = model, log, config
        self.step = 0
        weights = [*config.objective_weights, *[1.0] * len(log.encoder.schema.objectives)]
        self.weights = torch.tensor(weights[: len(log.encoder.schema.objectives)])
        tables = list(model.tables.parameters())
        known = {id(p) for p in tables}
        self.dense = [p for p in model.parameters() if id(p) not in known]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": tables, "peak": config.table_learning_rate, "weight_decay": 0.0},
                {"params": self.dense, "peak": config.learning_rate, "weight_decay": config.weight_decay},
            ],
            lr=config.learning_rate,
            fused=True,
        )

    def fit(
        self,
        days: Sequence[NDArray[np.int64]],
        *,
        before_day: OnDay | None = None,
        resume: Path | None = None,
        progress: bool = True,
    ) -> None:
        """One pass over the days.

        Args:
            days: requests of each day, in order.
            before_day: called with (day index, its requests) before the day is learned; the model is in eval mode.
            resume: where the state is kept after each day; where it exists already, training goes on from it.
            progress: whether to show a bar.
        """
        prepare_allocator()
        total = sum(-(-len(day) // self.config.batch) for day in days)
        start = self._restore(resume) if resume is not None and resume.exists() else 0
        with tqdm(
            total=total, initial=self.step, desc="gem", unit="step", disable=not progress, mininterval=1.0
        ) as bar:
            for index in range(start, len(days)):
                if before_day is not None:
                    self.model.eval()
                    before_day(index, days[index])
                self.model.train()
                torch.manual_seed(self.config.seed * 1_000_003 + index)
                rng = np.random.default_rng([self.config.seed, index])
                for requests in self.log.batches(days[index], self.config.batch, self.model.config.history, rng=rng):
                    loss = self._update(requests, total)
                    bar.update()
                    bar.set_postfix(day=f"{index + 1}/{len(days)}", loss=f"{loss:.3f}", refresh=False)
                if resume is not None:
                    self._save(resume, index + 1)
        self.model.eval()

    def _update(self, requests: NDArray[np.int64], total: int) -> float:
        config = self.config
        warm = min(1.0, (self.step + 1) / config.warmup)
        decay = config.final_rate + (1 - config.final_rate) * 0.5 * (1 + np.cos(np.pi * self.step / max(total, 1)))
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * warm * decay
        batch, labels = self.log.encode(requests, self.model.config.history)
        loss = self._loss(self.model(TensorBatch.of(batch)).logits, torch.from_numpy(labels))
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.dense, config.clip)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return (each.mean(0) * self.weights).sum()

    def _save(self, path: Path, next_day: int) -> None:
        save_resume(
            path,
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "next_day": next_day,
                "config": self.config,
            },
        )

    def _restore(self, path: Path) -> int:
        state = load_resume(path)
        if state["config"] != self.config:
            raise ArtifactError(
                f"{path} was written by a run with {state['config']}, not {self.config}; remove it to start anew"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])
        return int(state["next_day"])


@torch.inference_mode()
def predict(
    model: Gem, log: RequestLog, requests: NDArray[np.int64], *, frozen_ms: int | None = None
) -> NDArray[np.float32]:
    """Probabilities of the shown candidates of requests, f4[c, K], in the requests' order."""
    model.eval()
    found = []
    for part in log.batches(requests, EVAL_BATCH, model.config.history):
        batch, _ = log.encode(part, model.config.history, frozen_ms=frozen_ms)
        found.append(model(TensorBatch.of(batch)).logits.sigmoid().numpy())
    return np.concatenate(found) if found else np.zeros((0, model.vocabulary.num_objectives), dtype=np.float32)


def evaluate_predictions(
    log: RequestLog,
    requests: NDArray[np.int64],
    probabilities: NDArray[np.float32],
    base_rates: NDArray[np.float32],
    *,
    frozen: NDArray[np.float32] | None = None,
    surface: str | None = None,
) -> dict[str, Metrics]:
    """Metrics per objective of predictions for the shown candidates of requests; of one surface where given."""
    at, local = log.candidate_indices(requests)
    users = log.users[requests][local]
    keep = np.ones(len(at), dtype=bool)
    if surface is not None:
        keep = log.surfaces[requests][local] == log.encoder.schema.surface_index(surface)
    return {
        objective: evaluate(
            log.labels[at, k][keep],
            probabilities[keep, k],
            float(base_rates[k]),
            groups=users[keep],
            frozen_probabilities=None if frozen is None else frozen[keep, k],
        )
        for k, objective in enumerate(log.encoder.schema.objectives)
    }


def base_rates(log: RequestLog, requests: NDArray[np.int64]) -> NDArray[np.float32]:
    """Label rate per objective over requests, f4[K]."""
    return log.labels[log.candidate_indices(requests)[0]].mean(0)


def per_surface(metrics: Callable[[str], dict[str, Metrics]], surfaces: Sequence[str]) -> dict[str, dict[str, Any]]:
    """{surface: {objective: metrics}} of the surfaces that occur."""
    found = {surface: metrics(surface) for surface in surfaces}
    return {s: {o: m.to_dict() for o, m in by.items()} for s, by in found.items() if next(iter(by.values())).n}
