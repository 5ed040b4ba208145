"""Checkpoints: a model with its encoder as one verified artifact, and the state from which a training run resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gem.config import GemConfig, Vocabulary
from gem.model import Gem
from streams.artifact import ArtifactError, read_manifest, write_artifact
from streams.encode import Encoder
from streams.encoder_file import load_encoder, save_encoder

KIND = "gem"
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def save_model(folder: Path, model: Gem, encoder: Encoder, meta: dict[str, Any] | None = None) -> str:
    """Writes a servable model; returns its version (content hash)."""

    def write(staging: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, staging / WEIGHTS)
        save_encoder(staging, encoder)
        (staging / CONFIG).write_bytes(msgspec.json.encode(model.config.to_dict()))

    return write_artifact(folder, KIND, meta or {}, write)


def load_model(folder: Path) -> tuple[Gem, Encoder, str]:
    """(model in eval mode, encoder, version) of an artifact.

    Raises:
        ArtifactError: naming the file and what is wrong with it.
    """
    manifest = read_manifest(folder, KIND)
    encoder = load_encoder(folder)
    try:
        config = GemConfig(**msgspec.json.decode((folder / CONFIG).read_bytes()))
        model = config.build(Vocabulary.of(encoder))
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ArtifactError(f"{folder / WEIGHTS} does not fit this version of the model: {error}") from error
    return model.eval(), encoder, manifest["version"]


def save_resume(path: Path, state: dict[str, Any]) -> None:
    """Writes a training state atomically."""
    staging = path.with_suffix(".writing")
    torch.save(state, staging)
    staging.replace(path)


def load_resume(path: Path) -> dict[str, Any]:
    """Reads a training state.

    Raises:
        ArtifactError: the file is not a readable training state.
    """
    try:
        state: dict[str, Any] = torch.load(path, weights_only=False)
    except Exception as error:  # torch raises a different type for each kind of damage
        raise ArtifactError(f"{path} is not a readable training state: {error}") from error
    return state
