"""CUDA tensors reach the kernels through the public functions, with every argument in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import quantize
from kernels.gdpa import triton as gdpa_triton
from kernels.gdpa import triton_pffn
from kernels.jagged_attention import rotary
from kernels.quantize import triton as quantize_triton
from tests.kernels.kernel_cases import CASES


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs CPU tensors; the dispatchers ask only this."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr("kernels._buckets.plan_buckets", refuse)  # every padded CPU form starts here
    monkeypatch.setattr("kernels.jagged_attention.cpu.plan_buckets", refuse)
    monkeypatch.setattr("kernels.gdpa.cpu.plan_buckets", refuse)


def refuse(*_: object) -> None:
    raise AssertionError("a CPU form ran")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("name", CASES)
def test_the_operator_is_the_kernel(name: str) -> None:
    case = CASES[name]([4, 0, 2, 1], 1)
    inputs = [x.to(DEVICE) for x in case.inputs]
    assert torch.equal(case.operator(*inputs), case.kernel(*inputs))


@pytest.mark.parametrize(
    ("module", "attribute", "call"),
    [
        (quantize_triton, "quantize_fp8_rows", lambda x: quantize.quantize_fp8(x)),
        (quantize_triton, "quantize_mxfp8", lambda x: quantize.quantize_mxfp8(x)),
        (
            quantize_triton,
            "scaled_matmul",
            lambda x: quantize.scaled_matmul(quantize.quantize_fp8(x), quantize.quantize_fp8(x).T),
        ),
    ],
)
def test_quantisation_reaches_its_kernels(
    module: Any, attribute: str, call: Callable[[torch.Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    kernel = getattr(module, attribute)
    monkeypatch.setattr(module, attribute, lambda *x: calls.append(1) or kernel(*x))
    call(torch.randn(4, 8, device=DEVICE))
    assert calls


def test_rotary_reaches_its_kernel_and_equals_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x, position, gap = torch.randn(5, 2, 8), torch.arange(5), torch.arange(5) * 3_600_000
    found = rotary(x.to(DEVICE), position.to(DEVICE), gap.to(DEVICE)).cpu()
    monkeypatch.undo()
    torch.testing.assert_close(found, rotary(x, position, gap))


def test_double_precision_is_refused_by_the_kernels() -> None:
    for name in ("jagged", "block", "gdpa", "pffn", "grouped", "linear"):
        case = CASES[name]([2, 1], 0)
        with pytest.raises(TypeError, match="take float16, bfloat16 and float32, found torch.float64"):
            case.operator(*(x.to(DEVICE).double() for x in case.inputs))
    assert gdpa_triton.check_dtype is triton_pffn.check_dtype
