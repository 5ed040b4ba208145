"""Where the embedding of a user-ad pair came from: better levels have greater numbers."""

from __future__ import annotations

from enum import IntEnum


class Level(IntEnum):
    """The level of an embedding, as features, answers and metrics name it."""

    NONE = 0
    """Nothing is known: a zero vector and an availability flag."""
    USER = 1
    """The embedding of the user alone."""
    USER_AGGREGATE = 2
    """An aggregate of the user's cached pairs."""
    PAIR_STALE = 3
    """The pair itself, older than its TTL but within the failover TTL."""
    PAIR_FRESH = 4
    """The pair itself, within its TTL."""

    @property
    def label(self) -> str:
        """The name in answers and metrics, such as ``"pair_fresh"``."""
        return self.name.lower()

    @classmethod
    def from_label(cls, label: str) -> Level:
        """Find the level of a name.

        Args:
            label: A name such as ``"pair_fresh"``.

        Raises:
            ValueError: No level has this name.
        """
        for level in cls:
            if level.label == label:
                return level
        raise ValueError(f"unknown level {label!r}; legal values: {', '.join(level.label for level in cls)}")
