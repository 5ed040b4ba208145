"""An encoder on disk: its schema as JSON and its catalogues as safetensors, part of every model artifact."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from streams.artifact import ArtifactError
from streams.encode import Encoder
from streams.schema import FeatureSchema

ENCODER, SCHEMA = "encoder.safetensors", "schema.json"


def save_encoder(folder: Path, encoder: Encoder) -> None:
    """Writes the encoder's catalogues and schema into a folder."""
    save_file({name: np.ascontiguousarray(array) for name, array in encoder.arrays().items()}, folder / ENCODER)
    (folder / SCHEMA).write_bytes(msgspec.json.encode(encoder.schema))


def load_encoder(folder: Path) -> Encoder:
    """Inverse of `save_encoder`.

    Raises:
        ArtifactError: a file is missing or does not parse; names it.
    """
    try:
        schema = msgspec.json.decode((folder / SCHEMA).read_bytes(), type=FeatureSchema)
    except (OSError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"{folder / SCHEMA} is no schema: {error}") from error
    try:
        return Encoder.from_arrays(schema, load_file(folder / ENCODER))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ArtifactError(f"{folder / ENCODER} is no encoder of this version: {error}") from error
