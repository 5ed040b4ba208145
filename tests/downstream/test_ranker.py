from __future__ import annotations

from dataclasses import fields

import torch

from downstream.export import example_inputs
from downstream.ranker import Ranker, RankerConfig
from tests.system import System


def ranker_and_inputs(system: System) -> tuple[Ranker, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    encoder, layout = system.log.encoder, system.representer.layout
    ranker = Ranker(RankerConfig(), encoder, layout).eval()
    with torch.no_grad():
        for parameter in ranker.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    inputs = example_inputs(encoder, layout, 6, 9)
    for name, tensor in inputs.items():
        inputs[name] = torch.randint(0, 9, tensor.shape) if tensor.dtype == torch.int64 else torch.randn(tensor.shape)
    inputs["event_mask"] = torch.ones(1, 6)
    return ranker, inputs


def test_changing_candidates_leaves_the_request_side_bit_identical(system: System) -> None:
    ranker, inputs = ranker_and_inputs(system)
    other = inputs | {name: inputs[name].flip(1) * 2 for name in ("ad", "fm_pair", "fm_state")}
    with torch.inference_mode():
        ads = ranker.ad_vectors()
        one, two = ranker.encode_request(inputs, ads), ranker.encode_request(other, ads)
        for field in fields(one):
            assert torch.equal(getattr(one, field.name), getattr(two, field.name)), field.name
        assert not torch.allclose(ranker(inputs), ranker(other)), (
            "the candidates must matter, else the test shows nothing"
        )


def test_candidates_do_not_see_each_other(system: System) -> None:
    ranker, inputs = ranker_and_inputs(system)
    with torch.inference_mode():
        together = ranker(inputs)
        for n in range(9):
            alone = inputs | {name: inputs[name][:, n : n + 1] for name in ("ad", "fm_pair", "fm_state")}
            assert torch.allclose(ranker(alone)[0, 0], together[0, n], atol=1e-5)


def test_masked_events_do_not_count(system: System) -> None:
    ranker, inputs = ranker_and_inputs(system)
    cut = inputs | {
        "event_ad": inputs["event_ad"][:, :4],
        "event_facts": inputs["event_facts"][:, :4],
        "event_mask": torch.ones(1, 4),
    }
    masked = inputs | {"event_mask": torch.tensor([[1.0, 1, 1, 1, 0, 0]])}
    with torch.inference_mode():
        assert torch.allclose(ranker(cut), ranker(masked), atol=1e-6)
        assert not torch.allclose(ranker(cut), ranker(inputs), atol=1e-4)
