"""A `RankerTable` on disk: what a training process reads."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from downstream.train import RankerTable
from gem.examples import RequestLog
from streams.artifact import ArtifactError
from streams.features import FmFeatures, FmLayout

_FEATURES = ("pair", "same_surface", "level", "age_ms", "user")


def write_table(path: Path, table: RankerTable, layout: FmLayout, fm_version: int) -> None:
    """Writes all but the log itself, which the reader loads from its own place."""
    np.savez(
        path,
        requests=table.requests,
        teacher=table.teacher,
        has_teacher=table.has_teacher,
        layout=np.array([layout.z_dim, layout.user_dim, layout.num_objectives, layout.ttl_ms, layout.failover_ttl_ms]),
        fm_version=np.array(fm_version, dtype=np.uint64),
        **{name: getattr(table.features, name) for name in _FEATURES},
    )


def read_table(path: Path, log: RequestLog) -> tuple[RankerTable, FmLayout, int]:
    """(table, layout, FM version) of a file.

    Raises:
        ArtifactError: the file is missing, damaged, or belongs to another log.
    """
    try:
        with np.load(path) as file:
            arrays = dict(file)
        layout = FmLayout(*arrays["layout"].tolist())
        features = FmFeatures(*(arrays[name] for name in _FEATURES))
        table = RankerTable(log, arrays["requests"], features, arrays["teacher"], arrays["has_teacher"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path} is no readable ranker table: {error}") from error
    if len(table.requests) and table.requests.max() >= len(log):
        raise ArtifactError(
            f"{path} names request {table.requests.max()}, the log has {len(log)}: it belongs to another log"
        )
    expected = len(log.candidate_indices(table.requests)[0])
    if len(features.level) != expected:
        raise ArtifactError(f"{path} has features of {len(features.level)} ads, the log shows {expected}")
    return table, layout, int(arrays["fm_version"])
