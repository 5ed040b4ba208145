"""An encoder on disk: its schema as TOML and its catalogues as safetensors, part of every model artifact."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from streams.artifact import ArtifactError
from streams.encode import Encoder
from streams.schema import FeatureSchema, SchemaError

ENCODER, SCHEMA = "encoder.safetensors", "schema.toml"


def save_encoder(folder: Path, encoder: Encoder) -> None:
    """Writes the encoder's catalogues and schema into a folder."""
    save_file({name: np.ascontiguousarray(array) for name, array in encoder.arrays().items()}, folder / ENCODER)
    (folder / SCHEMA).write_bytes(msgspec.toml.encode(_plain(encoder.schema)))


def load_encoder(folder: Path) -> Encoder:
    """Inverse of `save_encoder`.

    Raises:
        ArtifactError: a file does not parse.
    """
    try:
        schema = FeatureSchema.load(folder / SCHEMA)
        return Encoder.from_arrays(schema, load_file(folder / ENCODER))
    except (SchemaError, SafetensorError, KeyError) as error:
        raise ArtifactError(f"encoder in {folder}: {error}") from error


def _plain(schema: FeatureSchema) -> dict[str, Any]:
    # TOML has no null: absent optional fields are left out.
    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items() if inner is not None}
        if isinstance(value, (list, tuple)):
            return [clean(inner) for inner in value]
        return value

    plain: dict[str, Any] = clean(msgspec.to_builtins(schema, builtin_types=(datetime,)))
    return plain
