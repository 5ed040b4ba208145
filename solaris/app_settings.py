"""Settings of a worker that consumes from Kafka; environment prefix `SPECRANK_WORKER_`."""

from __future__ import annotations

from pydantic import Field, SecretStr

from solaris.settings import WorkerSettings
from streams.log.kafka_client import DEFAULT_PARTITIONS, KafkaSecurity


class KafkaWorkerSettings(WorkerSettings):
    """One Solaris worker process on Kafka."""

    kafka_bootstrap_servers: str = Field(  # type: ignore[assignment]
        description="host:port of some brokers, with commas between them"
    )
    kafka_partitions: int = Field(
        DEFAULT_PARTITIONS, ge=1, description="of the activity and served topics: what bounds the number of workers"
    )
    kafka_security_protocol: str = Field("PLAINTEXT", description="PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL")
    kafka_sasl_mechanism: str | None = Field(None, description="PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512")
    kafka_username: str | None = None
    kafka_password: SecretStr | None = None
    kafka_cafile: str | None = Field(None, description="authorities to trust with SSL; the system's where absent")

    def security(self) -> KafkaSecurity:
        """How clients prove who they are.

        Raises:
            ValueError: the protocol is unknown, or lacks what it needs.
        """
        return KafkaSecurity(
            protocol=self.kafka_security_protocol,
            mechanism=self.kafka_sasl_mechanism,
            username=self.kafka_username,
            password=None if self.kafka_password is None else self.kafka_password.get_secret_value(),
            cafile=self.kafka_cafile,
        )
