from __future__ import annotations

import shutil
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from downstream.export import example_inputs, input_names, save_ranker
from downstream.ranker import Ranker, RankerConfig
from downstream.registry import Registry
from downstream.runtime import RankerRuntime
from downstream.serve import PortBusyError, bind
from streams.artifact import ArtifactError
from streams.embedded import EmbeddedValkey
from streams.log.valkey import ValkeyLog
from streams.requests import SERVED_TOPIC
from streams.user_log import UserLog
from tests.system import System

NOW_MS = 1_651_900_000_000


def request(system: System, **changes: object) -> dict[str, object]:
    ads = [int(x) for x in list(system.dataset.raw_ads.values())[:10]]
    return {"user_id": 1, "surface": "1", "candidates": ads, "time_ms": NOW_MS, **changes}


def wait_for(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def test_an_answer_explains_itself(system: System, store: EmbeddedValkey) -> None:
    with system.api(store.url) as http:
        body = request(system, objective="long_view", top=3)
        answer = http.post("/v1/rank", json=body)
        assert answer.status_code == 200
        found = answer.json()
        assert found["objective"] == "long_view"
        assert found["degraded"] is False
        assert found["variant"] == "ranker"
        assert found["fm_version"] == f"{system.representer.version:016x}"
        assert set(found["timings_ms"]) == {"fetch", "encode", "score", "total"}
        assert len(found["candidates"]) == 3
        scores = [c["score"] for c in found["candidates"]]
        assert scores == sorted(scores, reverse=True)
        for candidate in found["candidates"]:
            assert set(candidate["probabilities"]) == set(system.dataset.schema.objectives)
            assert candidate["score"] == candidate["probabilities"]["long_view"]
            assert candidate["level"] == "none"
            assert candidate["age_ms"] is None
            assert candidate["known"] is True
        everything = http.post("/v1/rank", json=request(system)).json()["candidates"]
        assert {c["ad_id"] for c in everything} == set(request(system)["candidates"])  # type: ignore[call-overload]


def test_served_requests_are_logged_and_shadows_are_not(system: System, store: EmbeddedValkey) -> None:
    log = ValkeyLog(store.client())
    with system.api(store.url) as http:
        http.post("/v1/rank", json=request(system, shadow=True))
        http.post("/v1/rank", json=request(system, request_id="mine"))
        wait_for(lambda: log.published(SERVED_TOPIC) == 1)
    assert log.published(SERVED_TOPIC) == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"surface": "home"}, "legal values: 0, 1, 2"),
        ({"objective": "buy"}, "legal values: is_click, long_view, is_like"),
        ({"variant": "big"}, "legal values: control, ranker"),
        ({"surface": 1}, "surface"),
        ({"candidates": []}, "candidates"),
        ({"candidates": [1.5]}, "candidates"),
        ({"candidates": list(range(3_000))}, "2000"),
        ({"candidates": [7, "7"]}, "given twice"),
        ({"user_id": None}, "user_id"),
        ({"user_id": ""}, "empty"),
        ({"user_id": 2**70}, ""),
        ({"time_ms": 1_651_900_000}, "epoch time in ms"),
        ({"top": 0}, "top"),
        ({"colour": "red"}, "legal fields: user_id"),
    ],
)
def test_bad_requests_name_the_field_and_the_legal_values(
    system: System, store: EmbeddedValkey, changes: dict[str, object], named: str
) -> None:
    with system.api(store.url) as http:
        answer = http.post("/v1/rank", json=request(system, **changes))
        assert answer.status_code == 422
        assert named in answer.json()["detail"]
        assert http.post("/v1/rank", content=b"{").status_code == 422
        assert http.post("/v1/rank", json=request(system)).status_code == 200


def test_unknown_users_and_ads_are_ranked_as_cold_and_flagged(system: System, store: EmbeddedValkey) -> None:
    known = request(system)["candidates"][0]  # type: ignore[index]
    with system.api(store.url) as http:
        answer = http.post(
            "/v1/rank", json=request(system, user_id="nobody", candidates=[known, "new-ad", 987_654_321])
        )
        assert answer.status_code == 200
        found = answer.json()
        assert found["cold_user"] is True
        assert {c["ad_id"]: c["known"] for c in found["candidates"]} == {
            known: True,
            "new-ad": False,
            987_654_321: False,
        }
        assert all(np.isfinite(c["score"]) for c in found["candidates"])


