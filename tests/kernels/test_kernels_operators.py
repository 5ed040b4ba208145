"""Every operator on the CPU against its reference: values and gradients, empty rows, tails, views, properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels._jagged import layout_of
from kernels.block_attention import block_attention
from kernels.block_attention import reference as block_reference
from kernels.broadcast_attention import broadcast_attention
from kernels.broadcast_attention import reference as broadcast_reference
from kernels.broadcast_linear import broadcast_linear
from kernels.broadcast_linear import reference as linear_reference
from kernels.gdpa import ACTIVATIONS, gdpa, gdpa_pffn
from kernels.gdpa import reference as gdpa_reference
from kernels.jagged_attention import jagged_attention, jagged_attention_shared
from kernels.jagged_attention import reference as jagged_reference
from kernels.seed_pooling import reference as seed_reference
from kernels.seed_pooling import seed_pooling, sum_kron
from kernels.testing import assert_as_good, offsets_of, poisoned, strided, value_and_gradients

H, D, K, S = 2, 5, 3, 4
BLOCK = 4
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


def gathered_offsets(lengths: list[int]) -> Tensor:
    """Keys of the cross attention cases: other lengths, empty where the queries are not and vice versa."""
    return offsets_of([(2 * n + 1) % 7 if i % 3 else 0 for i, n in enumerate(lengths)])


@dataclass(frozen=True)
class Case:
    """An operator and its reference, both as functions of the differentiable inputs."""

    inputs: list[Tensor]
    operator: Callable[..., Tensor]
    reference: Callable[..., Tensor]


def jagged_case(lengths: list[int], tail: int, **options: object) -> Case:
    """Cross attention with own key lengths."""
    q_offsets, k_offsets = offsets_of(lengths), gathered_offsets(lengths)
    n, m = sum(lengths), int(k_offsets[-1])
    inputs = [
        poisoned(n, H, D, tail=tail, seed=0),
        poisoned(m, H, D, tail=tail, seed=1),
        poisoned(m, H, D, tail=tail, seed=2),
    ]
    causal, window = bool(options.get("causal", False)), options.get("window")
    assert window is None or isinstance(window, int)

    def operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jagged_attention(q, k, v, q_offsets, k_offsets, causal=causal, window=window)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys = layout_of(q_offsets, q.shape[0]), layout_of(k_offsets, k.shape[0])
        return jagged_reference.attention(q, k, v, queries, keys, causal, window, D**-0.5)

    return Case(inputs, operator, reference)


def block_case(lengths: list[int], tail: int) -> Case:
    """Block attention with a block that lengths straddle."""
    offsets = offsets_of(lengths)
    inputs = [poisoned(sum(lengths), H, D, tail=tail, seed=s) for s in range(3)]
    return Case(
        inputs,
        lambda q, k, v: block_attention(q, k, v, offsets, block_size=BLOCK),
        lambda q, k, v: block_reference.attention(q, k, v, layout_of(offsets, q.shape[0]), BLOCK, D**-0.5),
    )


def gdpa_case(lengths: list[int], tail: int, activation: str = "gelu", window: int | None = None) -> Case:
    """GDPA with both scales away from 1."""
    offsets = offsets_of(lengths)
    inputs = [
        poisoned(sum(lengths), H, D, tail=tail),
        *(poisoned(len(lengths), K, H, D, tail=0, seed=s) for s in (1, 2)),
    ]
    return Case(
        inputs,
        lambda q, k, v: gdpa(q, k, v, offsets, activation=activation, scale_before=0.7, scale_after=1.3, window=window),
        lambda q, k, v: gdpa_reference.gdpa(q, k, v, layout_of(offsets, q.shape[0]), activation, 0.7, 1.3, window),
    )


def pffn_case(lengths: list[int], tail: int) -> Case:
    """The block with norms and residuals around GDPA."""
    offsets = offsets_of(lengths)
    inputs = [
        poisoned(sum(lengths), H, D, tail=tail),
        *(poisoned(len(lengths), K, H, D, tail=0, seed=s) for s in (1, 2)),
    ]
    return Case(
        inputs,
        lambda q, k, v: gdpa_pffn(q, k, v, offsets, activation="silu", scale_before=0.7, eps=1e-3),
        lambda q, k, v: gdpa_reference.gdpa_pffn(q, k, v, layout_of(offsets, q.shape[0]), "silu", 0.7, 1.0, None, 1e-3),
    )


def shared_case(lengths: list[int], tail: int) -> Case:
    """Shared queries over jagged keys."""
    offsets = offsets_of(lengths)
    inputs = [
        poisoned(S, H, D, tail=0),
        *(poisoned(sum(lengths), H, D, tail=tail, seed=s) for s in (1, 2)),
    ]
    return Case(
        inputs,
        lambda q, k, v: jagged_attention_shared(q, k, v, offsets),
        lambda q, k, v: jagged_reference.attention_shared(q, k, v, layout_of(offsets, k.shape[0]), D**-0.5),
    )


def seed_case(lengths: list[int], tail: int) -> Case:
    """Seed pooling with a given scale."""
    offsets = offsets_of(lengths)
    inputs = [
        poisoned(S, H, D, tail=0),
        *(poisoned(sum(lengths), H, D, tail=tail, seed=s) for s in (1, 2)),
    ]
    return Case(
        inputs,
        lambda q, k, v: seed_pooling(q, k, v, offsets, scale=0.3),
        lambda q, k, v: seed_reference.seed_pooling(q, k, v, layout_of(offsets, k.shape[0]), 0.3),
    )


def broadcast_case(lengths: list[int], tail: int, shuffled: bool = False) -> Case:
    """Candidates over their request's row: request b has b % 4 candidates."""
    offsets = offsets_of(lengths)
    owners = [b for b in range(len(lengths)) for _ in range(b % 4)]
    cand_to_request = torch.tensor(owners, dtype=torch.int64)
    if shuffled:
        cand_to_request = cand_to_request[torch.randperm(len(owners), generator=torch.Generator().manual_seed(3))]
    inputs = [
        poisoned(len(owners), 3, H, D, tail=0),
        *(poisoned(sum(lengths), H, D, tail=tail, seed=s) for s in (1, 2)),
    ]
    return Case(
        inputs,
        lambda q, k, v: broadcast_attention(q, k, v, offsets, cand_to_request),
        lambda q, k, v: broadcast_reference.attention(
            q, k, v, layout_of(offsets, k.shape[0]), cand_to_request, D**-0.5
        ),
    )


