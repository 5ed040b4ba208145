"""A log on disk (schema.toml + Parquet files) as user-log rows, requests and catalogues."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from streams.catalogue import build_catalogue, external_ids, read_parquet
from streams.encode import PRIOR_SURFACE, Encoder
from streams.ids import hash_ints
from streams.rows import LOG_ROW
from streams.schema import FeatureSchema, SchemaError

PRIOR_STEP_MS = 1_000  # untimed earlier events are placed this far apart, the last at its true time
MAX_VALUE = 2.0


@dataclass(frozen=True)
class Dataset:
    """One deployment's log, time-sorted.

    Attributes:
        schema: the deployment's schema.
        encoder: built from the user and ad tables.
        users: u8[n]; user of each event of the log.
        rows: LOG_ROW[n]; the log, sorted by time.
        raw_users: i8[n]; the users as the file holds them, for producers.
        raw_ads: identity -> ad as the files hold it, of all ads of the catalogue.
        prior_users: u8[p]; user of each event from before the log began.
        prior_rows: LOG_ROW[p].
    """

    schema: FeatureSchema
    encoder: Encoder
    users: NDArray[np.uint64]
    rows: NDArray[np.void]
    raw_users: NDArray[np.int64]
    raw_ads: dict[int, int]
    prior_users: NDArray[np.uint64]
    prior_rows: NDArray[np.void]

    @property
    def labels(self) -> NDArray[np.float32]:
        """f4[n, K]; 1 where the objective's event followed the impression."""
        bits = np.array(self.schema.objective_bits, dtype=np.uint16)
        return ((self.rows["actions"][:, None] >> bits) & 1).astype(np.float32)

    @property
    def all_events(self) -> tuple[NDArray[np.uint64], NDArray[np.void]]:
        """(users, rows) of the prior events and the log together."""
        # concatenate would otherwise turn the big-endian event ids native
        rows = np.concatenate([self.prior_rows, self.rows], dtype=LOG_ROW)
        return np.concatenate([self.prior_users, self.users]), rows

    def requests(self) -> NDArray[np.int64]:
        """Request index of each event: impressions of one user on one surface within `request_gap_ms` share one. i8[n]."""
        order = np.lexsort((self.rows["time_ms"], self.rows["surface"], self.users))
        users, surface, time_ms = self.users[order], self.rows["surface"][order], self.rows["time_ms"][order]
        new = np.ones(len(order), dtype=bool)
        gap = np.diff(time_ms)
        new[1:] = (users[1:] != users[:-1]) | (surface[1:] != surface[:-1]) | (gap > self.schema.request_gap_ms)
        group = np.cumsum(new) - 1
        result = np.empty(len(order), dtype=np.int64)
        result[order] = group
        # number the requests by the time of their first event
        first = np.full(int(group[-1]) + 1 if len(group) else 0, len(order), dtype=np.int64)
        np.minimum.at(first, result, np.arange(len(order)))
        rank = np.empty_like(first)
        rank[np.argsort(first, kind="stable")] = np.arange(len(first))
        return rank[result]


def load_schema(folder: Path) -> FeatureSchema:
    """The `schema.toml` of a data folder, or of its parent (a subset such as `mini/`).

    Raises:
        SchemaError: the folder or the schema is missing, or the schema is malformed.
    """
    if not folder.is_dir():
        raise SchemaError(f"data folder {folder} does not exist")
    path = folder / "schema.toml"
    return FeatureSchema.load(path if path.exists() else folder.parent / "schema.toml")


def load_dataset(folder: str | Path, *, tables: str | Path | None = None) -> Dataset:
    """Loads `schema.toml`, `events.parquet`, `users.parquet`, `items.parquet` and, where present, `history.parquet`.

    Args:
        folder: with the files; the schema may lie in the parent (a subset such as `mini/`).
        tables: folder of the user and ad tables, where it is another one.

    Raises:
        SchemaError: a file is missing or does not fit the schema; names file, column and, for values, the row.
    """
    folder = Path(folder)
    schema = load_schema(folder)
    tables = Path(tables) if tables else folder
    encoder = Encoder(
        schema,
        build_catalogue(read_parquet(tables / "users.parquet"), schema.columns.user, schema.user_features),
        build_catalogue(read_parquet(tables / "items.parquet"), schema.columns.ad, schema.ad_features),
    )
    path = folder / "events.parquet"
    frame = read_parquet(path)
    users, rows = _log_rows(frame, schema, path)
    prior_path = folder / "history.parquet"
    prior = _prior_rows(read_parquet(prior_path), schema) if prior_path.exists() else (users[:0], rows[:0])
    return Dataset(
        schema,
        encoder,
        users,
        rows,
        frame[schema.columns.user].to_numpy().astype(np.int64),
        _raw_of(read_parquet(tables / "items.parquet")[schema.columns.ad], frame[schema.columns.ad]),
        *prior,
    )


