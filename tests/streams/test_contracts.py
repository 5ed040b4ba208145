from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.artifact import ArtifactError, read_manifest, write_artifact
from streams.dataset import Dataset, load_dataset
from streams.encode import NUM_OOV_ADS, Encoder
from streams.encoder_file import load_encoder, save_encoder
from streams.events import ActivityEvent, EventError, decode_event, encode_event, event_row, event_rows, to_epoch_ms
from streams.ids import hash_ints, id64, ids64
from streams.requests import ServedRecordError, decode_served
from streams.rows import LOG_ROW
from streams.schema import FeatureSchema, SchemaError, UnknownValueError

NOW_MS = 1_651_000_000_000


def event(**changes: object) -> ActivityEvent:
    values: dict[str, object] = {"event_id": "e1", "user_id": 7, "ad_id": 9, "surface": "1", "time_ms": NOW_MS}
    return ActivityEvent(**{**values, **changes})  # type: ignore[arg-type]


@given(st.integers(-(2**63), 2**63 - 1))
def test_vectorised_and_scalar_identity_agree(value: int) -> None:
    assert id64(value) == int(hash_ints(np.array([value]))[0]) == int(ids64([value])[0])


@given(st.integers(-(10**17), 10**17))
def test_an_integer_is_the_same_id_however_it_is_written(value: int) -> None:
    assert id64(str(value)) == id64(value)


def test_other_spellings_are_other_ids() -> None:
    assert len({id64(x) for x in (5, "05", "+5", " 5", "5.0", "five", "-0")}) == 7


@pytest.mark.parametrize("value", [True, 1.5, None, b"x"])
def test_ids_of_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="int or a str"):
        id64(value)  # type: ignore[arg-type]


def test_ids_out_of_range_or_empty_are_refused() -> None:
    for bad in (2**63, -(2**63) - 1, ""):
        with pytest.raises(ValueError, match="id"):
            id64(bad)
        with pytest.raises(ValueError, match="id"):
            ids64([bad])


def test_events_survive_the_wire(dataset: Dataset) -> None:
    sent = event(event_types=["is_click", "long_view"], value=0.1)
    user, row = event_row(decode_event(encode_event(sent)), dataset.schema)
    (users, rows) = event_rows([sent], dataset.schema)
    assert users[0] == user == id64(7)
    assert rows[0].tolist() == np.array([row], dtype=LOG_ROW)[0].tolist()
    assert int(rows[0]["actions"]) == 0b111


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"surface": "home"}, "legal values: 0, 1, 2"),
        ({"event_types": ["is_bought"]}, "legal values: impression, is_click"),
        ({"time_ms": 1_651_000_000}, "epoch time in ms"),
        ({"time_ms": 1_651_000_000_000_000}, "epoch time in ms"),
        ({"time_ms": 4_000_000_000_000}, "up to now"),
        ({"value": float("nan")}, "finite"),
        ({"user_id": ""}, "empty"),
    ],
)
def test_events_outside_the_schema_are_refused_by_name(
    dataset: Dataset, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(EventError, match=named):
        event_row(event(**changes), dataset.schema)


@pytest.mark.parametrize(
    "value", [b"", b"{", b"[]", b'{"user_id":1}', b'{"event_id":1,"user_id":1,"ad_id":1,"surface":"1","time_ms":"now"}']
)
def test_bytes_that_are_no_event_are_refused(value: bytes) -> None:
    with pytest.raises(EventError, match="not an activity event"):
        decode_event(value)


def test_unknown_fields_and_versions_are_refused() -> None:
    good = encode_event(event())
    with pytest.raises(EventError, match="unknown field"):
        decode_event(good[:-1] + b',"price":1}')
    with pytest.raises(EventError, match="version 2"):
        decode_event(good.replace(b'"v":1', b'"v":2'))


def test_naive_times_are_refused_and_zones_agree() -> None:
    with pytest.raises(EventError, match="naive"):
        to_epoch_ms(datetime(2022, 5, 4))
    kolkata = timezone(timedelta(hours=5, minutes=30))
    assert to_epoch_ms(datetime(2022, 5, 4, 5, 30, tzinfo=kolkata)) == to_epoch_ms(datetime(2022, 5, 4, tzinfo=UTC))


def test_served_records_that_do_not_parse_are_refused() -> None:
    with pytest.raises(ServedRecordError, match="not a served request"):
        decode_served(b"{}")


def write_schema(folder: Path, text: str) -> Path:
    path = folder / "schema.toml"
    path.write_text(text)
    return path


GOOD = """
name = "x"
version = 1
surfaces = ["home"]
event_types = ["impression", "click"]
objectives = ["click"]
columns = {user = "u", ad = "a", time_ms = "t", surface = "s"}
"""


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"home"]', '"home", "home"]', "twice"),
        ('objectives = ["click"]', 'objectives = ["buy"]', "buy"),
        ("version = 1", 'version = "one"', "version"),
        ("version = 1", "version = 1\ncolour = 2", "colour"),
        ("version = 1", "version = 1\ntrain_until = 2022-05-04T00:00:00", "naive"),
        ('surfaces = ["home"]', "surfaces = []", "surfaces"),
    ],
)
def test_schemas_that_contradict_themselves_are_refused(tmp_path: Path, old: str, new: str, named: str) -> None:
    assert FeatureSchema.load(write_schema(tmp_path, GOOD)).name == "x"
    with pytest.raises(SchemaError, match=named):
        FeatureSchema.load(write_schema(tmp_path, GOOD.replace(old, new)))