CASES: dict[str, Callable[[list[int], int], Case]] = {
    "jagged": jagged_case,
    "jagged causal": lambda lengths, tail: jagged_case(lengths, tail, causal=True),
    "jagged window": lambda lengths, tail: jagged_case(lengths, tail, window=1),
    "jagged window 0": lambda lengths, tail: jagged_case(lengths, tail, window=0),
    "jagged causal window": lambda lengths, tail: jagged_case(lengths, tail, causal=True, window=2),
    "shared": shared_case,
    "block": block_case,
    "gdpa": gdpa_case,
    "gdpa window": lambda lengths, tail: gdpa_case(lengths, tail, window=1),
    "pffn": pffn_case,
    "seed": seed_case,
    "broadcast": broadcast_case,
    "broadcast shuffled": lambda lengths, tail: broadcast_case(lengths, tail, shuffled=True),
}


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


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gdpa_equals_the_reference_for_every_activation(activation: str) -> None:
    case = gdpa_case([0, 1, 7, 4], 2, activation)
    found = value_and_gradients(case.operator, *case.inputs)
    assert_as_good(found, value_and_gradients(case.reference, *case.inputs), double(case))


@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=str)
@pytest.mark.parametrize("name", CASES)
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


@pytest.mark.parametrize("owners", [[], [0], [0, 0, 2], [2, 0, 2, 1], [0, 1, 2]])
def test_broadcast_linear_equals_the_materialised_broadcast(owners: list[int]) -> None:
    index = torch.tensor(owners, dtype=torch.int64)
    inputs = [torch.randn(3, 4), torch.randn(len(owners), 5), torch.randn(4, 6), torch.randn(5, 6)]
    found = value_and_gradients(lambda *x: broadcast_linear(*x, index), *inputs)
    plain = value_and_gradients(lambda *x: linear_reference.broadcast_linear(*x, index), *inputs)
    exact = value_and_gradients(lambda *x: linear_reference.broadcast_linear(*x, index), *(x.double() for x in inputs))
    assert_as_good(found, plain, exact)


@pytest.mark.parametrize("name", ["jagged causal", "block", "gdpa", "pffn", "shared", "broadcast shuffled"])
def test_gradients_pass_a_numerical_check(name: str) -> None:
    case = CASES[name]([2, 0, 3], 0)
    inputs = [x.double().requires_grad_() for x in case.inputs]
    assert torch.autograd.gradcheck(case.operator, inputs)
