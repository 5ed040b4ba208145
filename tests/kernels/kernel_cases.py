"""The cases that the CPU forms and the Triton kernels are both held to: inputs, operator, kernel, reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels._jagged import Layout, layout_of
from kernels.block_attention import block_attention
from kernels.block_attention import reference as block_reference
from kernels.broadcast_attention import broadcast_attention
from kernels.broadcast_attention import reference as broadcast_reference
from kernels.broadcast_attention.grouping import group_by_request
from kernels.broadcast_linear import broadcast_linear
from kernels.broadcast_linear import reference as linear_reference
from kernels.gdpa import gdpa, gdpa_pffn
from kernels.gdpa import reference as gdpa_reference
from kernels.grouped_gemm import grouped_gemm
from kernels.grouped_gemm import reference as gemm_reference
from kernels.jagged_attention import jagged_attention, jagged_attention_shared
from kernels.jagged_attention import reference as jagged_reference
from kernels.seed_pooling import reference as seed_reference
from kernels.seed_pooling import seed_pooling
from kernels.testing import offsets_of, poisoned, value_and_gradients

H, D, K, S = 2, 5, 3, 4
BLOCK = 4
SCALE = 0.4
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """An operator, its Triton kernel and its reference, all as functions of the differentiable inputs."""

    inputs: list[Tensor]
    operator: Function
    kernel: Function
    reference: Function


def rows_of(offsets: Tensor, x: Tensor) -> Layout:
    """The layout on the device of the inputs: a case runs wherever its inputs lie."""
    return layout_of(offsets.to(x.device), x.shape[0])


def rounded(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """Value and gradients of the same maths in the dtype of the inputs: inputs off by half a unit, results rounded."""
    noise = [x.float() * (1 + torch.finfo(x.dtype).eps * torch.sign(torch.randn(x.shape))) for x in inputs]
    return [x.to(inputs[0].dtype) for x in value_and_gradients(function, *noise)]


def other_offsets(lengths: list[int]) -> Tensor:
    """Keys of the cross attention cases: other lengths, empty where the queries are not and the other way round."""
    return offsets_of([(2 * n + 1) % 7 if i % 3 else 0 for i, n in enumerate(lengths)])


def jagged(lengths: list[int], tail: int, causal: bool = False, window: int | None = None) -> Case:
    q_offsets, k_offsets = offsets_of(lengths), other_offsets(lengths)
    n, m = sum(lengths), int(k_offsets[-1])
    inputs = [poisoned(count, H, D, tail=tail, seed=s) for s, count in enumerate([n, m, m])]

    def operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jagged_attention(
            q, k, v, q_offsets.to(q.device), k_offsets.to(q.device), causal=causal, window=window, scale=SCALE
        )

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from kernels.jagged_attention import triton

        return triton.attention(q, k, v, rows_of(q_offsets, q), rows_of(k_offsets, k), causal, window, SCALE)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys = rows_of(q_offsets, q), rows_of(k_offsets, k)
        return jagged_reference.attention(q, k, v, queries, keys, causal, window, SCALE)

    return Case(inputs, operator, kernel, reference)


def shared(lengths: list[int], tail: int) -> Case:
    offsets = offsets_of(lengths)
    inputs = [
        poisoned(S, H, D, tail=0),
        *(poisoned(sum(lengths), H, D, tail=tail, seed=s) for s in (1, 2)),
    ]

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from kernels.jagged_attention import triton

        return triton.attention_shared(q, k, v, rows_of(offsets, k), D**-0.5)

    return Case(
        inputs,
        lambda q, k, v: jagged_attention_shared(q, k, v, offsets.to(q.device)),
        kernel,
        lambda q, k, v: jagged_reference.attention_shared(q, k, v, rows_of(offsets, k), D**-0.5),
    )


def seed(lengths: list[int], tail: int) -> Case:
    offsets = offsets_of(lengths)
    like = shared(lengths, tail)
    return Case(
        like.inputs,
        lambda q, k, v: seed_pooling(q, k, v, offsets.to(q.device)),
        like.kernel,
        lambda q, k, v: seed_reference.seed_pooling(q, k, v, rows_of(offsets, k), D**-0.5),
    )


def block(lengths: list[int], tail: int) -> Case:
    offsets = offsets_of(lengths)
    inputs = [poisoned(sum(lengths), H, D, tail=tail, seed=s) for s in range(3)]

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from kernels.block_attention import triton

        return triton.attention(q, k, v, rows_of(offsets, q).blocks(BLOCK), BLOCK, SCALE)

    return Case(
        inputs,
        lambda q, k, v: block_attention(q, k, v, offsets.to(q.device), block_size=BLOCK, scale=SCALE),
        kernel,
        lambda q, k, v: block_reference.attention(q, k, v, rows_of(offsets, q), BLOCK, SCALE),
    )


def gdpa_inputs(lengths: list[int], tail: int) -> list[Tensor]:
    dense = [poisoned(len(lengths), K, H, D, tail=0, seed=s) for s in (1, 2)]
    return [poisoned(sum(lengths), H, D, tail=tail), *dense]


def gdpa_case(lengths: list[int], tail: int, activation: str = "gelu", window: int | None = None) -> Case:
    """Both scales away from 1, so that neither may be dropped."""
    offsets = offsets_of(lengths)

    def operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gdpa(
            q, k, v, offsets.to(q.device), activation=activation, scale_before=0.7, scale_after=1.3, window=window
        )

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from kernels.gdpa import triton

        return triton.gdpa(q, k, v, rows_of(offsets, q), activation, 0.7, 1.3, window)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gdpa_reference.gdpa(q, k, v, rows_of(offsets, q), activation, 0.7, 1.3, window)

    return Case(gdpa_inputs(lengths, tail), operator, kernel, reference)


def pffn(lengths: list[int], tail: int, activation: str = "silu", window: int | None = None) -> Case:
    offsets = offsets_of(lengths)
    options = (activation, 0.7, 1.3, window, 1e-3)

    def operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gdpa_pffn(
            q,
            k,
            v,
            offsets.to(q.device),
            activation=activation,
            scale_before=0.7,
            scale_after=1.3,
            window=window,
            eps=1e-3,
        )

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from kernels.gdpa import triton_pffn

        return triton_pffn.gdpa_pffn(q, k, v, rows_of(offsets, q), *options)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gdpa_reference.gdpa_pffn(q, k, v, rows_of(offsets, q), *options)

    return Case(gdpa_inputs(lengths, tail), operator, kernel, reference)


def owners_of(num_requests: int, shuffled: bool) -> Tensor:
    """Request b has b % 4 candidates, in order or not."""
    owners = torch.tensor([b for b in range(num_requests) for _ in range(b % 4)], dtype=torch.int64)
    return owners[torch.randperm(owners.numel(), generator=torch.Generator().manual_seed(3))] if shuffled else owners


def broadcast(lengths: list[int], tail: int, shuffled: bool = False) -> Case:
    offsets, owners = offsets_of(lengths), owners_of(len(lengths), shuffled)
    inputs = [
        poisoned(owners.numel(), 3, H, D, tail=0),
        *(poisoned(sum(lengths), H, D, tail=tail, seed=s) for s in (1, 2)),
    ]

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from kernels.jagged_attention import triton

        keys = rows_of(offsets, k)
        groups = group_by_request(owners.to(q.device), keys.num_rows, q.shape[1])
        packed = groups.gather(q).flatten(0, 1)
        out = triton.attention(packed, k, v, groups.queries, keys, False, None, SCALE)
        return groups.scatter(out.view(q.shape))

    return Case(
        inputs,
        lambda q, k, v: broadcast_attention(q, k, v, offsets.to(q.device), owners.to(q.device), scale=SCALE),
        kernel,
        lambda q, k, v: broadcast_reference.attention(q, k, v, rows_of(offsets, k), owners, SCALE),
    )


def grouped(lengths: list[int], tail: int) -> Case:
    """Groups of rows with their own weights; the lengths are the groups' sizes."""
    offsets = offsets_of(lengths)
    inputs = [poisoned(sum(lengths), 6, tail=tail), poisoned(len(lengths), 6, 7, tail=0, seed=1)]

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        from kernels.grouped_gemm import triton

        return triton.grouped_gemm(x, w, rows_of(offsets, x))

    return Case(
        inputs,
        lambda x, w: grouped_gemm(x, w, offsets.to(x.device)),
        kernel,
        lambda x, w: gemm_reference.grouped_gemm(x, w, rows_of(offsets, x)),
    )


