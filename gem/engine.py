"""`GemEngine`: the foundation model behind the two calls that Solaris and LoopFM make.

Shapes: B requests, C candidates, U user width, P pair width, K objectives.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from gem.batch import TensorBatch
from gem.checkpoint import load_model
from gem.model import Gem, RequestState
from streams.artifact import version_u64
from streams.encode import Encoder, RequestBatch
from streams.rows import LOG_ROW

FloatArray = NDArray[np.float32]

_COUNTED_PAIRS = 64
CALLS = Counter[str]()  # FM runs of this process by half; a serving process must never have any


class FoundationModel(Protocol):
    """What a foundation model of one's own must offer; `GemEngine` is the one that ships."""

    encoder: Encoder
    history: int
    version: int

    def encode_request(self, batch: RequestBatch) -> object:
        """f_R: reads only the request side of the batch."""
        ...

    def user_embedding(self, state: object) -> FloatArray:
        """User embeddings f4[B, U]."""
        ...

    def embed_pairs(self, state: object, batch: RequestBatch) -> tuple[FloatArray, FloatArray]:
        """f_C for the batch's candidates: (embeddings f4[C, P], logits f4[C, K])."""
        ...


class GemEngine:
    """Inference with one model; thread-compatible, not thread-safe. `version` is the model's content hash."""

    def __init__(self, model: Gem, encoder: Encoder, version: str) -> None:
        self.model, self.encoder, self.version = model.eval(), encoder, version_u64(version)
        self.history = model.config.history

    @classmethod
    def load(cls, folder: Path) -> GemEngine:
        """Loads an artifact.

        Raises:
            streams.artifact.ArtifactError: naming the file and what is wrong.
        """
        return cls(*load_model(folder))

    @torch.inference_mode()
    def encode_request(self, batch: RequestBatch) -> RequestState:
        """f_R, once per request."""
        CALLS["encode_request"] += 1
        return self.model.encode_request(TensorBatch.of(batch))

    def user_embedding(self, state: RequestState) -> FloatArray:
        """f4[B, U]."""
        found: FloatArray = state.user.numpy()
        return found

    @torch.inference_mode()
    def embed_pairs(self, state: RequestState, batch: RequestBatch) -> tuple[FloatArray, FloatArray]:
        """(pair embeddings f4[C, P], logits f4[C, K]) of the batch's candidates."""
        CALLS["embed_pairs"] += 1
        output = self.model.encode_candidates(state, TensorBatch.of(batch))
        return output.pair.numpy(), output.logits.numpy()

    def flops(self) -> tuple[float, float]:
        """(FLOPs of f_R for a user with a full history, FLOPs of f_C for one pair), counted on a run with made-up input."""
        history = np.zeros(self.history, dtype=LOG_ROW)
        history["time_ms"] = np.arange(self.history)
        batch = TensorBatch.of(
            self.encoder.encode(
                np.zeros(1, np.uint64),
                np.zeros(1, np.int64),
                np.array([self.history + 1]),
                history,
                np.array([0, self.history]),
                np.arange(_COUNTED_PAIRS, dtype=np.uint64),
                np.zeros(_COUNTED_PAIRS, np.int64),
            )
        )
        with torch.inference_mode(), FlopCounterMode(display=False) as request:
            state = self.model.encode_request(batch)
        with torch.inference_mode(), FlopCounterMode(display=False) as pairs:
            self.model.encode_candidates(state, batch)
        return float(request.get_total_flops()), pairs.get_total_flops() / _COUNTED_PAIRS
