"""`Representer`: FM outputs as the vectors that the store holds and rankers read.

Shapes: B requests, C candidates, U user width, P stored pair width (see `streams.features`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gem.engine import GemEngine
from loopfm.autoencoder import Autoencoder, load_autoencoder
from streams.encode import RequestBatch
from streams.features import FmLayout

FloatArray = NDArray[np.float32]
AGGREGATE_SAMPLE = (
    8  # pairs of a slate whose mean stands for the user: those with the smallest ids, so that any order gives the same
)


class Representer:
    """An FM and the autoencoder of its pair embeddings. `version` names both, so that no sequence mixes two of either."""

    def __init__(self, engine: GemEngine, autoencoder: Autoencoder, autoencoder_version: str) -> None:
        self.engine, self.autoencoder = engine, autoencoder
        both = f"{engine.version:016x}:{autoencoder_version}".encode()
        self.version = int.from_bytes(hashlib.sha256(both).digest()[:8], "little")
        config = engine.model.config
        if autoencoder.config.input_dim != config.pair_dim:
            raise ValueError(
                f"the autoencoder reads {autoencoder.config.input_dim} entries, the FM gives {config.pair_dim}"
            )
        objectives = engine.model.vocabulary.num_objectives
        self.layout = FmLayout(autoencoder.config.z_dim, config.user_dim, objectives)

    @classmethod
    def load(cls, gem: Path, autoencoder: Path) -> Representer:
        """Loads both artifacts.

        Raises:
            streams.artifact.ArtifactError: naming the file and what is wrong.
        """
        return cls(GemEngine.load(gem), *load_autoencoder(autoencoder))

    def represent(self, batch: RequestBatch) -> tuple[FloatArray, FloatArray]:
        """(user embeddings f4[B, U], pair vectors f4[C, P]) of a batch: f_R once a request, f_C once a pair."""
        state = self.engine.encode_request(batch)
        pair, logits = self.engine.embed_pairs(state, batch)
        with torch.inference_mode():
            z = self.autoencoder.encode(torch.from_numpy(pair)).numpy()
        surface = batch.surface[batch.request].astype(np.float32)
        return self.engine.user_embedding(state), np.concatenate([z, logits, surface[:, None]], axis=1)

    def at_states(
        self,
        users: NDArray[np.uint64],
        state_ms: NDArray[np.int64],
        surfaces: NDArray[np.int64],
        history: NDArray[np.void],
        offsets: NDArray[np.int64],
        ads: NDArray[np.uint64],
        owner: NDArray[np.int64],
    ) -> tuple[FloatArray, FloatArray]:
        """`represent` for users as their logs stand after the event at `state_ms`, the last one included.

        Args:
            users: u8[B]. state_ms: i8[B]. surfaces: i8[B]; where the pairs are expected to be shown.
            history: LOG_ROW[T]; offsets: i8[B + 1]; events up to and including `state_ms`.
            ads: u8[C]; owner: i8[C]; user of each ad, non-decreasing.
        """
        batch = self.engine.encoder.encode(users, surfaces, state_ms + 1, history, offsets, ads, owner)
        return self.represent(batch)

    def user_rows(
        self,
        users: FloatArray,
        pairs: FloatArray,
        offsets: NDArray[np.int64],
        ads: NDArray[np.uint64],
        counted: NDArray[np.bool_] | None = None,
    ) -> FloatArray:
        """Stored user rows f4[B, U + P + 1]: the user embedding, and the mean over a sample of the user's pairs where it has any.

        Args:
            users: f4[B, U].
            pairs: f4[C, P]; ads: u8[C]; the pairs of user b are offsets[b]:offsets[b + 1].
            counted: bool[C]; which may be in the mean; all where absent.
        """
        rows = np.zeros((len(users), self.layout.user_row_dim), dtype=np.float32)
        rows[:, : self.layout.user_dim] = users
        for b, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
            mine = np.arange(start, end) if counted is None else start + np.flatnonzero(counted[start:end])
            if len(mine):
                sample = mine[aggregate_sample(ads[mine])]
                rows[b, self.layout.user_dim : -1] = pairs[sample].mean(0)
                rows[b, -1] = 1.0
        return rows


def aggregate_sample(ads: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Indices of the pairs whose mean stands for the user, in the order of their ids."""
    return np.argsort(ads, kind="stable")[:AGGREGATE_SAMPLE]