def linear(lengths: list[int], tail: int, shuffled: bool = False) -> Case:
    """One request per row; lengths only say how many. No tail: this operator has no packed entries."""
    owners = owners_of(len(lengths), shuffled)
    inputs = [
        poisoned(*shape, tail=0, seed=s)
        for s, shape in enumerate([(len(lengths), 4), (owners.numel(), 5), (4, 6), (5, 6)])
    ]

    def kernel(*x: Tensor) -> Tensor:
        from kernels.broadcast_linear import triton

        return triton.broadcast_linear(*x, owners.to(x[0].device))

    return Case(
        inputs,
        lambda *x: broadcast_linear(*x, owners.to(x[0].device)),
        kernel,
        lambda *x: linear_reference.broadcast_linear(*x, owners),
    )


CASES: dict[str, Callable[[list[int], int], Case]] = {
    "jagged": jagged,
    "jagged_causal": lambda lengths, tail: jagged(lengths, tail, causal=True),
    "jagged_window": lambda lengths, tail: jagged(lengths, tail, window=1),
    "jagged_window_0": lambda lengths, tail: jagged(lengths, tail, window=0),
    "jagged_causal_window": lambda lengths, tail: jagged(lengths, tail, causal=True, window=2),
    "shared": shared,
    "seed": seed,
    "block": block,
    "gdpa": gdpa_case,
    "gdpa_window": lambda lengths, tail: gdpa_case(lengths, tail, window=1),
    "pffn": pffn,
    "pffn_window": lambda lengths, tail: pffn(lengths, tail, window=1),
    "broadcast": broadcast,
    "broadcast_shuffled": lambda lengths, tail: broadcast(lengths, tail, shuffled=True),
    "grouped": grouped,
    "linear": linear,
    "linear_shuffled": lambda lengths, tail: linear(lengths, tail, shuffled=True),
}