def test_without_the_store_answers_are_degraded_and_recover(system: System) -> None:
    with EmbeddedValkey(appendonly=False) as server, system.api(server.url, store_retry_s=0.1) as http:
        assert http.post("/v1/rank", json=request(system)).json()["degraded"] is False
        server.kill()
        answers = [http.post("/v1/rank", json=request(system)) for _ in range(5)]
        assert [a.status_code for a in answers] == [200] * 5
        assert all(a.json()["degraded"] and {c["level"] for c in a.json()["candidates"]} == {"none"} for a in answers)
        ready = http.get("/ready")
        assert (ready.status_code, ready.json()["store"]) == (200, "down")
        assert "specrank_degraded_total 5.0" in http.get("/metrics").text
        server.start()
        wait_for(lambda: http.post("/v1/rank", json=request(system)).json()["degraded"] is False)
        assert http.get("/ready").json()["store"] == "up"


def test_one_round_trip_and_a_bounded_number_of_connections(system: System, store: EmbeddedValkey) -> None:
    with system.api(store.url, max_pending=2_000) as http:
        http.post("/v1/rank", json=request(system))
        client = store.client()
        before = client.info("clients")["connected_clients"]
        threads = [
            threading.Thread(target=http.post, args=("/v1/rank",), kwargs={"json": request(system)}) for _ in range(60)
        ]
        for thread in threads:
            thread.start()
        most = max(client.info("clients")["connected_clients"] for _ in range(50))
        for thread in threads:
            thread.join()
        assert most - before <= 8


def test_openapi_shows_the_request_with_an_example(system: System, store: EmbeddedValkey) -> None:
    with system.api(store.url) as http:
        post = http.get("/openapi.json").json()["paths"]["/v1/rank"]["post"]
        content = post["requestBody"]["content"]["application/json"]
        assert set(content["schema"]["required"]) == {"user_id", "surface", "candidates"}
        assert http.post("/v1/rank", json=content["example"]).status_code == 200, "the example must be a legal request"
        assert set(post["responses"]) >= {"200", "422", "503"}


def test_metrics_count_levels_and_no_fm_runs(system: System, store: EmbeddedValkey) -> None:
    with system.api(store.url) as http:
        http.post("/v1/rank", json=request(system))
        text = http.get("/metrics").text
    assert 'specrank_candidates_total{level="none"} 10.0' in text
    assert 'specrank_requests_total{status="200",variant="ranker"} 1.0' in text


def test_health_answers_while_ranking_is_busy(system: System, store: EmbeddedValkey) -> None:
    with system.api(store.url) as http:
        entered, release = threading.Event(), threading.Event()
        registry_get = Registry.get

        def slow(self: Registry, name: str | None) -> object:
            entered.set()
            release.wait(20)
            return registry_get(self, name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Registry, "get", slow)
            busy = threading.Thread(target=http.post, args=("/v1/rank",), kwargs={"json": request(system)})
            busy.start()
            assert entered.wait(10)
            assert http.get("/health").json() == {"status": "ok"}
            release.set()
            busy.join()


def copy_rankers(system: System, folder: Path) -> Path:
    return Path(shutil.copytree(system.folder / "rankers", folder / "rankers"))


@pytest.mark.parametrize("file", ["ranker.onnx", "encoder.safetensors", "ranker.json", "schema.json"])
def test_a_damaged_ranker_is_refused_by_file(system: System, store: EmbeddedValkey, tmp_path: Path, file: str) -> None:
    rankers = copy_rankers(system, tmp_path)
    path = rankers / "ranker" / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ArtifactError, match=f"{file} is truncated or changed"):
        RankerRuntime.load(rankers / "ranker")
    with pytest.raises(ArtifactError, match=file):
        Registry(rankers, store.client(), "ranker")


def test_a_new_ranker_is_swapped_in_and_a_damaged_one_leaves_the_old(
    system: System, store: EmbeddedValkey, tmp_path: Path
) -> None:
    rankers = copy_rankers(system, tmp_path)
    registry = Registry(rankers, store.client(), "ranker")
    old = registry.get(None).runtime.version
    representer = system.representer
    fresh = Ranker(RankerConfig(dim=8), system.log.encoder, representer.layout)
    new = save_ranker(rankers / "ranker", fresh, system.log.encoder, representer.layout, representer.version)
    registry.refresh()
    assert registry.get(None).runtime.version == new != old
    graph = rankers / "ranker" / "ranker.onnx"
    graph.write_bytes(b"no graph")
    (rankers / "ranker" / "manifest.json").touch()
    registry.refresh()
    assert registry.get("ranker").runtime.version == new


def test_missing_rankers_are_named(store: EmbeddedValkey, tmp_path: Path, system: System) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        Registry(tmp_path / "nowhere", store.client(), "ranker")
    with pytest.raises(ArtifactError, match="no ranker 'best'; found: control, ranker"):
        Registry(system.folder / "rankers", store.client(), "best")


