"""What happens to rows when the FM changes: the new version's workers retire the old one's rows and refill, rolling, in idle time.

Readers take rows of one version only, so an FM change alone empties the store in their eyes. Whoever starts workers of a version makes
it the current one (last started wins, a roll-back too). Its workers walk over the users that still have rows of older versions and queue
them below everything that traffic asks for; what traffic asks for is refilled first, by itself.
"""

from __future__ import annotations

import time
from typing import Any

import redis

from streams.features import USER
from streams.store import EmbeddingStore

VERSIONS = "fm:versions"
KEPT_VERSIONS = 16
SCAN_COUNT = 512  # keys of one step: a millisecond of the server


class Refill:
    """Walks over the users whose rows an older FM made.

    Args:
        client: of the store.
        users: of the user rows: one per user that has any rows.
        version: of the FM that refills.
    """

    def __init__(self, client: redis.Redis, users: EmbeddingStore, version: int) -> None:
        self._client, self._users, self._version = client, users, version
        self._cursor: int | None = None
        self._found = False
        self.retired: frozenset[int] | None = None

    def start(self) -> frozenset[int]:
        """Makes the version the current one, and returns those that it replaces.

        Raises:
            redis.RedisError: the store is away.
        """
        name = f"{self._version:016x}"
        pipe: Any = self._client.pipeline()
        pipe.zadd(VERSIONS, {name: time.time_ns() // 1_000_000})
        pipe.zremrangebyrank(VERSIONS, 0, -KEPT_VERSIONS - 1)
        pipe.zrange(VERSIONS, 0, -1)
        others = {int(member, 16) for member in pipe.execute()[-1]} - {self._version}
        self.retired = frozenset(others)
        self._cursor = 0 if others else None
        return self.retired

    @property
    def done(self) -> bool:
        """Whether a whole walk found nobody with rows of an older FM."""
        return self._cursor is None

    def step(self) -> list[int]:
        """Some users to refill; a walk goes on until one finds none.

        Raises:
            redis.RedisError: the store is away; the step may be taken again.
        """
        if self._cursor is None:
            return []
        suffix = f"}}:{USER}"
        reply: Any = self._client.scan(self._cursor, match=f"{{u:*{suffix}", count=SCAN_COUNT)
        cursor, keys = reply
        users = [int(key.decode().removeprefix("{u:").removesuffix(suffix), 16) for key in keys]
        stale = []
        for user, reply in zip(users, self._users.raw_many(users), strict=True):
            rows = self._users.decode_keys(reply)
            if len(rows) and int(rows.versions[0]) != self._version:
                stale.append(user)
        self._found |= bool(stale)
        if cursor == 0 and not self._found:
            self._cursor = None
        else:
            self._found = self._found and cursor != 0
            self._cursor = int(cursor)
        return stale
