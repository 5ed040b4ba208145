"""`Catalogue`: the static features of users or ads, encoded once and looked up by identity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from streams.ids import hash_ints, ids64
from streams.schema import Feature, SchemaError


@dataclass(frozen=True)
class Catalogue:
    """Static features of a set of entities, sorted by identity.

    Attributes:
        ids: u8[n], strictly increasing.
        categories: i4[n, F]; ids in one unified table (row 0 = unknown; each feature has its own range of rows).
        numbers: f4[n, G]; signed log, standardised, clipped to 4; 0 = unknown.
        num_category_rows: rows of the unified table.
    """

    ids: NDArray[np.uint64]
    categories: NDArray[np.int32]
    numbers: NDArray[np.float32]
    num_category_rows: int

    def find(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Row of each id, -1 where unknown. i8[m]."""
        if not len(self.ids):
            return np.full(len(ids), -1, dtype=np.int64)
        at = np.searchsorted(self.ids, ids)
        at[at == len(self.ids)] = 0
        return np.where(self.ids[at] == ids, at, -1)

    def features(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(categories i4[m, F], numbers f4[m, G]) of rows from `find`; zeros where unknown."""
        categories, numbers = self.categories[rows], self.numbers[rows]
        unknown = rows < 0
        if unknown.any():
            categories[unknown] = 0
            numbers[unknown] = 0
        return categories, numbers

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The catalogue as named arrays; `Catalogue.from_arrays` is the inverse."""
        return {
            "ids": self.ids,
            "categories": self.categories,
            "numbers": self.numbers,
            "num_category_rows": np.array([self.num_category_rows]),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> Catalogue:
        """Inverse of `arrays`."""
        return cls(
            ids=arrays["ids"].astype(np.uint64),
            categories=arrays["categories"].astype(np.int32),
            numbers=arrays["numbers"].astype(np.float32),
            num_category_rows=int(arrays["num_category_rows"][0]),
        )


def build_catalogue(frame: pl.DataFrame, key: str, features: Sequence[Feature]) -> Catalogue:
    """Encodes a table of static features.

    Args:
        frame: one row per entity.
        key: the column with the identity.
        features: which columns, and how.

    Raises:
        SchemaError: a column is missing, or a number column holds text; names the column.
    """
    missing = [name for name in (key, *(f.name for f in features)) if name not in frame.columns]
    if missing:
        raise SchemaError(f"columns {missing} are missing; found: {', '.join(frame.columns)}")
    frame = frame.unique(key, keep="first", maintain_order=True)
    ids = external_ids(frame[key])
    categories, numbers, next_row = [], [], 1
    for feature in features:
        column = frame[feature.name]
        if feature.kind == "category":
            text = column.cast(pl.String)
            values = text.drop_nulls().unique().sort()
            rows = text.replace_strict(values, np.arange(len(values)) + next_row, default=0, return_dtype=pl.Int32)
            categories.append(rows.to_numpy())
            next_row += len(values)
        else:
            if not column.dtype.is_numeric():
                raise SchemaError(f"feature {feature.name!r} is declared a number, but its column is {column.dtype}")
            numbers.append(_standardise(column.cast(pl.Float64).to_numpy()))
    order = np.argsort(ids)
    return Catalogue(
        ids=ids[order],
        categories=_stack(categories, len(ids), np.int32)[order],
        numbers=_stack(numbers, len(ids), np.float32)[order],
        num_category_rows=next_row,
    )


def external_ids(column: pl.Series) -> NDArray[np.uint64]:
    """`streams.ids.id64` of a column of integers or strings. u8[n].

    Raises:
        SchemaError: the column holds something else, or nulls.
    """
    if column.null_count():
        raise SchemaError(f"column {column.name!r} holds {column.null_count()} nulls; an identity may not be null")
    if column.dtype.is_integer():
        return hash_ints(column.to_numpy())
    if column.dtype == pl.String:
        return ids64(column.to_list())
    raise SchemaError(f"column {column.name!r} is {column.dtype}; an identity is an integer or a string")


def read_parquet(path: Path) -> pl.DataFrame:
    """Reads one Parquet file.

    Raises:
        SchemaError: the file is missing or is not Parquet; names it.
    """
    try:
        return pl.read_parquet(path)
    except FileNotFoundError as error:
        raise SchemaError(f"data file {path} does not exist") from error
    except pl.exceptions.PolarsError as error:
        raise SchemaError(f"data file {path} is not readable Parquet: {error}") from error


def _standardise(values: NDArray[np.float64]) -> NDArray[np.float32]:
    logged = np.sign(values) * np.log1p(np.abs(values))
    known = np.isfinite(logged)
    if not known.any():
        return np.zeros(len(values), dtype=np.float32)
    spread = float(logged[known].std()) or 1.0
    scaled = (logged - logged[known].mean()) / spread
    return np.where(known, np.clip(scaled, -4, 4), 0.0).astype(np.float32)


def _stack(columns: Sequence[NDArray[Any]], count: int, dtype: type) -> NDArray[Any]:
    return np.stack(columns, axis=1).astype(dtype) if columns else np.zeros((count, 0), dtype=dtype)
