"""What the dispatchers refuse, what importing needs, and which backend a device gets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.block_attention import block_attention
from kernels.broadcast_attention import broadcast_attention
from kernels.broadcast_linear import broadcast_linear
from kernels.gdpa import gdpa, gdpa_pffn
from kernels.gdpa.activations import ACTIVATIONS, fast_gelu
from kernels.grouped_gemm import fused_linears, grouped_gemm
from kernels.jagged_attention import jagged_attention, jagged_attention_shared, rotary
from kernels.seed_pooling import seed_pooling, sum_kron
from kernels.testing import offsets_of

ROOT = Path(__file__).parents[2]
x = torch.zeros(4, 2, 8)
kv = torch.zeros(2, 3, 2, 8)
offsets = offsets_of([3, 1])
owners = torch.tensor([0, 1])

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it now raises ImportError
import importlib, pkgutil, torch
import kernels
for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
    if not module.name.rsplit(".", 1)[1].startswith("triton"):
        importlib.import_module(module.name)
from kernels.jagged_attention import jagged_attention
o = torch.tensor([0, 2])
jagged_attention(*(torch.ones(2, 1, 4) for _ in range(3)), o, o)
for name in ("jagged_attention", "block_attention", "gdpa", "broadcast_linear", "grouped_gemm", "quantize"):
    try:
        importlib.import_module(f"kernels.{name}.triton")
    except ImportError as error:
        assert "need the triton package, which is not installed" in str(error), error
    else:
        raise AssertionError(name)
assert not any(name.startswith("triton.") for name in sys.modules)
"""


