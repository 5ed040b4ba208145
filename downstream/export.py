"""A trained ranker as an ONNX graph for one request, N and L dynamic, and as a servable artifact.

An own ranker is served from the same artifact: any graph with the inputs of `downstream.inputs` and one output, logits [1, N, K].
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import msgspec
import onnx
import torch
from torch import Tensor, nn
from torch.export import Dim

from downstream.artifact import GRAPH, KIND, META, OUTPUT, RankerMeta, input_names
from downstream.inputs import CANDIDATE_INPUTS, FM_STATE
from downstream.ranker import Ranker
from downstream.weights import save_weights
from streams.artifact import write_artifact
from streams.encode import Encoder
from streams.encoder_file import save_encoder
from streams.features import FmLayout


class _Positional(nn.Module):
    """The ranker with its inputs in a row, as the exporter wants them."""

    def __init__(self, ranker: Ranker, names: tuple[str, ...]) -> None:
        super().__init__()
        self.ranker, self.names = ranker, names

    def forward(self, *tensors: Tensor) -> Tensor:
        logits: Tensor = self.ranker(dict(zip(self.names, tensors, strict=True)))
        return logits


def example_inputs(encoder: Encoder, layout: FmLayout, num_events: int, num_candidates: int) -> dict[str, Tensor]:
    """Zeros of the right shapes and types for one request."""
    facts = encoder.num_event_types + encoder.num_surfaces + 3
    return {
        "surface": torch.zeros(1, dtype=torch.int64),
        "hour": torch.zeros(1, dtype=torch.int64),
        "user_categories": torch.zeros(1, encoder.users.categories.shape[1], dtype=torch.int64),
        "user_dense": torch.zeros(1, encoder.num_user_dense),
        "event_ad": torch.zeros(1, num_events, dtype=torch.int64),
        "event_facts": torch.zeros(1, num_events, facts),
        "event_mask": torch.ones(1, num_events),
        "fm_user": torch.zeros(1, layout.user_dim),
        "ad": torch.zeros(1, num_candidates, dtype=torch.int64),
        "fm_pair": torch.zeros(1, num_candidates, layout.pair_dim - 1),
        "fm_state": torch.zeros(1, num_candidates, FM_STATE),
    }


def export_graph(ranker: Ranker, encoder: Encoder, layout: FmLayout, path: Path) -> None:
    """Writes the ONNX graph of a ranker."""
    names = input_names(ranker.config.use_fm)
    examples = example_inputs(encoder, layout, num_events=7, num_candidates=5)
    events, candidates = Dim("events", min=0, max=100_000), Dim("candidates", min=1, max=100_000)
    dynamic = tuple(
        {1: events} if name.startswith("event_") else {1: candidates} if name in CANDIDATE_INPUTS else None
        for name in names
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            _Positional(ranker.eval(), names),
            tuple(examples[name] for name in names),
            input_names=list(names),
            output_names=[OUTPUT],
            dynamic_shapes=(dynamic,),
            dynamo=True,
            verbose=False,
            optimize=True,
        )
    assert program is not None
    graph = program.model_proto
    _forget_sources(graph.graph)
    onnx.save(graph, path)


def _forget_sources(graph: onnx.GraphProto) -> None:
    """Drops the exporter's notes, among them the paths of source files: the same ranker is the same file on every machine."""
    del graph.metadata_props[:]
    for entry in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del entry.metadata_props[:]
        entry.doc_string = ""


def save_ranker(
    folder: Path,
    ranker: Ranker,
    encoder: Encoder,
    layout: FmLayout,
    fm_version: int,
    meta: dict[str, Any] | None = None,
) -> str:
    """Writes the servable artifact: graph, encoder and what fetching needs; returns its version (content hash)."""
    known = RankerMeta(ranker.config.history, layout, fm_version, encoder.schema.objectives)

    def write(staging: Path) -> None:
        export_graph(ranker, encoder, layout, staging / GRAPH)
        save_encoder(staging, encoder)
        save_weights(staging, ranker)
        (staging / META).write_bytes(msgspec.json.encode(known))

    return write_artifact(folder, KIND, meta or {}, write)