def _raw_of(*columns: pl.Series) -> dict[int, int]:
    known: dict[int, int] = {}
    for column in columns:
        unique = column.unique()
        known.update(zip(external_ids(unique).tolist(), unique.to_list(), strict=True))
    return known


def _log_rows(frame: pl.DataFrame, schema: FeatureSchema, path: Path) -> tuple[NDArray[np.uint64], NDArray[np.void]]:
    columns = schema.columns
    needed = [columns.user, columns.ad, columns.time_ms, columns.surface, *schema.event_types[1:]]
    needed += [name for name in (columns.value_numerator, columns.value_denominator) if name]
    missing = [name for name in needed if name not in frame.columns]
    if missing:
        raise SchemaError(f"{path}: columns {missing} are missing; found: {', '.join(frame.columns)}")
    time_ms = frame[columns.time_ms].to_numpy()
    if len(time_ms) and (np.diff(time_ms) < 0).any():
        raise SchemaError(
            f"{path}: row {int(np.argmax(np.diff(time_ms) < 0)) + 1} goes back in time; sort by {columns.time_ms}"
        )
    surface = frame[columns.surface].cast(pl.String)
    unknown = ~surface.is_in(list(schema.surfaces))
    if unknown.any():
        row = int(unknown.arg_true()[0])
        raise SchemaError(f"{path}: row {row} has surface {surface[row]!r}; legal values: {', '.join(schema.surfaces)}")
    rows = np.zeros(len(frame), dtype=LOG_ROW)
    rows["event_id"] = hash_ints(np.arange(len(frame)))
    rows["time_ms"] = time_ms
    rows["ad"] = external_ids(frame[columns.ad])
    index = {name: i for i, name in enumerate(schema.surfaces)}
    rows["surface"] = surface.replace_strict(index, return_dtype=pl.UInt8).to_numpy()
    mask = np.ones(len(frame), dtype=np.uint16)
    for bit, name in enumerate(schema.event_types[1:], start=1):
        mask |= (frame[name].to_numpy() > 0).astype(np.uint16) << np.uint16(bit)
    rows["actions"] = mask
    if columns.value_numerator and columns.value_denominator:
        share = frame[columns.value_numerator] / frame[columns.value_denominator].clip(lower_bound=1)
        rows["value"] = np.clip(share.to_numpy(), 0.0, MAX_VALUE)
    return external_ids(frame[columns.user]), rows


def _prior_rows(frame: pl.DataFrame, schema: FeatureSchema) -> tuple[NDArray[np.uint64], NDArray[np.void]]:
    """Untimed earlier impressions as log rows: their order is real, their times are placed backwards from the last one's.

    Ads that were watched long or liked, but fall outside the list of those shown, come first.
    """
    long_bit, like_bit = (1 << schema.event_types.index(name) for name in ("long_view", "is_like"))
    users, events = [], []
    for user, last_ms, shown, long, liked in frame.select(
        schema.columns.user, "last_time_ms", "watch_seq", "long_watch_seq", "like_seq"
    ).iter_rows():
        long_set, liked_set, shown_set = set(long), set(liked), set(shown)
        earlier = [ad for ad in dict.fromkeys([*liked, *long]) if ad not in shown_set]
        ads = earlier + shown
        start = last_ms - (len(ads) - 1) * PRIOR_STEP_MS
        for k, ad in enumerate(ads):
            mask = 1 | (long_bit if ad in long_set else 0) | (like_bit if ad in liked_set else 0)
            events.append((-(user * 1_000 + k + 1), start + k * PRIOR_STEP_MS, ad, mask))
        users += [user] * len(ads)
    rows = np.zeros(len(events), dtype=LOG_ROW)
    table = np.array(events, dtype=np.int64).reshape(-1, 4)
    rows["event_id"], rows["time_ms"], rows["ad"] = hash_ints(table[:, 0]), table[:, 1], hash_ints(table[:, 2])
    rows["actions"], rows["surface"] = table[:, 3], PRIOR_SURFACE
    return hash_ints(np.array(users, dtype=np.int64)), rows
