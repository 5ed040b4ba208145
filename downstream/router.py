"""Which variant answers a request: the one it asks for, else the default. The only place where that is decided."""

from __future__ import annotations

from downstream.registry import Registry, Variant
from streams.requests import RankRequest


def route(registry: Registry, request: RankRequest) -> Variant:
    """The variant for a request.

    Raises:
        streams.schema.UnknownValueError: it asks for a variant that is not loaded.
    """
    return registry.get(request.variant)