@pytest.mark.parametrize("use_fm", [True, False])
@pytest.mark.parametrize(("events", "candidates"), [(0, 1), (1, 1), (10, 40), (3, 7)])
def test_the_graph_scores_as_the_model_does(
    system: System, tmp_path: Path, use_fm: bool, events: int, candidates: int
) -> None:
    import torch

    torch.manual_seed(events)
    encoder, layout = system.log.encoder, system.representer.layout
    ranker = Ranker(RankerConfig(use_fm=use_fm), encoder, layout).eval()
    with torch.no_grad():
        for parameter in ranker.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_ranker(tmp_path / "r", ranker, encoder, layout, 1)
    inputs = example_inputs(encoder, layout, events, candidates)
    for name, tensor in inputs.items():
        inputs[name] = torch.randint(0, 5, tensor.shape) if tensor.dtype == torch.int64 else torch.randn(tensor.shape)
    inputs["event_mask"] = torch.ones(1, events)
    runtime = RankerRuntime.load(tmp_path / "r")
    assert runtime.reads_fm == use_fm
    found = runtime.score({name: inputs[name].numpy() for name in input_names(use_fm)})
    with torch.no_grad():
        expected = ranker(inputs)[0].sigmoid().numpy()
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert found.std() > 1e-3


def test_a_busy_port_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortBusyError, match=f"port {taken.getsockname()[1]} on 127.0.0.1"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_the_newest_history_is_read(system: System, store: EmbeddedValkey) -> None:
    dataset = system.dataset
    users, rows = dataset.all_events
    user = int(users[0])
    mine = users == user
    UserLog(store.client()).append(users[mine], rows[mine])
    raw = int(dataset.raw_users[np.flatnonzero(dataset.users == user)[0]])
    with system.api(store.url) as http:
        found = http.post("/v1/rank", json=request(system, user_id=raw)).json()
    assert found["cold_user"] is False
    assert found["history_events"] == 10


def test_a_graph_that_cannot_score_is_refused_at_load(system: System, tmp_path: Path) -> None:
    import onnx

    from downstream.artifact import GRAPH, KIND
    from streams.artifact import write_artifact

    source = system.folder / "rankers" / "control"

    def rewrite(change: object) -> Path:
        graph = onnx.load(source / GRAPH)
        change(graph)  # type: ignore[operator]

        def write(staging: Path) -> None:
            for file in source.iterdir():
                if file.name not in (GRAPH, "manifest.json"):
                    shutil.copy(file, staging / file.name)
            onnx.save(graph, staging / GRAPH)

        write_artifact(tmp_path / "ranker", KIND, {}, write)
        return tmp_path / "ranker"

    assert RankerRuntime.load(rewrite(lambda graph: None)).version

    def rename_output(graph: onnx.ModelProto) -> None:
        old = graph.graph.output[0].name
        graph.graph.output[0].name = "scores"
        for node in graph.graph.node:
            for index, name in enumerate(node.output):
                if name == old:
                    node.output[index] = "scores"

    with pytest.raises(ArtifactError, match=r"ranker.onnx cannot score a request"):
        RankerRuntime.load(rewrite(rename_output))


def test_exported_graphs_carry_no_paths(system: System) -> None:
    content = (system.folder / "rankers" / "ranker" / "ranker.onnx").read_bytes()
    assert b".py" not in content


def test_the_address_decides_the_kind_of_connection() -> None:
    import redis

    from downstream.settings import ApiSettings
    from downstream.store_guard import guarded_client

    for scheme, kind in (("redis", redis.Connection), ("rediss", redis.SSLConnection)):
        client = guarded_client(ApiSettings(rankers=Path("x"), redis_url=f"{scheme}://127.0.0.1:1/0"))
        assert issubclass(client.connection_pool.connection_class, kind)
    assert not issubclass(
        guarded_client(
            ApiSettings(rankers=Path("x"), redis_url="redis://127.0.0.1:1/0")
        ).connection_pool.connection_class,
        redis.SSLConnection,
    )


def test_one_record_that_cannot_be_published_does_not_stop_the_others(system: System, store: EmbeddedValkey) -> None:
    from downstream.metrics import ApiMetrics
    from downstream.publisher import ServedPublisher
    from tests.solaris.test_worker import served

    class Picky(ValkeyLog):
        def publish_many(self, topic: str, records: object) -> None:
            if any(b'"r6001"' in value for _, value in records):  # type: ignore[attr-defined]
                raise ValueError("too large")
            super().publish_many(topic, records)  # type: ignore[arg-type]

    log, metrics = Picky(store.client()), ApiMetrics()
    publisher = ServedPublisher(log, metrics)
    for index in (6_000, 6_001, 6_002):
        publisher.put(served(system, index))
    publisher.close()
    assert log.published(SERVED_TOPIC) == 2
    assert metrics.registry.get_sample_value("specrank_served_dropped_total") == 1
