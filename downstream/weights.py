"""Torch weights of a ranker, kept in its artifact beside the graph: to evaluate offline and to train on."""

from __future__ import annotations

from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from downstream.ranker import Ranker, RankerConfig
from streams.artifact import ArtifactError
from streams.encode import Encoder
from streams.features import FmLayout

WEIGHTS, CONFIG = "ranker.safetensors", "config.json"


def save_weights(folder: Path, ranker: Ranker) -> None:
    """Writes weights and configuration."""
    save_file({name: tensor.contiguous() for name, tensor in ranker.state_dict().items()}, folder / WEIGHTS)
    (folder / CONFIG).write_bytes(msgspec.json.encode(ranker.config.to_dict()))


def load_weights(folder: Path, encoder: Encoder, layout: FmLayout) -> Ranker:
    """The ranker in eval mode.

    Raises:
        ArtifactError: naming the file and what is wrong with it.
    """
    try:
        config = RankerConfig(**msgspec.json.decode((folder / CONFIG).read_bytes()))
        ranker = Ranker(config, encoder, layout)
        ranker.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ArtifactError(f"{folder / WEIGHTS} does not fit this version of the ranker: {error}") from error
    return ranker.eval()
