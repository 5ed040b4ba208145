"""`FeatureSchema`: the surfaces, objectives, event types and features of a deployment, declared once in TOML."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec

from streams.errors import UserError

MAX_EVENT_TYPES = 16  # the action mask of an event is 16 bits wide (`streams.rows.LOG_ROW`)
MAX_SURFACES = 255  # a surface is stored in one byte; 255 marks "before the log began"


class SchemaError(UserError, ValueError):
    """A schema file is missing, malformed or contradicts itself; the message names the file and the field."""


class UnknownValueError(ValueError):
    """A value outside the schema; the message names the field and the legal values."""

    def __init__(self, field: str, value: object, legal: tuple[str, ...]) -> None:
        self.field, self.value, self.legal = field, value, legal
        super().__init__(f"unknown {field} {value!r}; legal values: {', '.join(legal)}")


class Feature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One static feature of users or ads: a `category` gets one id per value, a `number` is standardised."""

    name: str
    kind: Literal["category", "number"]


class Columns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of the columns of the Parquet log; `value` = numerator / denominator, where both are given."""

    user: str
    ad: str
    time_ms: str
    surface: str
    value_numerator: str | None = None
    value_denominator: str | None = None


class FeatureSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a deployment's data look like. Load it with `FeatureSchema.load`."""

    name: str
    version: int
    surfaces: tuple[str, ...]
    event_types: tuple[str, ...]
    objectives: tuple[str, ...]
    columns: Columns
    user_features: tuple[Feature, ...] = ()
    ad_features: tuple[Feature, ...] = ()
    value: str = "value"
    utc_offset_hours: float = 0.0
    train_until: datetime | None = None
    valid_until: datetime | None = None
    request_gap_ms: int = 60_000

    @classmethod
    def load(cls, path: str | Path) -> FeatureSchema:
        """Reads and checks a schema file.

        Raises:
            SchemaError: the file is missing, is not TOML, has an unknown or ill-typed field, or contradicts itself.
        """
        path = Path(path)
        try:
            schema = msgspec.toml.decode(path.read_bytes(), type=cls)
        except FileNotFoundError as error:
            raise SchemaError(f"schema file {path} does not exist") from error
        except msgspec.MsgspecError as error:
            raise SchemaError(f"schema file {path}: {error}") from error
        problem = schema._contradiction()
        if problem:
            raise SchemaError(f"schema file {path}: {problem}")
        return schema

    def _contradiction(self) -> str | None:
        for field, limit in (("surfaces", MAX_SURFACES), ("event_types", MAX_EVENT_TYPES), ("objectives", 64)):
            names = getattr(self, field)
            if not 1 <= len(names) <= limit:
                return f"{field} needs 1 to {limit} entries, found {len(names)}"
            if len(set(names)) != len(names):
                return f"{field} holds a name twice"
        unknown = sorted(set(self.objectives) - set(self.event_types))
        if unknown:
            return f"objectives {unknown} are not event types ({', '.join(self.event_types)})"
        for field in ("train_until", "valid_until"):
            moment = getattr(self, field)
            if moment is not None and moment.tzinfo is None:
                return f"{field} is a naive datetime; write its UTC offset"
        return None

    def surface_index(self, surface: str) -> int:
        """Index of a surface.

        Raises:
            UnknownValueError: naming the legal surfaces.
        """
        try:
            return self.surfaces.index(surface)
        except ValueError:
            raise UnknownValueError("surface", surface, self.surfaces) from None

    def objective_index(self, objective: str) -> int:
        """Index of an objective.

        Raises:
            UnknownValueError: naming the legal objectives.
        """
        try:
            return self.objectives.index(objective)
        except ValueError:
            raise UnknownValueError("objective", objective, self.objectives) from None

    def action_mask(self, event_types: tuple[str, ...] | list[str]) -> int:
        """Bit mask of event types, bit i = `event_types[i]`; the first type (the impression) is always set.

        Raises:
            UnknownValueError: naming the legal event types.
        """
        mask = 1
        for name in event_types:
            if name not in self.event_types:
                raise UnknownValueError("event type", name, self.event_types)
            mask |= 1 << self.event_types.index(name)
        return mask

    @property
    def objective_bits(self) -> tuple[int, ...]:
        """For each objective the bit of the action mask that is its label."""
        return tuple(self.event_types.index(name) for name in self.objectives)

    def split_ms(self) -> tuple[int, int]:
        """(train_until, valid_until) in epoch ms.

        Raises:
            SchemaError: the schema declares no split.
        """
        if self.train_until is None or self.valid_until is None:
            raise SchemaError(f"schema {self.name} declares no split: set train_until and valid_until")
        return round(self.train_until.timestamp() * 1000), round(self.valid_until.timestamp() * 1000)
