"""What tests and benchmarks of the operators share: jagged cases, poisoned buffers, gradients, the tolerance rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Tensors = list[Tensor]


def offsets_of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Offsets, int64 [B+1], of rows with these lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device)


def poisoned(num: int, *shape: int, tail: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal values [num + tail, *shape] whose `tail` entries are NaN: whoever reads past the last offset shows it."""
    x = torch.randn(num + tail, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[num:] = float("nan")
    return x


def strided(x: Tensor) -> Tensor:
    """The same values as a view into a wider buffer, with NaN between the entries; the last dimension stays dense."""
    wide = x.new_full((x.shape[0], 2, *x.shape[1:-1], x.shape[-1] + 3), float("nan"))
    wide[:, 1, ..., 1 : 1 + x.shape[-1]] = x
    return wide[:, 1, ..., 1 : 1 + x.shape[-1]]


def value_and_gradients(function: Callable[..., Tensor], *inputs: Tensor, seed: int = 1) -> Tensors:
    """The output of `function` and its gradients for each input under a fixed random cotangent.

    An input that the output does not depend on has a gradient of zeros (a reference without rows computes nothing).
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
    if not out.requires_grad:
        return [out, *(torch.zeros_like(x) for x in leaves)]
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent, materialize_grads=True)]


def assert_as_good(
    found: Tensors, same_dtype: Tensors, exact: Tensors, *, factor: float = 2.0, floor: float = 2e-6
) -> None:
    """Assert that `found` is at most `factor` times as far from `exact` as the same maths in the kernel's dtype is.

    Args:
        found: results under test.
        same_dtype: the same maths, done plainly in the dtype of the kernel.
        exact: the same maths in a wider dtype.
        factor: how much worse than `same_dtype` is allowed.
        floor: error allowed where the plain maths happens to be exact, relative to the largest magnitude.
    """
    for i, (x, plain, true) in enumerate(zip(found, same_dtype, exact, strict=True)):
        assert x.shape == true.shape, f"result {i}: expected shape {list(true.shape)}, found {list(x.shape)}"
        if true.numel() == 0:
            continue
        assert bool(x.isfinite().all()), f"result {i}: not finite"
        wide = true.double()
        error = float((x.double() - wide).abs().max())
        plain_error = float((plain.double() - wide).abs().max())
        allowed = factor * plain_error + floor * max(1.0, float(wide.abs().max()))
        assert error <= allowed, f"result {i}: error {error:.3e}, expected at most {allowed:.3e}"
