"""The only encoder: raw ids, times and histories -> the arrays that models read. Training and serving both call it.

Shapes: B requests, C candidates over all requests, T history events over all requests, U different ads among those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from streams.catalogue import Catalogue
from streams.schema import FeatureSchema

NUM_OOV_ADS = 64  # ads outside the catalogue share this many hashed rows of the id table
HOURS = 24
PRIOR_SURFACE = (
    255  # surface byte of events from before the log began; it and unknown ones are encoded as one surface more
)
RECENT = 5  # events in the "most recent" rates
PRIOR_RATE, PRIOR_WEIGHT = 0.3, 4.0  # smoothing of rates: a user without history has the prior's rate


@dataclass(frozen=True)
class RequestBatch:
    """Encoded requests with their candidates; request side first, candidate side last.

    Attributes:
        surface: i8[B]; index into the schema's surfaces.
        hour: i8[B]; local hour of day.
        user_categories: i8[B, Fu]; rows of the users' unified table.
        user_dense: f4[B, Du]; static numbers, then statistics of the history.
        offsets: i8[B + 1]; history rows of request b are offsets[b]:offsets[b + 1], oldest first.
        history_ad: i8[U]; each ad of the histories once: rows of the ad id table.
        history_categories: i8[U, Fa]; rows of the ads' unified table.
        event_ad: i8[T]; index into the U ads.
        event_surface: i8[T]; the schema's surfaces, then one for events before the log.
        event_actions: f4[T, E]; 1 where the event type holds.
        event_value: f4[T].
        event_gap_ms: f4[T]; request time minus event time, > 0.
        ad: i8[C]; rows of the ad id table.
        ad_categories: i8[C, Fa].
        ad_dense: f4[C, Da]; static numbers.
        request: i8[C]; request of each candidate, non-decreasing.
    """

    surface: NDArray[np.int64]
    hour: NDArray[np.int64]
    user_categories: NDArray[np.int64]
    user_dense: NDArray[np.float32]
    offsets: NDArray[np.int64]
    history_ad: NDArray[np.int64]
    history_categories: NDArray[np.int64]
    event_ad: NDArray[np.int64]
    event_surface: NDArray[np.int64]
    event_actions: NDArray[np.float32]
    event_value: NDArray[np.float32]
    event_gap_ms: NDArray[np.float32]
    ad: NDArray[np.int64]
    ad_categories: NDArray[np.int64]
    ad_dense: NDArray[np.float32]
    request: NDArray[np.int64]

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Field name -> array."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Encoder:
    """Raw values -> `RequestBatch`. Holds the catalogues a model was trained with; saved beside its weights."""

    def __init__(self, schema: FeatureSchema, users: Catalogue, ads: Catalogue) -> None:
        self.schema, self.users, self.ads = schema, users, ads
        self.num_ad_rows = 1 + len(ads.ids) + NUM_OOV_ADS
        self.num_surfaces = len(schema.surfaces)
        self.num_event_types = len(schema.event_types)
        self._utc_offset_ms = round(schema.utc_offset_hours * 3_600_000)
        self._bits = np.arange(self.num_event_types, dtype=np.uint16)
        self._rate_bits = np.array(schema.objective_bits, dtype=np.int64)

    @property
    def num_user_dense(self) -> int:
        """Width of `user_dense`."""
        return self.users.numbers.shape[1] + 3 * len(self._rate_bits) + 4

    def encode_ads(self, ads: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """(id rows i8[m], categories i8[m, Fa], dense f4[m, Da]) of ads; unknown ads get a hashed row and zeros."""
        at = self.ads.find(ads)
        oov = 1 + len(self.ads.ids) + (ads % np.uint64(NUM_OOV_ADS)).astype(np.int64)
        categories, dense = self.ads.features(at)
        return np.where(at >= 0, at + 1, oov), categories.astype(np.int64), dense

    def encode(
        self,
        users: NDArray[np.uint64],
        surfaces: NDArray[np.int64],
        times_ms: NDArray[np.int64],
        history: NDArray[np.void],
        offsets: NDArray[np.int64],
        candidates: NDArray[np.uint64],
        request: NDArray[np.int64],
    ) -> RequestBatch:
        """Encodes B requests.

        Args:
            users: u8[B].
            surfaces: i8[B]; schema indices.
            times_ms: i8[B]; moment of each request.
            history: LOG_ROW[T]; events strictly before each request, oldest first.
            offsets: i8[B + 1] into `history`.
            candidates: u8[C].
            request: i8[C]; request of each candidate, non-decreasing.

        Raises:
            ValueError: an event is not before its request: that would leak the future.
        """
        row_request = np.repeat(np.arange(len(users)), np.diff(offsets))
        gap_ms = times_ms[row_request] - history["time_ms"]
        if len(gap_ms) and gap_ms.min() <= 0:
            b = int(row_request[gap_ms.argmin()])
            raise ValueError(f"request {b} at {times_ms[b]} ms was given an event at or after its own time")
        actions = ((history["actions"][:, None] >> self._bits) & 1).astype(np.float32)
        surface = history["surface"].astype(np.int64)
        event_surface = np.minimum(surface, self.num_surfaces)
        unique, event_ad = np.unique(history["ad"], return_inverse=True)
        history_ad, history_categories, _ = self.encode_ads(unique)
        ad, ad_categories, ad_dense = self.encode_ads(candidates)
        user_categories, user_numbers = self.users.features(self.users.find(users))
        statistics = self._history_statistics(
            actions, event_surface == surfaces[row_request], gap_ms, offsets, row_request
        )
        return RequestBatch(
            surface=surfaces.astype(np.int64),
            hour=((times_ms + self._utc_offset_ms) // 3_600_000) % HOURS,
            user_categories=user_categories.astype(np.int64),
            user_dense=np.concatenate([user_numbers, statistics], axis=1),
            offsets=offsets.astype(np.int64),
            history_ad=history_ad,
            history_categories=history_categories,
            event_ad=event_ad.astype(np.int64),
            event_surface=event_surface,
            event_actions=actions,
            event_value=history["value"].astype(np.float32),
            event_gap_ms=gap_ms.astype(np.float32),
            ad=ad,
            ad_categories=ad_categories,
            ad_dense=ad_dense,
            request=request.astype(np.int64),
        )

    def _history_statistics(
        self,
        actions: NDArray[np.float32],
        same_surface: NDArray[np.bool_],
        gap_ms: NDArray[np.int64],
        offsets: NDArray[np.int64],
        row_request: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """Smoothed past rates of each objective (all, this surface, most recent), history sizes and the last gap. f4[B, 3K + 4]."""
        num_requests = len(offsets) - 1
        labels = actions[:, self._rate_bits].astype(np.float64)
        rank_from_end = offsets[1:][row_request] - 1 - np.arange(len(row_request))
        columns, counts = [], []
        for mask in (np.ones(len(labels), dtype=bool), same_surface, rank_from_end < RECENT):
            count = np.bincount(row_request[mask], minlength=num_requests)
            counts.append(count)
            for k in range(labels.shape[1]):
                total = np.bincount(row_request[mask], weights=labels[mask, k], minlength=num_requests)
                columns.append((total + PRIOR_RATE * PRIOR_WEIGHT) / (count + PRIOR_WEIGHT))
        day = np.bincount(row_request[gap_ms < 86_400_000], minlength=num_requests)
        last_gap = np.full(num_requests, 30 * 86_400_000.0)
        filled = np.diff(offsets) > 0
        last_gap[filled] = gap_ms[offsets[1:][filled] - 1]
        columns += [
            np.log1p(counts[0]) / 4,
            np.log1p(counts[1]) / 4,
            np.log1p(day) / 4,
            np.log1p(last_gap / 60_000) / 10,
        ]
        return np.stack(columns, axis=1).astype(np.float32)

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """What must be saved to encode again; the schema is saved as TOML beside it."""
        return {
            f"{side}.{name}": array
            for side, catalogue in (("users", self.users), ("ads", self.ads))
            for name, array in catalogue.arrays().items()
        }

    @classmethod
    def from_arrays(cls, schema: FeatureSchema, arrays: Mapping[str, NDArray[np.generic]]) -> Encoder:
        """Inverse of `arrays`."""
        sides = {
            side: Catalogue.from_arrays({k.split(".", 1)[1]: v for k, v in arrays.items() if k.startswith(side + ".")})
            for side in ("users", "ads")
        }
        return cls(schema, sides["users"], sides["ads"])
