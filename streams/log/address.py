"""A log by its address: `kafka://host:port,host:port` or `redis://host:port/0`."""

from __future__ import annotations

import redis

from streams.errors import UserError
from streams.log import ActivityLog
from streams.log.kafka_client import topic_specs
from streams.log.valkey import ValkeyLog

SCHEMES = ("kafka://", "redis://", "rediss://", "unix://")


def open_log(address: str, topics: tuple[str, ...] = ()) -> ActivityLog:
    """Opens a log.

    Args:
        address: Kafka brokers or a Valkey/Redis server.
        topics: made on Kafka where they are missing, with their topics for rejected records.

    Raises:
        UserError: the address has another scheme; names the legal ones.
        LogUnavailable: Kafka's topics have to be made, and it cannot be reached.
    """
    if address.startswith("kafka://"):
        from streams.log.kafka import KafkaLog

        log = KafkaLog(address.removeprefix("kafka://"))
        if topics:
            log.ensure_topics(topic_specs(topics=topics))
        return log
    if address.startswith(SCHEMES):
        return ValkeyLog(redis.Redis.from_url(address))
    raise UserError(f"log address {address!r} has no known scheme; legal values: {', '.join(SCHEMES)}")
