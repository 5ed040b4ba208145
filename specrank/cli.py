"""The `specrank` command: one sub-command per job."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Foundation-model ranking without the foundation model on the serving path.",
)
gem_app = typer.Typer(no_args_is_help=True, help="The foundation model.")
loopfm_app = typer.Typer(no_args_is_help=True, help="What the foundation model knows, for small models.")
solaris_app = typer.Typer(no_args_is_help=True, help="Speculation and workers.")
downstream_app = typer.Typer(no_args_is_help=True, help="Rankers and the ranking API.")
streams_app = typer.Typer(no_args_is_help=True, help="Events in, topics and users out.")
app.add_typer(gem_app, name="gem")
app.add_typer(loopfm_app, name="loopfm")
app.add_typer(solaris_app, name="solaris")
app.add_typer(downstream_app, name="downstream")
app.add_typer(streams_app, name="streams")

DataOption = Annotated[Path, typer.Option(help="folder with schema.toml and the Parquet files")]
DEFAULT_DATA = Path("data/kuairand")


@app.command()
def demo(
    data: DataOption = DEFAULT_DATA,
    run: Annotated[Path, typer.Option(help="folder for models and report; emptied first")] = Path("runs/demo"),
    users: Annotated[
        float, typer.Option(help="share of users whose test days are replayed", min=0.001, max=1.0)
    ] = 0.15,
    serve: Annotated[bool, typer.Option("--serve", help="leave the system running for a person to try")] = False,
    kafka: Annotated[
        str | None,
        typer.Option(envvar="KAFKA_BOOTSTRAP_SERVERS", help="brokers host:port; the embedded log where absent"),
    ] = None,
) -> None:
    """Trains, serves and replays the log of `data`, then prints and saves a report."""
    from specrank.demo.config import DemoConfig
    from specrank.demo.run import run_demo

    run_demo(DemoConfig(data=data, run=run, user_share=users, kafka=kafka), serve=serve)


@gem_app.command("train")
def gem_train(
    out: Annotated[Path, typer.Option(help="folder of the artifact")],
    data: DataOption = DEFAULT_DATA,
    resume: Annotated[
        Path | None, typer.Option(help="file that keeps the state after each day; goes on from it if it exists")
    ] = None,
) -> None:
    """Trains GEM on the training and validation days, and prints its metrics on the test days as JSON."""
    from specrank.jobs import train_gem

    train_gem(data, out, resume)


@loopfm_app.command("augment")
def loopfm_augment(
    gem: Annotated[Path, typer.Option(help="artifact of GEM")],
    autoencoder: Annotated[
        Path, typer.Option(help="artifact of the autoencoder; fitted on the valid day and written if missing")
    ],
    out: Annotated[Path, typer.Option(help="Parquet file to write")],
    data: DataOption = DEFAULT_DATA,
) -> None:
    """One FM pass over the days after its training: labels and representations of every shown ad, each once."""
    from specrank.jobs import augment_log

    augment_log(data, gem, autoencoder, out)


@loopfm_app.command("distill")
def loopfm_distill(
    table: Annotated[Path, typer.Option(help="augmented table, as `loopfm augment` writes it")],
    out: Annotated[Path, typer.Option(help="folder of the ranker's artifact")],
    data: DataOption = DEFAULT_DATA,
) -> None:
    """Trains a ranker with the FM's soft labels alone, through an auxiliary head, on the whole log: score it on later days only."""
    from specrank.jobs import distill_ranker

    distill_ranker(data, table, out)


@downstream_app.command("train")
def downstream_train(
    table: Annotated[Path, typer.Option(help="table of served features and soft labels")],
    out: Annotated[Path, typer.Option(help="folder of the artifact")],
    data: DataOption = DEFAULT_DATA,
    fm: Annotated[bool, typer.Option("--fm/--no-fm", help="whether the ranker reads FM embeddings")] = True,
) -> None:
    """Trains a ranker on features as served and exports it."""
    from specrank.jobs import train_downstream

    train_downstream(data, table, out, use_fm=fm)


@downstream_app.command("serve")
def downstream_serve(
    port: Annotated[int | None, typer.Option(help="overrides SPECRANK_API_PORT")] = None,
) -> None:
    """Serves the ranking API; settings from the environment, prefix SPECRANK_API_."""
    from downstream.serve import serve
    from downstream.settings import ApiSettings

    settings = ApiSettings()
    serve(settings if port is None else settings.model_copy(update={"port": port}))


@solaris_app.command("run")
def solaris_run() -> None:
    """Runs a worker; settings from the environment, prefix SPECRANK_WORKER_. With Kafka brokers given, as a Faust app."""
    from solaris.run import run_worker
    from solaris.settings import WorkerSettings

    settings = WorkerSettings()
    if settings.kafka_bootstrap_servers is None:
        run_worker(settings)
        return
    from solaris.app import run_kafka_worker
    from solaris.app_settings import KafkaWorkerSettings

    sys.exit(run_kafka_worker(KafkaWorkerSettings()))


LogOption = Annotated[
    str, typer.Option("--log", envvar="SPECRANK_LOG_URL", help="kafka://host:port or redis://host:port/0")
]


@streams_app.command("produce")
def streams_produce(
    log: LogOption,
    source: Annotated[
        str,
        typer.Argument(help="JSON lines or a .parquet file, one activity event a line or row; - reads standard input"),
    ] = "-",
    data: DataOption = DEFAULT_DATA,
) -> None:
    """Publishes activity events from JSON lines or Parquet; illegal ones are refused with their reason, and the rest goes on."""
    from specrank.jobs import produce_lines

    produce_lines(log, source, data)


@streams_app.command("replay")
def streams_replay(
    log: LogOption,
    data: DataOption = DEFAULT_DATA,
    speed: Annotated[
        float | None, typer.Option(help="event seconds per second; as fast as possible where absent")
    ] = None,
    start: Annotated[str | None, typer.Option(help="first moment, ISO 8601 with its UTC offset")] = None,
    end: Annotated[str | None, typer.Option(help="moment after the last, ISO 8601 with its UTC offset")] = None,
) -> None:
    """Publishes the events of a Parquet log in order of time."""
    from specrank.jobs import replay_log

    replay_log(log, data, speed, start, end)


@streams_app.command("inspect")
def streams_inspect(
    log: LogOption,
    store: Annotated[str | None, typer.Option(help="redis://host:port/0 of the store, for --user")] = None,
    user: Annotated[str | None, typer.Option(help="one user's newest events and rows")] = None,
    data: DataOption = DEFAULT_DATA,
) -> None:
    """Prints topics with lag and rejected records, and what is stored of one user, as JSON."""
    from specrank.jobs import inspect_streams

    inspect_streams(log, store, user, data)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turns the errors a user can cause into one line; anything else is a defect and keeps its traceback."""
    import redis
    from pydantic import ValidationError

    from streams.errors import UserError
    from streams.log import LogUnavailable

    try:
        yield
    except ValidationError as error:
        fields = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        sys.exit(f"specrank: settings: {fields} (set them in the environment, see `--help`)")
    except (UserError, LogUnavailable, redis.RedisError, OSError) as error:
        sys.exit(f"specrank: {error}")


def main() -> None:
    """Entry point."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for package in ("specrank", "solaris", "downstream", "loopfm", "gem", "streams"):
        logging.getLogger(package).setLevel(logging.INFO)
    # torchrec asks torch.fx a question in a way that torch has deprecated; nothing a user could do about it.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    with _one_line_errors():
        app()
