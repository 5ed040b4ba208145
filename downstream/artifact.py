"""What a ranker artifact holds: the contract between training, export, own rankers and serving."""

from __future__ import annotations

import msgspec

from downstream.inputs import CANDIDATE_INPUTS, REQUEST_INPUTS
from streams.features import FmLayout

KIND = "ranker"
GRAPH, META = "ranker.onnx", "ranker.json"
OUTPUT = "logits"


class RankerMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the hot path must know of a ranker, beside its graph."""

    history: int
    layout: FmLayout
    fm_version: int
    objectives: tuple[str, ...]


def input_names(use_fm: bool) -> tuple[str, ...]:
    """Inputs of a graph; a ranker without the FM has no inputs of its."""
    names = (*REQUEST_INPUTS, *CANDIDATE_INPUTS)
    return names if use_fm else tuple(name for name in names if not name.startswith("fm_"))
