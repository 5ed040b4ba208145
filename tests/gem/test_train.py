from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gem.checkpoint import load_model, save_model
from gem.config import GemConfig, Vocabulary
from gem.engine import CALLS, GemEngine
from gem.examples import RequestLog
from gem.model import Gem
from gem.train import TrainConfig, Trainer, base_rates, days_of, evaluate_predictions, predict
from streams.artifact import ArtifactError
from tests.system import GEM

CONFIG = TrainConfig(batch=256, warmup=3)


def fresh(log: RequestLog, config: GemConfig = GEM) -> Gem:
    torch.manual_seed(1)
    return config.build(Vocabulary.of(log.encoder))


def some_days(log: RequestLog) -> list[np.ndarray]:
    return [day[:500] for day in days_of(log, log.between(None, None))[3:6]]


def test_days_are_the_schemas_local_days(log: RequestLog) -> None:
    days = days_of(log, log.between(None, None))
    assert sum(map(len, days)) == len(log)
    local_days = [np.unique((log.times_ms[day] + 8 * 3_600_000) // 86_400_000) for day in days]
    assert all(len(found) == 1 for found in local_days)
    assert len({int(found[0]) for found in local_days}) == len(days) >= 14


def test_an_interrupted_run_resumes_to_the_same_weights(log: RequestLog, tmp_path: Path) -> None:
    days = some_days(log)
    straight = fresh(log)
    Trainer(straight, log, CONFIG).fit(days, progress=False)

    class StopHere(Exception):  # noqa: N818
        pass

    def stop_before_the_last(index: int, _: np.ndarray) -> None:
        if index == 2:
            raise StopHere

    path = tmp_path / "state.pt"
    with pytest.raises(StopHere):
        Trainer(fresh(log), log, CONFIG).fit(days, before_day=stop_before_the_last, resume=path, progress=False)
    resumed = fresh(log)
    seen: list[int] = []
    Trainer(resumed, log, CONFIG).fit(days, before_day=lambda index, _: seen.append(index), resume=path, progress=False)
    assert seen == [2]
    for (name, one), two in zip(straight.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


def test_a_state_of_another_run_or_a_damaged_one_is_refused(log: RequestLog, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    Trainer(fresh(log), log, CONFIG).fit(some_days(log)[:1], resume=path, progress=False)
    with pytest.raises(ValueError, match="remove it to start anew"):
        Trainer(fresh(log), log, TrainConfig(batch=64)).fit(some_days(log), resume=path, progress=False)
    path.write_bytes(path.read_bytes()[:1_000])
    with pytest.raises(ArtifactError, match="state.pt"):
        Trainer(fresh(log), log, CONFIG).fit(some_days(log), resume=path, progress=False)


def test_each_day_is_predicted_before_it_is_learned(log: RequestLog) -> None:
    model = fresh(log)
    states = []

    def before(index: int, day: np.ndarray) -> None:
        assert not model.training
        states.append((index, len(day), model.heads.surface_bias.detach().clone()))

    days = some_days(log)
    Trainer(model, log, CONFIG).fit(days, before_day=before, progress=False)
    assert [(index, num) for index, num, _ in states] == [(i, len(day)) for i, day in enumerate(days)]
    assert not states[0][2].any(), "before the first day nothing was learned"
    assert not torch.equal(states[1][2], states[2][2])


def test_training_learns_what_the_mini_log_can_teach(log: RequestLog) -> None:
    _, test_ms = log.encoder.schema.split_ms()
    learned, test = log.between(None, test_ms), log.between(test_ms, None)
    model = fresh(log)
    Trainer(model, log, TrainConfig(batch=128, warmup=10)).fit(days_of(log, learned), progress=False)
    online = predict(model, log, test)
    frozen = predict(model, log, test, frozen_ms=test_ms)
    found = evaluate_predictions(log, test, online, base_rates(log, learned), frozen=frozen)
    assert found["is_click"].auc is not None and found["is_click"].auc > 0.64  # the surface alone gives about .59
    assert found["is_click"].ne is not None and found["is_click"].ne < 1.0
    one = evaluate_predictions(log, test, online, base_rates(log, learned), surface="1")
    assert one["is_click"].n == int((log.surfaces[test][log.candidate_indices(test)[1]] == 1).sum())
    assert not np.allclose(online, frozen)


def test_a_checkpoint_gives_the_same_answers_and_a_content_version(log: RequestLog, tmp_path: Path) -> None:
    model = fresh(log).eval()
    version = save_model(tmp_path / "gem", model, log.encoder)
    again, encoder, found = load_model(tmp_path / "gem")
    assert found == version == save_model(tmp_path / "copy", model, log.encoder)
    requests = np.arange(3_000, 3_050)
    assert np.array_equal(predict(model, log, requests), predict(again, log, requests))
    assert np.array_equal(encoder.ads.ids, log.encoder.ads.ids)
    with torch.no_grad():
        next(iter(model.parameters())).add_(1e-3)
    assert save_model(tmp_path / "copy", model, log.encoder) != version
    weights = tmp_path / "gem" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="model.safetensors is truncated or changed"):
        load_model(tmp_path / "gem")


def test_the_engine_counts_its_runs_and_its_flops(log: RequestLog) -> None:
    engine = GemEngine(fresh(log), log.encoder, "0" * 16)
    batch, _ = log.encode(np.arange(3_000, 3_010), engine.history)
    before = dict(CALLS)
    state = engine.encode_request(batch)
    pair, logits = engine.embed_pairs(state, batch)
    assert (CALLS["encode_request"], CALLS["embed_pairs"]) == tuple(
        before.get(k, 0) + 1 for k in ("encode_request", "embed_pairs")
    )
    assert pair.shape == (len(batch.ad), GEM.pair_dim)
    assert logits.shape == (len(batch.ad), 3)
    assert engine.user_embedding(state).shape == (10, GEM.user_dim)
    request, per_pair = engine.flops()
    # f_R runs over the whole history, f_C over one ad: the point of the split.
    assert request > 3 * per_pair > 0
