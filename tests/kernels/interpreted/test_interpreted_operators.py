"""Every Triton kernel against its reference: values and gradients, empty rows, tails, views, precisions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_cases import BLOCK, CASES, Case, D, gdpa_case, pffn
from torch import Tensor

from kernels import configs
from kernels.gdpa import ACTIVATIONS
from kernels.jagged_attention import triton_rotary
from kernels.jagged_attention.rotary import rotate
from kernels.testing import assert_as_good, poisoned, strided, value_and_gradients

LENGTHS = [
    [],
    [0],
    [0, 0, 0],
    [1, 0, 1],
    [2, 2, 0],
    [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 0],
    list(range(18)),
]


def check(case: Case, dtype: torch.dtype = torch.float32) -> None:
    """The kernel is at most twice as far from fp64 as the same maths in its dtype is."""
    inputs = [x.to(dtype) for x in case.inputs]
    exact = value_and_gradients(case.reference, *(x.double() for x in inputs))
    plain = value_and_gradients(case.operator, *inputs) if dtype == torch.float32 else rounded(case, inputs)
    assert_as_good(value_and_gradients(case.kernel, *inputs), plain, exact)


def rounded(case: Case, inputs: list[Tensor]) -> list[Tensor]:
    """The fp32 reference with its results, and once more its inputs, rounded to the kernel's dtype."""
    noise = [x.float() * (1 + torch.finfo(x.dtype).eps * torch.sign(torch.randn(x.shape))) for x in inputs]
    return [x.to(inputs[0].dtype) for x in value_and_gradients(case.reference, *noise)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_equal_the_reference(name: str, lengths: list[int]) -> None:
    check(CASES[name](lengths, 3))


@pytest.mark.parametrize("name", CASES)
def test_rows_longer_than_a_tile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 and a step of 16: lengths around one and two tiles, several zigzag rounds."""
    monkeypatch.setattr(configs, "select", lambda *_: configs.Config(own=16, other=16))
    check(CASES[name]([15, 0, 16, 17, 33, 1], 2))


@pytest.mark.parametrize("name", CASES)
def test_tiles_of_two_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "select", lambda *_: configs.Config(own=32, other=16))
    check(CASES[name]([40, 0, 7], 1))


@pytest.mark.parametrize("name", CASES)
def test_half_precision(name: str) -> None:
    check(CASES[name]([5, 0, 9, 2], 2), torch.float16)


@pytest.mark.parametrize("name", CASES)
def test_strided_views_equal_contiguous_copies(name: str) -> None:
    case = CASES[name]([0, 3, 5, 1], 1)
    dense = value_and_gradients(case.kernel, *case.inputs)
    views = value_and_gradients(case.kernel, *(strided(x) for x in case.inputs))
    for x, y in zip(dense, views, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", CASES)
def test_a_strided_cotangent_equals_a_contiguous_one(name: str) -> None:
    case = CASES[name]([0, 3, 5, 1], 0)
    leaves = [x.requires_grad_() for x in case.inputs]
    out = case.kernel(*leaves)
    cotangent = torch.randn(out.shape)
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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("poisoned_memory")
def test_every_output_is_written(name: str) -> None:
    case = CASES[name]([0, 3, 0, 9, 4], 3)
    for x in value_and_gradients(case.kernel, *case.inputs):
        assert x.isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("make", [gdpa_case, pffn])
def test_every_activation(make: type[Case], activation: str) -> None:
    check(make([0, 1, 7, 4], 2, activation))


@pytest.mark.parametrize("num", [0, 1, 33, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rotation(num: int, dtype: torch.dtype) -> None:
    x = strided(poisoned(num, 2, 6, tail=0, dtype=dtype))
    angle = torch.randn(num, 3) * 100
    found = value_and_gradients(lambda x: triton_rotary.rotate(x, angle), x)
    plain = value_and_gradients(lambda x: rotate(x, angle), x)
    exact = value_and_gradients(lambda x: rotate(x, angle.double()), x.double())
    assert_as_good(found, plain, exact)


def test_head_width_is_off_the_tile() -> None:
    assert D % 16
