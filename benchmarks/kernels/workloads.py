"""The shapes and calls that `python -m benchmarks.kernels` times: operator, reference and cost of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import cost
from kernels._jagged import layout_of
from kernels.block_attention import block_attention
from kernels.block_attention import reference as block_reference
from kernels.broadcast_attention import broadcast_attention
from kernels.broadcast_attention import reference as broadcast_reference
from kernels.broadcast_linear import broadcast_linear
from kernels.broadcast_linear import reference as linear_reference
from kernels.gdpa import gdpa, gdpa_pffn
from kernels.gdpa import reference as gdpa_reference
from kernels.grouped_gemm import grouped_gemm
from kernels.grouped_gemm import reference as gemm_reference
from kernels.jagged_attention import jagged_attention
from kernels.jagged_attention import reference as jagged_reference
from kernels.seed_pooling import reference as seed_reference
from kernels.seed_pooling import seed_pooling, sum_kron
from kernels.testing import offsets_of


@dataclass(frozen=True)
class Shape:
    """A batch of requests; lengths are log-normal around `median` with a share of empty rows, clipped at `longest`."""

    name: str
    rows: int
    median: float
    longest: int
    empty: float
    heads: int
    width: int

    def lengths(self, generator: torch.Generator) -> list[int]:
        """One length per row."""
        drawn = (torch.randn(self.rows, generator=generator) * 0.8).exp() * self.median
        kept = torch.rand(self.rows, generator=generator) >= self.empty
        return [int(n) for n in (drawn.clamp(1, self.longest) * kept).tolist()]


TINY = Shape("tiny", 6, 5.0, 16, 0.3, 2, 8)
SHAPES = {
    "cpu": [
        Shape("short", 256, 20.0, 200, 0.4, 4, 16),
        Shape("wide", 64, 100.0, 500, 0.2, 4, 64),
    ],
    "cuda": [
        Shape("short", 4096, 100.0, 1000, 0.4, 4, 64),
        Shape("wide", 1152, 500.0, 4000, 0.2, 4, 128),
    ],
}
KEYS, SEEDS, TOKENS, TERMS, CANDIDATES, QUERIES, GROUPS = 16, 64, 16, 8, 8, 4, 8


@dataclass(frozen=True)
class Workload:
    """One operator on one shape."""

    operator: str
    inputs: list[Tensor]
    run: Callable[..., Tensor]
    reference: Callable[..., Tensor] | None
    cost: cost.Cost


def workloads(shape: Shape, dtype: torch.dtype, device: str) -> list[Workload]:
    """Every operator on this shape; a reference of None means that the operator is the reference's own products."""
    generator = torch.Generator().manual_seed(0)
    lengths = shape.lengths(generator)
    rows, total, heads, width = shape.rows, sum(lengths), shape.heads, shape.width
    size = torch.empty((), dtype=dtype).element_size()
    offsets = offsets_of(lengths, device)
    owners = torch.arange(rows).repeat_interleave(CANDIDATES).to(device)
    group_sizes = [total * (g + 1) // 36 for g in range(GROUPS - 1)]
    group_sizes.append(total - sum(group_sizes))
    groups = offsets_of(group_sizes, device)
    features = heads * width

    def random(*dims: int) -> Tensor:
        return (torch.randn(*dims, generator=generator) * 0.5).to(device, dtype)

    scale = width**-0.5
    qkv = [random(total, heads, width) for _ in range(3)]
    generated = [random(rows, KEYS, heads, width) for _ in range(2)]
    seeds = random(SEEDS, heads, width)
    candidate_queries = random(rows * CANDIDATES, QUERIES, heads, width)
    kron = [random(rows, SEEDS, features), random(TERMS, SEEDS, TOKENS), random(TERMS, features, features)]
    linear = [
        random(rows, features),
        random(rows * CANDIDATES, features),
        *(random(features, features) for _ in range(2)),
    ]
    gemm = [random(total, features), random(GROUPS, features, features)]
    r = layout_of(offsets, total)
    return [
        Workload(
            "jagged_attention",
            qkv,
            lambda q, k, v: jagged_attention(q, k, v, offsets, offsets),
            lambda q, k, v: jagged_reference.attention(q, k, v, r, r, False, None, scale),
            cost.jagged_attention(lengths, lengths, heads, width, size),
        ),
        Workload(
            "jagged_attention_causal",
            qkv,
            lambda q, k, v: jagged_attention(q, k, v, offsets, offsets, causal=True),
            lambda q, k, v: jagged_reference.attention(q, k, v, r, r, True, None, scale),
            cost.jagged_attention(lengths, lengths, heads, width, size, causal=True),
        ),
        Workload(
            "block_attention",
            qkv,
            lambda q, k, v: block_attention(q, k, v, offsets),
            lambda q, k, v: block_reference.attention(q, k, v, r, 64, scale),
            cost.block_attention(lengths, heads, width, size),
        ),
        Workload(
            "gdpa",
            [qkv[0], *generated],
            lambda q, k, v: gdpa(q, k, v, offsets),
            lambda q, k, v: gdpa_reference.gdpa(q, k, v, r, "gelu", 1.0, 1.0, None),
            cost.gdpa(lengths, KEYS, heads, width, size),
        ),
        Workload(
            "gdpa_pffn",
            [qkv[0], *generated],
            lambda q, k, v: gdpa_pffn(q, k, v, offsets),
            lambda q, k, v: gdpa_reference.gdpa_pffn(q, k, v, r, "gelu", 1.0, 1.0, None, 1e-5),
            cost.gdpa_pffn(lengths, KEYS, heads, width, size),
        ),
        Workload(
            "seed_pooling",
            [seeds, *qkv[1:]],
            lambda q, k, v: seed_pooling(q, k, v, offsets),
            lambda q, k, v: seed_reference.seed_pooling(q, k, v, r, scale),
            cost.seed_pooling(lengths, SEEDS, heads, width, size),
        ),
        Workload(
            "sum_kron",
            kron,
            sum_kron,
            seed_reference.sum_kron,
            cost.sum_kron(rows, SEEDS, TOKENS, features, features, TERMS, size),
        ),
        Workload(
            "broadcast_attention",
            [candidate_queries, *qkv[1:]],
            lambda q, k, v: broadcast_attention(q, k, v, offsets, owners),
            lambda q, k, v: broadcast_reference.attention(q, k, v, r, owners, scale),
            cost.broadcast_attention([CANDIDATES] * rows, QUERIES, lengths, heads, width, size),
        ),
        Workload(
            "broadcast_linear",
            linear,
            lambda *x: broadcast_linear(*x, owners),
            lambda *x: linear_reference.broadcast_linear(*x, owners),
            cost.broadcast_linear(rows, rows * CANDIDATES, features, features, features, size),
        ),
        Workload(
            "grouped_gemm",
            gemm,
            lambda x, w: grouped_gemm(x, w, groups),
            lambda x, w: gemm_reference.grouped_gemm(x, w, layout_of(groups, total)),
            cost.grouped_gemm(group_sizes, features, features, size),
        ),
    ]
