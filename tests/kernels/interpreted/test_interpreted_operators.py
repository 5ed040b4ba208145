"""Every Triton kernel against its reference: values and gradients, empty rows, tails, views, precisions."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import configs
from kernels._jagged import layout_of
from kernels.gdpa import ACTIVATIONS
from kernels.gdpa import triton as gdpa_triton
from kernels.jagged_attention import triton_rotary
from kernels.jagged_attention.rotary import rotate
from kernels.testing import assert_as_good, offsets_of, poisoned, strided, value_and_gradients
from tests.kernels.kernel_cases import BLOCK, CASES, Case, D, gdpa_case, pffn, rounded

NAMES = [name for name in CASES if name != "seed"]  # the kernel of "shared" under another name
LENGTHS = [
    [],
    [0],
    [0, 0, 0],
    [1, 0, 1],
    [2, 2, 0],
    [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 0],
    list(range(18)),
]


DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def kernel_results(case: Case, inputs: list[Tensor]) -> list[Tensor]:
    """Value and gradients of the kernel on the device under test."""
    return [x.cpu() for x in value_and_gradients(case.kernel, *(x.to(DEVICE) for x in inputs))]


def check(case: Case, dtype: torch.dtype = torch.float32) -> None:
    """The kernel is at most twice as far from fp64 as the same maths in its dtype is."""
    inputs = [x.to(dtype) for x in case.inputs]
    exact = value_and_gradients(case.reference, *(x.double() for x in inputs))
    is_single = dtype == torch.float32
    plain = value_and_gradients(case.operator, *inputs) if is_single else rounded(case.reference, inputs)
    assert_as_good(kernel_results(case, inputs), plain, exact)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradients_equal_the_reference(name: str, lengths: list[int]) -> None:
    check(CASES[name](lengths, 3))


@pytest.mark.parametrize("name", NAMES)
def test_rows_longer_than_a_tile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 and a step of 16: lengths around one and two tiles, several zigzag rounds."""
    monkeypatch.setattr(configs, "select", lambda *_: configs.Config(own=16, other=16))
    check(CASES[name]([15, 0, 16, 17, 33, 1], 2))


@pytest.mark.parametrize("name", NAMES)
def test_tiles_of_two_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "select", lambda *_: configs.Config(own=32, other=16))
    check(CASES[name]([40, 0, 7], 1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 wrongly")
    check(CASES[name]([5, 0, 9, 2], 2), dtype)


@pytest.mark.parametrize("name", ["jagged", "gdpa", "pffn", "linear"])
def test_second_derivatives_are_refused(name: str) -> None:
    case = CASES[name]([2, 3], 0)
    leaves = [x.to(DEVICE).requires_grad_() for x in case.inputs]
    (first,) = torch.autograd.grad(case.kernel(*leaves).square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_no_keys_at_all() -> None:
    """GDPA over zero generated keys is zero and has zero gradients."""
    offsets = offsets_of([2, 0, 3], DEVICE)
    q, kv = torch.randn(5, 2, 8, device=DEVICE), torch.randn(3, 0, 2, 8, device=DEVICE)
    results = value_and_gradients(
        lambda q, k, v: gdpa_triton.gdpa(q, k, v, layout_of(offsets, 5), "gelu", 1.0, 1.0, None), q, kv, kv
    )
    assert all(not x.any() for x in results)


@pytest.mark.parametrize("name", NAMES)
def test_strided_views_equal_contiguous_copies(name: str) -> None:
    case = CASES[name]([0, 3, 5, 1], 1)
    dense = kernel_results(case, case.inputs)
    views = kernel_results(case, [strided(x.to(DEVICE)) for x in case.inputs])
    for x, y in zip(dense, views, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", NAMES)
def test_a_strided_cotangent_equals_a_contiguous_one(name: str) -> None:
    case = CASES[name]([0, 3, 5, 1], 0)
    leaves = [x.to(DEVICE).requires_grad_() for x in case.inputs]
    out = case.kernel(*leaves)
    cotangent = torch.randn(out.shape, device=DEVICE)
    turned = cotangent.transpose(0, -1).contiguous().transpose(0, -1)
    plain = torch.autograd.grad(out, leaves, cotangent, retain_graph=True)
    for x, y in zip(plain, torch.autograd.grad(out, leaves, turned), strict=True):
        assert torch.equal(x, y)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """In deterministic mode torch fills new uninitialised tensors with NaN: an entry that nobody writes stays NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("poisoned_memory")
def test_every_output_is_written(name: str) -> None:
    case = CASES[name]([0, 3, 0, 9, 4], 3)
    for x in kernel_results(case, case.inputs):
        assert x.isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("make", [gdpa_case, pffn])
def test_every_activation(make: type[Case], activation: str) -> None:
    check(make([0, 1, 7, 4], 2, activation))


@pytest.mark.parametrize("num", [0, 1, 33, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rotation(num: int, dtype: torch.dtype) -> None:
    x = poisoned(num, 2, 6, tail=0, dtype=dtype)
    angle = torch.randn(num, 3) * 100
    found = value_and_gradients(lambda x: triton_rotary.rotate(x, angle.to(DEVICE)), strided(x.to(DEVICE)))
    plain = value_and_gradients(lambda x: rotate(x, angle), x)
    exact = value_and_gradients(lambda x: rotate(x, angle.double()), x.double())
    assert_as_good([x.cpu() for x in found], plain, exact)


def test_head_width_is_off_the_tile() -> None:
    assert D % 16