def test_everything_but_the_kernels_imports_without_triton() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: jagged_attention(x, x[:, :1], x, offsets, offsets),
            ValueError,
            r"k_MHD: expected shape \[any, 2, 8\]",
        ),
        (lambda: jagged_attention(x, x, x[:3], offsets, offsets), ValueError, r"v_MHD: expected shape \[4, 2, 8\]"),
        (
            lambda: jagged_attention(x, x.double(), x, offsets, offsets),
            TypeError,
            "k_MHD: expected dtype torch.float32",
        ),
        (lambda: jagged_attention(x.long(), x, x, offsets, offsets), TypeError, "q_NHD: expected a floating dtype"),
        (lambda: jagged_attention(x, x, x, offsets, offsets[:2]), ValueError, r"k_offsets: expected shape \[3\]"),
        (lambda: jagged_attention(x, x, x, offsets, offsets_of([3, 3])), ValueError, "k_offsets: row 1 ends at 6"),
        (lambda: jagged_attention(x, x, x, offsets, offsets, window=-1), ValueError, "window: .* found -1"),
        (lambda: jagged_attention(x, x.to("meta"), x, offsets, offsets), ValueError, "k_MHD: expected device cpu"),
        (lambda: jagged_attention_shared(x[0], x, x, offsets), ValueError, "q_SHD: expected shape"),
        (lambda: seed_pooling(x, x[..., :4], x, offsets), ValueError, "k_NHD: expected shape"),
        (lambda: sum_kron(x, x[:, :1], x), ValueError, "z_PST: expected shape"),
        (lambda: block_attention(x, x, x, offsets, block_size=0), ValueError, "block_size: .* found 0"),
        (lambda: gdpa(x, kv[:1], kv[:1], offsets), ValueError, r"k_BKHD: expected shape \[2, any, 2, 8\]"),
        (lambda: gdpa(x, kv, kv, offsets, activation="softmax"), ValueError, "activation: .* found 'softmax'"),
        (lambda: gdpa_pffn(x, kv, kv, offsets, eps=0.0), ValueError, "eps: expected a value > 0"),
        (lambda: broadcast_attention(kv, x, x, offsets, owners + 1), ValueError, "cand_to_request: row 1 .* found 2"),
        (lambda: broadcast_attention(kv, x, x, offsets, owners.int()), TypeError, "cand_to_request: .*torch.int64"),
        (lambda: broadcast_attention(kv, x, x, offsets, owners[:1]), ValueError, r"cand_to_request: .* shape \[2\]"),
        (
            lambda: broadcast_linear(x[0], x[1], x[0].T, x[1].T, torch.tensor([0, -1])),
            ValueError,
            "cand_to_request: row 1 .* found -1",
        ),
        (lambda: broadcast_linear(x[0], x[1], x[0], x[1], owners), ValueError, r"w_KO: expected shape \[8, any\]"),
        (lambda: grouped_gemm(x[0], x[:, 0], offsets), ValueError, "w_GKO|offsets"),
        (lambda: fused_linears(x[0], []), ValueError, "weights: expected at least one"),
        (lambda: fused_linears(x[0], [x[0].T, x[0]]), ValueError, r"weights\[1\]: expected shape \[8, any\]"),
        (lambda: rotary(x[..., :3], torch.arange(4)), ValueError, "even head width D, found 3"),
        (lambda: rotary(x, torch.arange(3)), ValueError, r"position_N: expected shape \[4\]"),
        (lambda: rotary(x, torch.arange(4), torch.tensor([0, 1, -2, 0])), ValueError, "row 2 .* found -2"),
        (lambda: rotary(x, torch.arange(4), time_share=1.5), ValueError, "time_share: .* found 1.5"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call: Callable[[], Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("limit", "error"), [(0.5, 5e-6), (0.75, 1.2e-4), (1.0, 1.2e-3)])
def test_fast_gelu_is_gelu_on_its_documented_range(limit: float, error: float) -> None:
    grid = torch.linspace(-limit, limit, 2001, dtype=torch.float64)
    assert (fast_gelu(grid) - torch.nn.functional.gelu(grid)).abs().max() <= error


def test_fast_gelu_leaves_gelu_outside_its_range() -> None:
    assert (fast_gelu(torch.tensor(3.0)) - torch.nn.functional.gelu(torch.tensor(3.0))).abs() > 3.9


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_keep_zero_at_zero(name: str) -> None:
    assert ACTIVATIONS[name](torch.zeros(1)).item() == 0.0


def test_rotary_makes_scores_depend_on_differences_only() -> None:
    """q at position a and k at position b meet as at a + c and b + c; with one time unit the same holds for time."""
    q, k = torch.randn(2, 1, 3, 16, dtype=torch.float64)

    def score(a: int, b: int) -> Tensor:
        return (rotary(q, torch.tensor([a])) * rotary(k, torch.tensor([b]))).sum(-1)

    torch.testing.assert_close(score(7, 3), score(104, 100))
    assert not torch.allclose(score(7, 3), score(7, 4))


def test_rotary_turns_its_time_share_with_the_log_of_the_gap() -> None:
    x = torch.ones(3, 1, 8)
    position, gap = torch.tensor([0, 5, 0]), torch.tensor([0, 0, 3_600_000])
    turned = rotary(x, position, gap, time_share=0.25).view(3, 2, 4)
    assert torch.equal(turned[0], torch.ones(2, 4))
    assert torch.equal(turned[1][:, 3], torch.ones(2))  # the last pair ignores the position
    assert torch.equal(turned[2][:, :3], torch.ones(2, 3))  # the others ignore the gap
    angle = torch.log(torch.tensor(2.0))  # log(1 + one hour / one hour), at frequency 1
    torch.testing.assert_close(turned[2][:, 3], torch.stack([angle.cos() - angle.sin(), angle.cos() + angle.sin()]))


def test_rotary_keeps_norms_dtype_and_long_gaps_apart() -> None:
    x = torch.randn(2, 2, 16)
    year_ms = 365 * 24 * 3_600_000
    turned = rotary(x, torch.zeros(2), torch.tensor([year_ms, 2 * year_ms]))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert rotary(x.half(), torch.arange(2)).dtype == torch.float16
    assert not torch.allclose(rotary(x, torch.zeros(2), torch.tensor([0, year_ms]))[1], turned[1])


@pytest.mark.parametrize("causal", [False, True])
def test_one_query_more_equals_the_full_result(causal: bool) -> None:
    """The last query alone over all keys gives the last row of the full attention: cached plus new equals full."""
    q, k, v = (torch.randn(6, 2, 8) for _ in range(3))
    full = jagged_attention(q, k, v, offsets_of([6]), offsets_of([6]), causal=causal)
    last = jagged_attention(q[5:], k, v, offsets_of([1]), offsets_of([6]), causal=causal)
    torch.testing.assert_close(last, full[5:])
