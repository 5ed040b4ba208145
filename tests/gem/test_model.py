from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from gem.batch import TensorBatch
from gem.config import GemConfig, Vocabulary
from gem.examples import RequestLog
from gem.model import Gem


@pytest.fixture(scope="module")
def model(log: RequestLog) -> Gem:
    torch.manual_seed(0)
    return GemConfig(layers=3).build(Vocabulary.of(log.encoder)).eval()


def batch_of(log: RequestLog, requests: np.ndarray, limit: int = 50) -> TensorBatch:
    return TensorBatch.of(log.encode(requests, limit)[0])


def state_tensors(state: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for field in fields(state):  # type: ignore[arg-type]
        stack = [getattr(state, field.name)]
        while stack:
            value = stack.pop()
            if isinstance(value, tuple):
                stack.extend(value)
            else:
                found.append(value)
    return found


def with_other_candidates(log: RequestLog, batch: TensorBatch, seed: int) -> TensorBatch:
    rng = np.random.default_rng(seed)
    ads = rng.choice(log.encoder.ads.ids, len(batch.ad))
    row, categories, dense = log.encoder.encode_ads(ads)
    return batch.with_candidates(
        torch.from_numpy(row), torch.from_numpy(categories), torch.from_numpy(dense), batch.request
    )


def test_changing_candidates_leaves_the_request_side_bit_identical(log: RequestLog, model: Gem) -> None:
    batch = batch_of(log, np.arange(3_000, 3_064))
    other = with_other_candidates(log, batch, 1)
    with torch.inference_mode():
        pairs = [model.encode_candidates(model.encode_request(b), b).logits for b in (batch, other)]
        for one, two in zip(
            state_tensors(model.encode_request(batch)), state_tensors(model.encode_request(other)), strict=True
        ):
            assert torch.equal(one, two)
    assert not torch.allclose(*pairs), "the candidates must matter, else the test shows nothing"


def test_candidates_do_not_see_each_other(log: RequestLog, model: Gem) -> None:
    batch = batch_of(log, np.arange(3_000, 3_008))
    row, categories, dense = log.encoder.encode_ads(log.encoder.ads.ids[:40])
    request = torch.arange(8).repeat_interleave(5)
    together = batch.with_candidates(
        torch.from_numpy(row), torch.from_numpy(categories), torch.from_numpy(dense), request
    )
    with torch.inference_mode():
        state = model.encode_request(batch)
        all_logits = model.encode_candidates(state, together).logits
        for c in range(0, 40, 7):
            one = batch.with_candidates(
                torch.from_numpy(row[c : c + 1]),
                torch.from_numpy(categories[c : c + 1]),
                torch.from_numpy(dense[c : c + 1]),
                request[c : c + 1],
            )
            assert torch.allclose(model.encode_candidates(state, one).logits[0], all_logits[c], atol=1e-5)


def test_a_batch_equals_its_requests_one_by_one(log: RequestLog, model: Gem) -> None:
    requests = np.arange(2_000, 2_032)
    with torch.inference_mode():
        together = model(batch_of(log, requests)).logits
        alone = torch.cat([model(batch_of(log, requests[i : i + 1])).logits for i in range(len(requests))])
    assert torch.allclose(together, alone, atol=1e-5)


def test_empty_histories_and_no_requests(log: RequestLog, model: Gem) -> None:
    with torch.inference_mode():
        cold = model(batch_of(log, np.arange(10), limit=0)).logits
        assert torch.isfinite(cold).all()
        assert model(batch_of(log, np.arange(0))).logits.shape == (0, 3)


def test_one_step_changes_every_parameter(log: RequestLog) -> None:
    torch.manual_seed(0)
    model = GemConfig(layers=2, dropout=0.0).build(Vocabulary.of(log.encoder))
    batch, labels = log.encode(np.arange(4_000, 4_256), 50)
    logits = model(TensorBatch.of(batch)).logits
    torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(labels)).backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # The history after the last layer that is read is never used, nor is the pooling that no layer reads.
    assert not silent


def test_layers_that_do_not_pool_reuse_the_summary(log: RequestLog, model: Gem) -> None:
    assert [layer.pools for layer in model.layers] == [True, False, True]
    assert not hasattr(model.layers[1], "pooling")


@pytest.mark.parametrize("values", [{"dim": 30, "heads": 4}, {"layers": 0}])
def test_impossible_shapes_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        GemConfig(**values)
