"""Loaded rankers by variant, swapped while requests go on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import redis

from downstream.fetch import Fetcher
from downstream.runtime import RankerRuntime
from streams.artifact import MANIFEST, ArtifactError
from streams.schema import UnknownValueError

STAGING = (".writing", ".old")  # an artifact that is being replaced

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Variant:
    """A ranker and the reader of the store that belongs to its FM version."""

    name: str
    runtime: RankerRuntime
    fetcher: Fetcher


class Registry:
    """Rankers of a folder, one artifact per sub-folder; the sub-folder's name is the variant."""

    def __init__(self, folder: Path, client: redis.Redis, default: str) -> None:
        """Loads all rankers.

        Raises:
            ArtifactError: the folder holds none, a ranker is damaged, or the default is missing.
        """
        self._folder, self._client, self.default = folder, client, default
        self._seen: dict[str, float] = {}
        self._variants: dict[str, Variant] = {}
        for name in self._names():
            self._variants[name] = self._load(name)
        if default not in self._variants:
            found = ", ".join(sorted(self._variants)) or "none"
            raise ArtifactError(f"{folder} holds no ranker {default!r}; found: {found}")

    @property
    def names(self) -> tuple[str, ...]:
        """Variants that can be asked for."""
        return tuple(sorted(self._variants))

    def get(self, name: str | None) -> Variant:
        """The variant of that name, or the default.

        Raises:
            UnknownValueError: naming the variants.
        """
        found = self._variants.get(name or self.default)
        if found is None:
            raise UnknownValueError("variant", name, self.names)
        return found

    def refresh(self) -> None:
        """Loads rankers that are new or changed; one that is refused leaves the old version serving."""
        for name in self._names():
            if self._stamp(name) == self._seen.get(name):
                continue
            try:
                self._variants = {**self._variants, name: self._load(name)}
                logger.info("serving ranker %s at version %s", name, self._variants[name].runtime.version)
            except ArtifactError as error:
                logger.error("refused ranker %s, the old version keeps serving: %s", name, error)

    def _names(self) -> list[str]:
        if not self._folder.is_dir():
            raise ArtifactError(f"folder of rankers {self._folder} does not exist")
        return sorted(
            path.parent.name for path in self._folder.glob(f"*/{MANIFEST}") if not path.parent.name.endswith(STAGING)
        )

    def _stamp(self, name: str) -> float | None:
        try:
            return (self._folder / name / MANIFEST).stat().st_mtime_ns
        except FileNotFoundError:
            return self._seen.get(name)  # being replaced at this moment

    def _load(self, name: str) -> Variant:
        stamp = self._stamp(name)
        runtime = RankerRuntime.load(self._folder / name)
        if stamp is not None:
            self._seen[name] = stamp
        meta = runtime.meta
        return Variant(name, runtime, Fetcher(self._client, meta.layout, meta.fm_version, meta.history))