def test_missing_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="nowhere does not exist"):
        load_dataset(tmp_path / "nowhere")
    write_schema(tmp_path, GOOD)
    with pytest.raises(SchemaError, match="users.parquet does not exist"):
        load_dataset(tmp_path)
    (tmp_path / "users.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(SchemaError, match="users.parquet is not readable"):
        load_dataset(tmp_path)


def test_unknown_surface_and_objective_name_the_legal_ones(dataset: Dataset) -> None:
    with pytest.raises(UnknownValueError, match="is_click, long_view, is_like"):
        dataset.schema.objective_index("buys")


def encode(encoder: Encoder, rows: np.ndarray, now_ms: int, ads: list[int]) -> object:
    offsets = np.array([0, len(rows)])
    users, times = np.array([5], np.uint64), np.array([now_ms])
    return encoder.encode(
        users, np.array([1]), times, rows, offsets, np.array(ads, np.uint64), np.zeros(len(ads), np.int64)
    )


def test_an_event_at_the_request_or_after_it_is_refused(dataset: Dataset) -> None:
    rows = dataset.rows[:1].copy()
    now_ms = int(rows["time_ms"][0])
    encode(dataset.encoder, rows, now_ms + 1, [1])
    for before in (0, 5):
        with pytest.raises(ValueError, match="at or after its own time"):
            encode(dataset.encoder, rows, now_ms - before, [1])


def test_unknown_ads_get_hashed_rows_and_zero_features(dataset: Dataset) -> None:
    encoder = dataset.encoder
    known = encoder.ads.ids[:3]
    unknown = np.array([1, 2, 3], np.uint64)
    row, categories, dense = encoder.encode_ads(np.concatenate([known, unknown]))
    assert row[:3].tolist() == [1, 2, 3]
    assert ((row[3:] > len(encoder.ads.ids)) & (row[3:] < encoder.num_ad_rows)).all()
    assert row[3:].max() - row[3:].min() < NUM_OOV_ADS
    assert not categories[3:].any()
    assert not dense[3:].any()
    assert categories[:3].any()


def test_an_encoder_survives_the_disk(dataset: Dataset, tmp_path: Path) -> None:
    save_encoder(tmp_path, dataset.encoder)
    again = load_encoder(tmp_path)
    assert again.schema == dataset.schema
    rows = dataset.rows[:50]
    ads = dataset.rows["ad"][:20].tolist()
    one, two = (encode(e, rows, int(rows["time_ms"].max()) + 1, ads) for e in (dataset.encoder, again))
    for name, array in one.arrays().items():  # type: ignore[attr-defined]
        assert np.array_equal(array, getattr(two, name)), name


def test_requests_group_one_user_on_one_surface_within_the_gap(dataset: Dataset) -> None:
    request = dataset.requests()
    order = np.lexsort((dataset.rows["time_ms"], request))
    users, surfaces, times = dataset.users[order], dataset.rows["surface"][order], dataset.rows["time_ms"][order]
    same = request[order][1:] == request[order][:-1]
    gap = np.diff(times)
    assert same.sum() > 20
    assert (users[1:] == users[:-1])[same].all()
    assert (surfaces[1:] == surfaces[:-1])[same].all()
    assert (gap[same] <= dataset.schema.request_gap_ms).all()
    first = np.full(request.max() + 1, 2**62)
    np.minimum.at(first, request, dataset.rows["time_ms"])
    assert (np.diff(first) >= 0).all(), "requests are numbered by time"


def test_artifacts_name_the_damaged_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    version = write_artifact(folder, "gem", {"a": 1}, lambda f: (f / "w.bin").write_bytes(b"12345678") and None)
    assert read_manifest(folder, "gem")["version"] == version
    again = write_artifact(tmp_path / "copy", "gem", {}, lambda f: (f / "w.bin").write_bytes(b"12345678") and None)
    assert again == version, "the version is the content's"
    with pytest.raises(ArtifactError, match="expected 'ranker'"):
        read_manifest(folder, "ranker")
    (folder / "w.bin").write_bytes(b"1234")
    with pytest.raises(ArtifactError, match=r"w.bin is truncated or changed"):
        read_manifest(folder, "gem")
    (folder / "w.bin").unlink()
    with pytest.raises(ArtifactError, match=r"w.bin is missing"):
        read_manifest(folder, "gem")
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match="not readable JSON"):
        read_manifest(folder, "gem")
    with pytest.raises(ArtifactError, match=r"manifest.json is missing"):
        read_manifest(tmp_path, "gem")
