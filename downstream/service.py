"""Ranking of one request: route, fetch, encode, score, explain. No HTTP here."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from downstream.fetch import Fetched
from downstream.inputs import one_request
from downstream.metrics import ApiMetrics
from downstream.registry import Registry, Variant
from downstream.router import route
from streams.events import time_problem
from streams.ids import id64, ids64
from streams.levels import Level
from streams.requests import RankRequest, ServedRequest

LEVEL_LABELS = tuple(level.label for level in Level)


class BadRequestError(ValueError):
    """A request that cannot be answered; the message names the field and the legal values."""


@dataclass(frozen=True)
class Answer:
    """The response as plain values, and what the served log gets."""

    body: dict[str, Any]
    served: ServedRequest


_decoder = msgspec.json.Decoder(RankRequest)


def parse(body: bytes) -> RankRequest:
    """Parses the body of a request.

    Raises:
        BadRequestError: naming the field and what is legal.
    """
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise BadRequestError(f"body: {error}; legal fields: {', '.join(RankRequest.__struct_fields__)}") from error


class RankService:
    """Answers requests of one process."""

    def __init__(self, registry: Registry, metrics: ApiMetrics) -> None:
        self.registry, self.metrics = registry, metrics

    def rank(self, request: RankRequest) -> Answer:
        """Ranks a request's candidates.

        Raises:
            BadRequestError: an unknown surface, objective or variant, an illegal id or time, or a candidate given twice.
        """
        start = time.perf_counter()
        try:
            variant = route(self.registry, request)
            schema = variant.runtime.encoder.schema
            surface = schema.surface_index(request.surface)
            objective = schema.objective_index(request.objective or schema.objectives[0])
            user, ads = id64(request.user_id), ids64(request.candidates)
        except ValueError as error:
            raise BadRequestError(str(error)) from error
        now_ms = time.time_ns() // 1_000_000 if request.time_ms is None else request.time_ms
        problem = time_problem(now_ms)
        if problem:
            raise BadRequestError(problem)
        if len(np.unique(ads)) != len(ads):
            raise BadRequestError("candidates: an ad is given twice")
        fetched = variant.fetcher.fetch(user, surface, now_ms, ads)
        after_fetch = time.perf_counter()
        encoder = variant.runtime.encoder
        offsets = np.array([0, len(fetched.history)])
        users, times = np.array([user], dtype=np.uint64), np.array([now_ms])
        batch = encoder.encode(
            users, np.array([surface]), times, fetched.history, offsets, ads, np.zeros(len(ads), dtype=np.int64)
        )
        inputs = one_request(batch, fetched.features, encoder.num_surfaces)
        after_encode = time.perf_counter()
        probabilities = variant.runtime.score(inputs)
        order = np.argsort(-probabilities[:, objective], kind="stable")
        end = time.perf_counter()
        timings = {
            "fetch": (after_fetch - start) * 1e3,
            "encode": (after_encode - after_fetch) * 1e3,
            "score": (end - after_encode) * 1e3,
            "total": (end - start) * 1e3,
        }
        known_user = len(fetched.history) > 0 or bool(encoder.users.find(users)[0] >= 0)
        request_id = request.request_id or uuid.uuid4().hex
        known_ads = encoder.ads.find(ads) >= 0
        answer = Answer(
            body={
                "request_id": request_id,
                "surface": request.surface,
                "objective": schema.objectives[objective],
                "variant": variant.name,
                "model": variant.runtime.version,
                "fm_version": f"{variant.runtime.meta.fm_version:016x}",
                "degraded": fetched.degraded,
                "cold_user": not known_user,
                "history_events": len(fetched.history),
                "timings_ms": {name: round(value, 3) for name, value in timings.items()},
                "candidates": self._explain(request, variant, fetched, probabilities, objective, order, known_ads),
            },
            served=ServedRequest(
                request_id=request_id,
                user=user,
                surface=surface,
                time_ms=now_ms,
                ads=ads[order].tolist(),
                scores=probabilities[order, objective].round(6).tolist(),
                levels=fetched.features.level[order].tolist(),
                ages_ms=fetched.features.age_ms[order].tolist(),
                variant=variant.name,
                model=variant.runtime.version,
                fm_version=variant.runtime.meta.fm_version,
                degraded=fetched.degraded,
            ),
        )
        self.metrics.ranked(variant.name, timings, fetched.features.level, fetched.degraded)
        return answer

    @staticmethod
    def _explain(
        request: RankRequest,
        variant: Variant,
        fetched: Fetched,
        probabilities: np.ndarray[Any, np.dtype[np.float32]],
        objective: int,
        order: np.ndarray[Any, np.dtype[np.int64]],
        known_ads: np.ndarray[Any, np.dtype[np.bool_]],
    ) -> list[dict[str, Any]]:
        objectives = variant.runtime.encoder.schema.objectives
        values = probabilities.round(6).tolist()
        levels, ages = fetched.features.level.tolist(), fetched.features.age_ms.tolist()
        return [
            {
                "ad_id": request.candidates[i],
                "score": values[i][objective],
                "probabilities": dict(zip(objectives, values[i], strict=True)),
                "level": LEVEL_LABELS[levels[i]],
                "age_ms": ages[i] if ages[i] >= 0 else None,
                "known": bool(known_ads[i]),
            }
            for i in order[: request.top].tolist()
        ]
