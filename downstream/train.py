"""Training of a ranker on features as served, with FM soft labels through an auxiliary head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from downstream.inputs import many_requests
from downstream.ranker import Ranker, RankerConfig
from gem.examples import RequestLog
from gem.train import prepare_allocator
from loopfm.distill import DistillConfig, distillation_loss
from streams.features import FmFeatures, FmLayout

EVAL_BATCH = 1024


@dataclass(frozen=True)
class RankerTable:
    """Training data of a ranker: requests, and for each shown ad what the FM gave.

    Attributes:
        log: requests, labels and histories.
        requests: i8[R], in order of time.
        features: FM features as served, aligned with the shown ads of `requests`, C in all; `user` f4[C, U].
        teacher: f4[C, K]; FM probabilities. has_teacher: bool [C].
        frozen_ms: histories end here at the latest, for per-user metrics.
    """

    log: RequestLog
    requests: NDArray[np.int64]
    features: FmFeatures
    teacher: NDArray[np.float32]
    has_teacher: NDArray[np.bool_]
    frozen_ms: int | None = None

    def batch(
        self, part: NDArray[np.int64], history: int
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, NDArray[np.int64]]:
        """Inputs of some requests (indices into `requests`), their candidates' mask [B, N], and the shown ads' indices."""
        requests = self.requests[part]
        encoded, _ = self.log.encode(requests, history, frozen_ms=self.frozen_ms)
        counts = self.log.offsets[requests + 1] - self.log.offsets[requests]
        starts = self._starts()[part]
        index = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        inputs, mask = many_requests(encoded, take(self.features, index), self.log.encoder.num_surfaces)
        return {name: torch.from_numpy(array) for name, array in inputs.items()}, torch.from_numpy(mask), index

    def labels_of(self) -> NDArray[np.float32]:
        """Labels of the shown ads, f4[C, K]."""
        return self.log.labels[self.log.candidate_indices(self.requests)[0]]

    def _starts(self) -> NDArray[np.int64]:
        counts = self.log.offsets[self.requests + 1] - self.log.offsets[self.requests]
        return np.cumsum(counts) - counts


def take(features: FmFeatures, index: NDArray[np.int64]) -> FmFeatures:
    """Some rows of features of many requests."""
    return FmFeatures(
        features.pair[index],
        features.same_surface[index],
        features.level[index],
        features.age_ms[index],
        features.user[index],
    )


def join(parts: list[FmFeatures]) -> FmFeatures:
    """Features one after the other; each `user` must be aligned with its candidates."""
    return FmFeatures(
        *(
            np.concatenate([getattr(p, name) for p in parts])
            for name in ("pair", "same_surface", "level", "age_ms", "user")
        )
    )


def nothing(num: int, layout: FmLayout) -> FmFeatures:
    """Features of requests from before Solaris ran: level none, aligned with `num` candidates."""
    empty = FmFeatures.none(num, layout)
    return FmFeatures(
        empty.pair, empty.same_surface, empty.level, empty.age_ms, np.zeros((num, layout.user_dim), dtype=np.float32)
    )


@dataclass(frozen=True)
class RankerTrainConfig:
    """How to train: requests per step, passes, Adam's peak rate (warm-up, cosine decay), seed, distillation."""

    batch: int = 512
    passes: int = 2
    learning_rate: float = 3e-3
    warmup: int = 40
    weight_decay: float = 1e-4
    seed: int = 0
    distill: DistillConfig = DistillConfig()


def train_ranker(
    table: RankerTable,
    layout: FmLayout,
    config: RankerConfig,
    training: RankerTrainConfig,
    *,
    name: str = "ranker",
    progress: bool = True,
) -> Ranker:
    """Trains a ranker; the same table and configuration give the same weights."""
    prepare_allocator()
    torch.manual_seed(training.seed)
    rng = np.random.default_rng(training.seed)
    model = Ranker(config, table.log.encoder, layout).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay, fused=True
    )
    labels, teacher = torch.from_numpy(table.labels_of()), torch.from_numpy(table.teacher)
    has_teacher = torch.from_numpy(table.has_teacher)
    total = training.passes * -(-len(table.requests) // training.batch)
    with tqdm(total=total, desc=name, unit="step", disable=not progress, mininterval=1.0) as bar:
        for step, part in enumerate(_batches(table, training, config.history, rng)):
            warm = min(1.0, (step + 1) / training.warmup)
            for group in optimizer.param_groups:
                group["lr"] = training.learning_rate * warm * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * step / total)))
            inputs, mask, index = table.batch(part, config.history)
            if config.use_fm:
                _drop_fm(inputs, config.fm_dropout, rng)
            serving, auxiliary = model.with_auxiliary(inputs, training.distill.gradient_scale)
            loss = distillation_loss(
                serving[mask], auxiliary[mask], labels[index], teacher[index], has_teacher[index], training.distill
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model.eval()


@torch.inference_mode()
def predict_ranker(model: Ranker, table: RankerTable) -> NDArray[np.float32]:
    """Probabilities of the shown ads of a table, f4[C, K]."""
    found = []
    for start in range(0, len(table.requests), EVAL_BATCH):
        part = np.arange(start, min(start + EVAL_BATCH, len(table.requests)))
        inputs, mask, _ = table.batch(part, model.config.history)
        found.append(model(inputs)[mask].sigmoid().numpy())
    return np.concatenate(found) if found else np.zeros((0, model.num_objectives), dtype=np.float32)


def _batches(
    table: RankerTable, training: RankerTrainConfig, history: int, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    for _ in range(training.passes):
        for requests in table.log.batches(table.requests, training.batch, history, rng=rng):
            yield np.searchsorted(table.requests, requests)


def _drop_fm(inputs: dict[str, torch.Tensor], share: float, rng: np.random.Generator) -> None:
    """Makes some requests look as in an outage of the store: level none, zeros."""
    lost = torch.from_numpy(rng.random(len(inputs["surface"])) < share)
    for name in ("fm_user", "fm_pair", "fm_state"):
        inputs[name][lost] = 0.0
    inputs["fm_state"][lost, :, 0] = 1.0
