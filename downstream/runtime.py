"""Scoring with ONNX Runtime on the CPU, one thread per process, and loading of verified ranker artifacts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from downstream.artifact import GRAPH, KIND, META, OUTPUT, RankerMeta
from downstream.inputs import CANDIDATE_INPUTS, REQUEST_INPUTS, Inputs, one_request
from streams.artifact import ArtifactError, read_manifest
from streams.encode import Encoder
from streams.encoder_file import load_encoder
from streams.features import FmFeatures
from streams.rows import LOG_ROW


class RankerRuntime:
    """One loaded ranker. Scoring is thread-safe."""

    def __init__(self, session: ort.InferenceSession, encoder: Encoder, meta: RankerMeta, version: str) -> None:
        self.encoder, self.meta, self.version = encoder, meta, version
        self._session = session
        self._names = [given.name for given in session.get_inputs()]
        self.reads_fm = any(name.startswith("fm_") for name in self._names)

    @classmethod
    def load(cls, folder: Path) -> RankerRuntime:
        """Loads an artifact and scores one request with it, so that a broken graph is found here and not by a caller.

        Raises:
            ArtifactError: naming the file and what is wrong with it.
        """
        manifest = read_manifest(folder, KIND)
        encoder = load_encoder(folder)
        try:
            meta = msgspec.json.decode((folder / META).read_bytes(), type=RankerMeta)
        except (OSError, msgspec.MsgspecError) as error:
            raise ArtifactError(f"{folder / META} does not describe a ranker: {error}") from error
        if meta.objectives != encoder.schema.objectives:
            raise ArtifactError(
                f"{folder / META} has objectives {meta.objectives}, its schema {encoder.schema.objectives}"
            )
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            session = ort.InferenceSession(str(folder / GRAPH), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises a class of its own for each kind of damage
            raise ArtifactError(f"{folder / GRAPH} is not a graph that ONNX Runtime can load: {error}") from error
        unknown = sorted({given.name for given in session.get_inputs()} - {*REQUEST_INPUTS, *CANDIDATE_INPUTS})
        if unknown:
            legal = ", ".join((*REQUEST_INPUTS, *CANDIDATE_INPUTS))
            raise ArtifactError(f"{folder / GRAPH} asks for inputs {unknown}; legal values: {legal}")
        runtime = cls(session, encoder, meta, manifest["version"])
        for num_events in (0, 1):
            runtime._try(folder / GRAPH, num_events)
        return runtime

    def _try(self, graph: Path, num_events: int) -> None:
        num = 2
        users, times, zeros = np.zeros(1, np.uint64), np.array([num_events + 1]), np.zeros(num, np.int64)
        history = np.zeros(num_events, dtype=LOG_ROW)
        offsets, ads = np.array([0, num_events]), np.arange(num, dtype=np.uint64)
        batch = self.encoder.encode(users, zeros[:1], times, history, offsets, ads, zeros)
        try:
            scores = self.score(one_request(batch, FmFeatures.none(num, self.meta.layout), self.encoder.num_surfaces))
        except Exception as error:  # a class of ONNX Runtime's own for each way in which a graph does not fit
            raise ArtifactError(f"{graph} cannot score a request with {num_events} events: {error}") from error
        expected = (num, len(self.meta.objectives))
        if scores.shape != expected or not np.isfinite(scores).all():
            raise ArtifactError(
                f"{graph} gives scores of shape {scores.shape}; expected finite ones of shape {expected}"
            )

    def score(self, inputs: Inputs) -> NDArray[np.float32]:
        """Probabilities f4[N, K] of one request's candidates."""
        (logits,) = self._session.run([OUTPUT], {name: inputs[name] for name in self._names})
        scores: NDArray[np.float32] = 1.0 / (1.0 + np.exp(-logits[0]))
        return scores
