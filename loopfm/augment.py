"""The augmentation pass (arXiv 2502.17494): one FM pass over a log writes labels and representations, each example once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from gem.engine import GemEngine
from gem.examples import RequestLog
from loopfm.represent import Representer
from streams.artifact import ArtifactError
from streams.catalogue import read_parquet

BATCH = 1024


@dataclass(frozen=True)
class Augmented:
    """FM outputs for the shown ads of requests.

    Attributes:
        events: i8[c]; index of each impression in the dataset.
        logits: f4[c, K].
        z: f4[c, z_dim].
        version: FM version; a table holds one.
    """

    events: NDArray[np.int64]
    logits: NDArray[np.float32]
    z: NDArray[np.float32]
    version: int

    def write(self, path: Path) -> None:
        """Writes Parquet: event, logit_<k>, z (list), version."""
        logits = {f"logit_{k}": self.logits[:, k] for k in range(self.logits.shape[1])}
        version = np.full(len(self.events), self.version, dtype=np.uint64)
        pl.DataFrame({"event": self.events, **logits, "z": self.z, "version": version}).write_parquet(path)

    @classmethod
    def read(cls, path: Path) -> Augmented:
        """Reads what `write` wrote.

        Raises:
            ArtifactError: the table mixes FM versions, or is no such table.
        """
        frame = read_parquet(path)
        logits = [name for name in frame.columns if name.startswith("logit_")]
        if not logits or not {"event", "z", "version"} <= set(frame.columns):
            raise ArtifactError(
                f"{path} is no augmented table: it needs event, logit_*, z and version; found {frame.columns}"
            )
        versions = frame["version"].unique()
        if len(versions) > 1:
            raise ArtifactError(
                f"{path} mixes {len(versions)} FM versions; a sequence of representations must hold one"
            )
        return cls(
            frame["event"].to_numpy(),
            frame.select(logits).to_numpy().astype(np.float32),
            np.array(frame["z"].to_list(), dtype=np.float32),
            int(versions[0]) if len(versions) else 0,
        )


def augment(representer: Representer, log: RequestLog, requests: NDArray[np.int64]) -> Augmented:
    """Runs the FM over requests, each with its user's history strictly before it.

    The FM should not have learned these labels: run it over days that come after its training.
    """
    engine, z_dim = representer.engine, representer.layout.z_dim
    vectors = []
    for part in log.batches(requests, BATCH, engine.history):
        batch, _ = log.encode(part, engine.history)
        vectors.append(representer.represent(batch)[1])
    at, _ = log.candidate_indices(requests)
    found = np.concatenate(vectors) if vectors else np.zeros((0, representer.layout.pair_dim), np.float32)
    return Augmented(log.events[at], found[:, z_dim:-1], found[:, :z_dim], representer.version)


def pair_embeddings(engine: GemEngine, log: RequestLog, requests: NDArray[np.int64]) -> NDArray[np.float32]:
    """FM embeddings of the shown ads of requests, f4[c, pair_dim]: what an autoencoder is fitted on."""
    pairs = []
    for part in log.batches(requests, BATCH, engine.history):
        batch, _ = log.encode(part, engine.history)
        pairs.append(engine.embed_pairs(engine.encode_request(batch), batch)[0])
    return np.concatenate(pairs)
