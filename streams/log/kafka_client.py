"""What all Kafka clients here share: where the brokers are and how to speak to them, and which topics there are."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from streams.events import ACTIVITY_TOPIC
from streams.log import REJECTED_SUFFIX
from streams.requests import SERVED_TOPIC

DEFAULT_PARTITIONS = 16
"""Partitions bound how many workers can share the work, and adding some later would move users between them."""
RETENTION_MS = 7 * 86_400_000
"""Events are for workers that were away for days at most; what is older is in the user log."""
REJECTED_RETENTION_MS = 30 * 86_400_000
"""A person looks at rejected records, and a person is away for longer."""
MAX_RECORD_BYTES = 1_000_000
"""A record's largest size, key included; just below what brokers take by default."""
MAX_REJECTED_BYTES = 8_000_000
"""A rejected record is JSON around the refused one, up to six times as large where every byte is escaped."""

logging.getLogger("kafka").setLevel(logging.CRITICAL)  # it floods in an outage, of which the log tells once a minute


@dataclass(frozen=True)
class KafkaSecurity:
    """How clients prove who they are; the default is none of it, for a broker that only trusted hosts can reach.

    Attributes:
        protocol: PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL.
        mechanism: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512, with SASL.
        username: With SASL.
        password: With SASL.
        cafile: Certificates of authorities to trust, with SSL; the system's where absent.
    """

    protocol: str = "PLAINTEXT"
    mechanism: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    cafile: str | None = None

    def __post_init__(self) -> None:
        legal = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
        if self.protocol not in legal:
            raise ValueError(f"Kafka security protocol {self.protocol!r}; legal values: {', '.join(legal)}")
        if self.protocol.startswith("SASL") and not (self.mechanism and self.username and self.password):
            raise ValueError(f"Kafka security protocol {self.protocol} needs a mechanism, a username and a password")

    def ssl_context(self) -> ssl.SSLContext | None:
        """Make the context that the protocol asks for."""
        return ssl.create_default_context(cafile=self.cafile) if self.protocol.endswith("SSL") else None

    def options(self) -> dict[str, Any]:
        """Make the arguments of a kafka-python client."""
        options: dict[str, Any] = {"security_protocol": self.protocol, "ssl_context": self.ssl_context()}
        if self.protocol.startswith("SASL"):
            options |= {
                "sasl_mechanism": self.mechanism,
                "sasl_plain_username": self.username,
                "sasl_plain_password": self.password,
            }
        return options


@dataclass(frozen=True)
class TopicSpec:
    """A topic as it is to be made.

    Attributes:
        name: The topic.
        partitions: How many; one user's records are all in one of them.
        retention_ms: How long a record is kept, in milliseconds; of no effect with ``compact``.
        compact: Keep the last record of each key for ever, instead of all for a time.
    """

    name: str
    partitions: int
    retention_ms: int
    compact: bool = False

    def config(self) -> dict[str, str]:
        """Make the topic's settings, as the broker names them."""
        largest = MAX_REJECTED_BYTES if self.name.endswith(REJECTED_SUFFIX) else MAX_RECORD_BYTES
        kept = {"cleanup.policy": "compact"} if self.compact else {"retention.ms": str(self.retention_ms)}
        return kept | {"max.message.bytes": str(largest)}


def topic_specs(
    partitions: int = DEFAULT_PARTITIONS, topics: Sequence[str] = (ACTIVITY_TOPIC, SERVED_TOPIC)
) -> list[TopicSpec]:
    """State the topics of a deployment, and those for the rejected records of each.

    All topics have equally many partitions, so that a user's records of each have the same number, and the same worker.

    Args:
        partitions: Of each topic; those for rejected records have one.
        topics: Their names.
    """
    return [TopicSpec(topic, partitions, RETENTION_MS) for topic in topics] + [
        TopicSpec(topic + REJECTED_SUFFIX, 1, REJECTED_RETENTION_MS) for topic in topics
    ]


def servers(bootstrap_servers: str | Sequence[str]) -> list[str]:
    """Split addresses ``host:port``, given as a list or with commas.

    Raises:
        ValueError: There is none.
    """
    given = bootstrap_servers.split(",") if isinstance(bootstrap_servers, str) else bootstrap_servers
    found = [address.strip() for address in given if address.strip()]
    if not found:
        raise ValueError("no Kafka bootstrap servers; expected host:port, several with commas between them")
    return found
