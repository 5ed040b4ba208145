"""What rows need beyond what traffic asks for: refilling after a change of the FM, and work that a killed worker took with it.

Readers take rows of one version only, so an FM change alone empties the store in their eyes. Whoever starts workers of a version makes
it the current one (last started wins, a roll-back too). In idle time its workers walk over the users and queue those whose rows are of
an older version, again and again until none is left; and, in one walk, those whose log is ahead of their rows: under a finite budget jobs
wait in memory, where a kill loses them. Both stand below everything that traffic asks for.
"""

from __future__ import annotations

import time
from typing import Any

import redis

from streams.features import SLATE
from streams.rows import user_key
from streams.store import EmbeddingStore
from streams.user_log import FOREVER_MS, UserLog

VERSIONS = "fm:versions"
KEPT_VERSIONS = 16
MAX_TRIED = 1_000_000  # users, some 60 MB; beyond it the walk goes on until their rows have expired
SCAN_COUNT = 512  # keys of one step: a millisecond of the server


class Refill:
    """Walks over the users.

    Args:
        client: of the store.
        users: of the user rows: one per user that has any rows.
        version: of the FM that refills.
    """

    def __init__(self, client: redis.Redis, users: EmbeddingStore, version: int) -> None:
        self._client, self._users, self._version = client, users, version
        self._log = UserLog(client)
        self._cursor: int | None = None
        self._found = False
        self._tried: set[int] = set()
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
        self._cursor = 0
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
        reply: Any = self._client.scan(self._cursor, match="{u:*}:log", count=SCAN_COUNT)
        cursor, keys = reply
        users = [int(key.decode().removeprefix("{u:").removesuffix("}:log"), 16) for key in keys]
        pipe: Any = self._client.pipeline(transaction=False)
        for user in users:
            self._users.queue_read(pipe, user)
            self._log.queue_history(pipe, user, FOREVER_MS, 1)
            pipe.strlen(user_key(user, SLATE))
        replies = pipe.execute()
        due = []
        for user, own, newest, slate in zip(users, replies[::3], replies[1::3], replies[2::3], strict=True):
            row, last = self._users.decode_keys(own), self._log.decode_history(newest)
            if not len(last):
                continue
            if not len(row):
                behind = slate > 0  # without a slate or rows it is a user whom nothing has asked for yet
            else:
                older = int(row.versions[0]) != self._version
                # Once is enough: a user whose job cannot be done, or is not worth it, must not keep the walk going.
                self._found |= older and user not in self._tried
                if older and len(self._tried) < MAX_TRIED:
                    self._tried.add(user)
                behind = older or int(row.state_ms[0]) < int(last["time_ms"][0])
            if behind:
                due.append(user)
        if cursor == 0 and not self._found:
            self._cursor = None
        else:
            self._found = self._found and cursor != 0
            self._cursor = int(cursor)
        return due
