"""Every operator on the CPU against its reference: values and gradients, empty rows, tails, views, properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.block_attention import block_attention
from kernels.broadcast_attention import broadcast_attention
from kernels.gdpa import ACTIVATIONS, gdpa
from kernels.grouped_gemm import fused_linears
from kernels.jagged_attention import jagged_attention, jagged_attention_shared
from kernels.seed_pooling import reference as seed_reference
from kernels.seed_pooling import seed_pooling, sum_kron
from kernels.testing import assert_as_good, offsets_of, strided, value_and_gradients
from tests.kernels.kernel_cases import BLOCK, CASES, Case, D, H, K, gdpa_case, rounded

LENGTHS = [
    [],
    [0],
    [0, 0, 0],
    [1],
    [1, 0, 1],
    [2, 2, 0],
    [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 0],
    [3, 3, 3],
    list(range(18)),
]


def double(case: Case) -> list[Tensor]:
    """The reference in fp64."""
    return value_and_gradients(case.reference, *(x.double() for x in case.inputs))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_equal_the_reference_for_every_length(name: str, lengths: list[int]) -> None:
    case = CASES[name](lengths, 3)
    found = value_and_gradients(case.operator, *case.inputs)
    assert_as_good(found, value_and_gradients(case.reference, *case.inputs), double(case))


@pytest.mark.parametrize("name", CASES)
def test_entries_past_the_last_offset_are_ignored_and_get_zero_output_and_gradient(name: str) -> None:
    lengths = [2, 0, 5, 3]
    with_tail, without = CASES[name](lengths, 4), CASES[name](lengths, 0)
    found = value_and_gradients(with_tail.operator, *with_tail.inputs)
    expected = [without.operator(*without.inputs), *without.inputs]
    for x, like in zip(found, expected, strict=True):
        assert x.isfinite().all()
        assert not x[like.shape[0] :].any()


@pytest.mark.parametrize("name", CASES)
def test_strided_views_equal_contiguous_copies(name: str) -> None:
    case = CASES[name]([0, 3, 5, 1], 1)
    dense = value_and_gradients(case.operator, *case.inputs)
    views = value_and_gradients(case.operator, *(strided(x) for x in case.inputs))
    for x, y in zip(dense, views, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16(name: str) -> None:
    case = CASES[name]([5, 0, 9, 2, 1], 2)
    inputs = [x.to(torch.bfloat16) for x in case.inputs]
    exact = value_and_gradients(case.reference, *(x.double() for x in inputs))
    found = value_and_gradients(case.operator, *inputs)
    assert all(x.dtype == torch.bfloat16 for x in found)
    # Gradients pass through several rounded intermediates, the plain maths through one.
    assert_as_good(found, rounded(case.reference, inputs), exact, factor=4.0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gdpa_equals_the_reference_for_every_activation(activation: str) -> None:
    case = gdpa_case([0, 1, 7, 4], 2, activation)
    found = value_and_gradients(case.operator, *case.inputs)
    assert_as_good(found, value_and_gradients(case.reference, *case.inputs), double(case))


@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("linear")])
def test_batches_without_entries_keep_the_graph_connected(name: str, lengths: list[int]) -> None:
    case = CASES[name](lengths, 0)
    leaves = [x.requires_grad_() for x in case.inputs]
    case.operator(*leaves).sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in leaves)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), seed=st.integers(0, 2**16))
def test_permuting_rows_permutes_outputs(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    rows = [torch.randn(3, n, H, D, generator=generator) for n in lengths]
    k_BKHD = torch.randn(2, len(lengths), K, H, D, generator=generator)

    def outputs(rows: list[Tensor], kv: Tensor) -> list[list[Tensor]]:
        sizes = [r.shape[1] for r in rows]
        q, k, v = torch.cat(rows, dim=1)
        offsets = offsets_of(sizes)
        packed = [
            jagged_attention(q, k, v, offsets, offsets, causal=True),
            block_attention(q, k, v, offsets, block_size=BLOCK),
            gdpa(q, kv[0], kv[1], offsets),
        ]
        return [list(x.split(sizes)) for x in packed] + [list(jagged_attention_shared(q[:0], k, v, offsets))]

    straight = outputs(rows, k_BKHD)
    permuted = outputs([rows[i] for i in order], k_BKHD[:, order])
    for plain, moved in zip(straight, permuted, strict=True):
        for place, i in enumerate(order):
            torch.testing.assert_close(moved[place], plain[i], rtol=1e-5, atol=1e-6)


def test_block_attention_passes_no_gradient_between_blocks() -> None:
    offsets = offsets_of([2 * BLOCK])
    q, k, v = (torch.randn(2 * BLOCK, H, D, requires_grad=True) for _ in range(3))
    out = block_attention(q, k, v, offsets, block_size=BLOCK)
    grads = torch.autograd.grad(out[:BLOCK].sum(), (q, k, v))
    assert all(not g[BLOCK:].any() for g in grads)
    assert grads[2][:BLOCK].abs().min() > 0


def test_personalised_network_is_gdpa() -> None:
    """A two-layer network with generated weights, act(s W1) W2, is GDPA with K = W1^T and V = W2 (one head)."""
    events, width, hidden = 6, 8, 3
    s = torch.randn(events, width)
    w1, w2 = torch.randn(width, hidden), torch.randn(hidden, width)
    found = gdpa(s[:, None], w1.T[None, :, None], w2[None, :, None], offsets_of([events]), activation="relu")
    torch.testing.assert_close(found[:, 0], torch.relu(s @ w1) @ w2)


@pytest.mark.parametrize(("num_s", "num_t", "num_e"), [(6, 2, 4), (3, 5, 2), (2, 7, 9)])
def test_sum_kron_is_the_explicit_kronecker_matrix(num_s: int, num_t: int, num_e: int) -> None:
    x, z, w = torch.randn(2, num_s, 5), torch.randn(3, num_s, num_t), torch.randn(3, 5, num_e)
    full = sum(torch.kron(zi, wi) for zi, wi in zip(z, w, strict=True))
    expected = (x.flatten(1) @ full).view(2, num_t, num_e)
    torch.testing.assert_close(sum_kron(x, z, w), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seed_reference.sum_kron(x, z, w), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["jagged_causal", "block", "gdpa", "pffn", "shared", "broadcast_shuffled"])
def test_gradients_pass_a_numerical_check(name: str) -> None:
    case = CASES[name]([2, 0, 3], 0)
    inputs = [x.double().requires_grad_() for x in case.inputs]
    assert torch.autograd.gradcheck(case.operator, inputs)


def test_nothing_to_read_or_to_ask() -> None:
    """No generated keys, no seeds, no queries per candidate: zeros or empty results, and zero gradients."""
    offsets, x, none = offsets_of([2, 0, 1]), torch.randn(3, H, D), torch.randn(3, 0, H, D)
    for found in (
        value_and_gradients(lambda q, k, v: gdpa(q, k, v, offsets), x, none, none),
        value_and_gradients(lambda q, k, v: seed_pooling(q, k, v, offsets), x[:0], x, x),
        value_and_gradients(lambda q, k, v: broadcast_attention(q, k, v, offsets, torch.arange(3)), none, x, x),
    ):
        assert all(not result.any() for result in found)


def test_fused_linears_equal_separate_ones() -> None:
    x = torch.randn(2, 3, 5)
    weights = [torch.randn(5, width) for width in (1, 4, 2)]
    for fused, w in zip(fused_linears(x, weights), weights, strict=True):
        torch.testing.assert_close(fused, x @ w)
