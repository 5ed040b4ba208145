"""Floating-point operations and bytes of each operator, from shapes alone.

Only useful work counts: no padding, no masked score, no recomputation. Operations are those of matrix products (2 per
multiply-add); bytes are the least traffic: each input read once, each output written once. Both are for the forward
pass; `backward` says what the gradients add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What one forward pass needs.

    Attributes:
        flops: floating-point operations of its matrix products.
        num_bytes: bytes read and written.
    """

    flops: int
    num_bytes: int

    @property
    def intensity(self) -> float:
        """Operations per byte; below the ratio of a device's peaks the operator is bound by memory."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0

    @property
    def backward_flops(self) -> int:
        """Operations of the gradients: two products for each of the forward (kernels that recompute do more)."""
        return 2 * self.flops


def num_pairs(
    q_lengths: Sequence[int], k_lengths: Sequence[int], *, causal: bool = False, window: int | None = None
) -> int:
    """Query-key pairs that an attention with this mask reads, by the definition of `jagged_attention`."""
    total = 0
    for n, m in zip(q_lengths, k_lengths, strict=True):
        if not causal and window is None:
            total += n * m
            continue
        for i in range(n):
            position = i + m - n
            first = 0 if window is None else max(0, position - window)
            last = m - 1
            if window is not None:
                last = min(last, position + window)
            if causal:
                last = min(last, position)
            total += max(0, last - first + 1)
    return total


def jagged_attention(
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    heads: int,
    width: int,
    element_size: int,
    *,
    causal: bool = False,
    window: int | None = None,
) -> Cost:
    """Queries and outputs, keys and values once each; two products per pair."""
    pairs = num_pairs(q_lengths, k_lengths, causal=causal, window=window)
    moved = 2 * (sum(q_lengths) + sum(k_lengths)) * heads * width * element_size
    return Cost(4 * pairs * heads * width, moved)


def block_attention(lengths: Sequence[int], heads: int, width: int, element_size: int, *, block_size: int = 64) -> Cost:
    """As attention over the blocks: linear in the length."""
    blocks = [min(block_size, n - s) for n in lengths for s in range(0, n, block_size)]
    return jagged_attention(blocks, blocks, heads, width, element_size)


def gdpa(lengths: Sequence[int], num_keys: int, heads: int, width: int, element_size: int) -> Cost:
    """Queries and outputs, and every row's generated keys and values."""
    total = sum(lengths)
    moved = 2 * (total + len(lengths) * num_keys) * heads * width * element_size
    return Cost(4 * total * num_keys * heads * width, moved)


def gdpa_pffn(lengths: Sequence[int], num_keys: int, heads: int, width: int, element_size: int) -> Cost:
    """As `gdpa`: fused, its norms and residuals move nothing more."""
    plain = gdpa(lengths, num_keys, heads, width, element_size)
    return Cost(plain.flops, plain.num_bytes)


def seed_pooling(lengths: Sequence[int], num_seeds: int, heads: int, width: int, element_size: int) -> Cost:
    """Seeds are read once, not once per row."""
    rows = len(lengths)
    moved = (num_seeds + 2 * sum(lengths) + rows * num_seeds) * heads * width * element_size
    return Cost(4 * sum(lengths) * num_seeds * heads * width, moved)


def sum_kron(rows: int, num_s: int, num_t: int, num_d: int, num_e: int, num_terms: int, element_size: int) -> Cost:
    """The cheaper order of its two products."""
    tokens_first = num_t * num_d * (num_s + num_e)
    features_first = num_s * num_e * (num_d + num_t)
    moved = (rows * (num_s * num_d + num_t * num_e) + num_terms * (num_s * num_t + num_d * num_e)) * element_size
    return Cost(2 * rows * num_terms * min(tokens_first, features_first), moved)


def broadcast_attention(
    candidates: Sequence[int], num_queries: int, lengths: Sequence[int], heads: int, width: int, element_size: int
) -> Cost:
    """Keys and values once per request, not once per candidate; `candidates` counts them per request."""
    return jagged_attention([c * num_queries for c in candidates], lengths, heads, width, element_size)


def broadcast_linear(requests: int, candidates: int, num_k: int, num_j: int, num_out: int, element_size: int) -> Cost:
    """The request part once per request."""
    moved = requests * (num_k + num_out) + candidates * (num_j + num_out) + (num_k + num_j) * num_out
    return Cost(2 * num_out * (requests * num_k + candidates * num_j), moved * element_size)


def grouped_gemm(lengths: Sequence[int], num_in: int, num_out: int, element_size: int) -> Cost:
    """Weights of groups without rows are not read."""
    used = sum(n > 0 for n in lengths)
    moved = (sum(lengths) * (num_in + num_out) + used * num_in * num_out) * element_size
    return Cost(2 * sum(lengths) * num_in * num_out, moved)


def quantize(rows: int, columns: int, element_size: int, *, num_scales: int) -> Cost:
    """No product: a read, a write of one byte an element, and the scales (4 bytes each; 1 for MXFP8, counted as 4)."""
    return Cost(0, rows * columns * (element_size + 1) + 4 * num_scales)
