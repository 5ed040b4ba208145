"""The cost formulas against a count of what the references really multiply."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels import cost
from kernels.seed_pooling import sum_kron
from tests.kernels.kernel_cases import D, H, K, S, gdpa_case, grouped, jagged, linear, owners_of, shared

LENGTHS = [3, 0, 5, 2]  # no 1: for it the reference multiplies without a counted product


def counted(function: object, *inputs: torch.Tensor) -> int:
    assert callable(function)
    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    return int(counter.get_total_flops())


def test_gdpa_and_shared_attention() -> None:
    case = gdpa_case(LENGTHS, 0)
    assert counted(case.reference, *case.inputs) == cost.gdpa(LENGTHS, K, H, D, 4).flops
    case = shared(LENGTHS, 0)
    assert counted(case.reference, *case.inputs) == cost.seed_pooling(LENGTHS, S, H, D, 4).flops


def test_grouped_gemm() -> None:
    case = grouped(LENGTHS, 0)
    found = cost.grouped_gemm(LENGTHS, 6, 7, 4)
    assert counted(case.reference, *case.inputs) == found.flops
    moved = [*case.inputs, case.operator(*case.inputs)]
    assert found.num_bytes == sum(x.numel() * 4 for x in moved) - 6 * 7 * 4  # one empty group


def test_jagged_attention_and_its_bytes() -> None:
    case = jagged(LENGTHS, 0)
    keys = [0, 1, 4, 0]
    assert sum(keys) == case.inputs[1].shape[0]
    found = cost.jagged_attention(LENGTHS, keys, H, D, 4)
    assert counted(case.reference, *case.inputs) == found.flops
    assert found.num_bytes == sum(x.numel() * 4 for x in [*case.inputs, case.operator(*case.inputs)])
    assert found.intensity == found.flops / found.num_bytes
    assert found.backward_flops == 2 * found.flops


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 0, 2])
def test_pairs_are_those_the_mask_allows(causal: bool, window: int | None) -> None:
    for n in range(6):
        for m in range(6):
            distance = (torch.arange(n) + m - n)[:, None] - torch.arange(m)
            legal = torch.ones_like(distance, dtype=torch.bool)
            if causal:
                legal &= distance >= 0
            if window is not None:
                legal &= distance.abs() <= window
            assert cost.num_pairs([n], [m], causal=causal, window=window) == int(legal.sum())


def test_block_attention_is_linear_in_the_length() -> None:
    one, two = (cost.block_attention([64 * n], H, D, 2) for n in (10, 20))
    assert two.flops == 2 * one.flops
    assert cost.block_attention([65], H, D, 2).flops == 4 * (64 * 64 + 1) * H * D


@pytest.mark.parametrize(("num_s", "num_t", "num_e"), [(6, 2, 4), (3, 5, 2), (2, 7, 9)])
def test_sum_kron(num_s: int, num_t: int, num_e: int) -> None:
    inputs = torch.randn(2, num_s, 5), torch.randn(3, num_s, num_t), torch.randn(3, 5, num_e)
    assert counted(sum_kron, *inputs) == cost.sum_kron(2, num_s, num_t, 5, num_e, 3, 4).flops


def test_broadcasting_saves_what_copies_would_cost() -> None:
    case = linear(LENGTHS, 0)
    candidates = owners_of(len(LENGTHS), False).numel()
    assert counted(case.operator, *case.inputs) == cost.broadcast_linear(4, candidates, 4, 5, 6, 4).flops
    per_request = cost.broadcast_attention([70], 4, [1000], H, 64, 2)
    per_candidate = cost.broadcast_attention([1] * 70, 4, [1000] * 70, H, 64, 2)
    assert per_request.flops == per_candidate.flops
    assert per_request.num_bytes < per_candidate.num_bytes / 30


def test_quantisation_moves_bytes_only() -> None:
    found = cost.quantize(3, 5, 2, num_scales=3)
    assert (found.flops, found.num_bytes, found.intensity) == (0, 3 * 5 * 3 + 12, 0.0)
