"""The HTTP ranking API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import orjson
import redis
from fastapi import FastAPI, Request, Response

from downstream.metrics import ApiMetrics
from downstream.publisher import ServedPublisher
from downstream.registry import Registry
from downstream.service import BadRequestError, RankService, parse
from downstream.settings import ApiSettings
from downstream.store_guard import guarded_client
from streams.log import ActivityLog
from streams.requests import RankRequest

JSON = "application/json"
EXAMPLE_REQUEST = {
    "user_id": 712,
    "surface": "1",
    "candidates": [5239, 6831, 2555],
    "objective": "is_click",
    "top": 2,
    "time_ms": 1652022000000,
}
EXAMPLE_RESPONSE = {
    "request_id": "5f0c",
    "surface": "1",
    "objective": "is_click",
    "variant": "ranker",
    "model": "9b1c2f0a77d3e415",
    "fm_version": "3f60f8c2a9d14e7b",
    "degraded": False,
    "cold_user": False,
    "history_events": 41,
    "timings_ms": {"fetch": 0.41, "encode": 0.35, "score": 0.62, "total": 1.38},
    "candidates": [
        {
            "ad_id": 5239,
            "score": 0.61,
            "probabilities": {"is_click": 0.61, "long_view": 0.42, "is_like": 0.02},
            "level": "pair_fresh",
            "age_ms": 5_400_000,
            "known": True,
        }
    ],
}

logger = logging.getLogger(__name__)


def create_app(settings: ApiSettings, log: ActivityLog) -> FastAPI:
    """The application of one process.

    Args:
        settings: of the process.
        log: where served requests are published.

    Raises:
        streams.artifact.ArtifactError: a ranker is missing or damaged.
    """
    client = guarded_client(settings)
    metrics = ApiMetrics()
    registry = Registry(settings.rankers, client, settings.default_variant)
    service = RankService(registry, metrics)
    publisher = ServedPublisher(log, metrics)
    # One thread: one core per process, and the event loop stays free for health checks while a heavy request scores.
    pool = ThreadPoolExecutor(1, thread_name_prefix="rank")
    pending = 0

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(_watch(registry, settings.reload_s))
        yield
        watch.cancel()
        pool.shutdown()
        publisher.close()

    app = FastAPI(title="specrank", version="1", lifespan=lifespan)

    def answer(body: bytes) -> bytes:
        request = parse(body)
        result = service.rank(request)
        if not request.shadow:
            publisher.put(result.served)
        return orjson.dumps(result.body)

    @app.post("/v1/rank", response_class=Response, responses=_responses(), openapi_extra=_request_schema())
    async def rank(request: Request) -> Response:
        """Ranks the candidates of a user on a surface, best first.

        Each candidate carries the level and age of the embedding it was scored with. Unknown users and ads are ranked as cold and
        flagged; `degraded` says that the store could not be read.
        """
        nonlocal pending
        if pending >= settings.max_pending:
            metrics.refused(503)
            return _error(503, f"{pending} requests are waiting already; try again", {"Retry-After": "1"})
        pending += 1
        metrics.pending.set(pending)
        try:
            body = await request.body()
            return Response(await asyncio.get_running_loop().run_in_executor(pool, answer, body), media_type=JSON)
        except BadRequestError as error:
            metrics.refused(422)
            return _error(422, str(error))
        finally:
            pending -= 1
            metrics.pending.set(pending)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """Rankers are loaded. A store that is down degrades answers, but does not take the process out of service."""
        try:
            await asyncio.get_running_loop().run_in_executor(None, client.ping)
            store = "up"
        except (redis.RedisError, OSError):
            store = "down"
        models = {name: registry.get(name).runtime.version for name in registry.names}
        return Response(orjson.dumps({"status": "ready", "store": store, "models": models}), media_type=JSON)

    @app.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    return app


async def _watch(registry: Registry, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await asyncio.get_running_loop().run_in_executor(None, registry.refresh)
        except Exception:  # a watcher that dies would freeze the models silently
            logger.exception("looking for new rankers failed")


def _error(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps({"detail": detail}), status_code=status, media_type=JSON, headers=headers)


def _request_schema() -> dict[str, Any]:
    (schema,), components = msgspec.json.schema_components([RankRequest], ref_template="#/components/schemas/{name}")
    body = components.get("RankRequest", schema)
    return {"requestBody": {"required": True, "content": {JSON: {"schema": body, "example": EXAMPLE_REQUEST}}}}


def _responses() -> dict[int | str, dict[str, Any]]:
    bad = {"detail": "unknown surface 'home'; legal values: 0, 1, 2"}
    return {
        200: {"description": "Ranked candidates", "content": {JSON: {"example": EXAMPLE_RESPONSE}}},
        422: {
            "description": "A value outside the schema, named with the legal ones",
            "content": {JSON: {"example": bad}},
        },
        503: {"description": "Too many requests are waiting"},
    }
