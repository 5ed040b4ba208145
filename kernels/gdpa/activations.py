"""The activations of generalised dot-product attention. All map 0 to 0, so that a masked score contributes nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

LEAKY_SLOPE = 0.01

# Even Taylor coefficients of x (Phi(x) - 1/2) around 0: 1/sqrt(2 pi) times 1, -1/6, 1/40.
GELU_C2 = 0.3989422804014327
GELU_C4 = -0.06649038006690545
GELU_C6 = 0.009973557010035818


def fast_gelu(x: Tensor) -> Tensor:
    """GELU as its Taylor polynomial of degree 6: x/2 + c2 x^2 + c4 x^4 + c6 x^6, without a transcendental function.

    Meant for |x| <= 1, where it is within 1.2e-3 of GELU (4.5e-6 at 0.5); it leaves GELU fast beyond (0.22 at 2, 4.0 at
    3). The caller keeps scores in range, for example by normalising queries and keys.
    """
    x2 = x * x
    return 0.5 * x + x2 * (GELU_C2 + x2 * (GELU_C4 + x2 * GELU_C6))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "fast_gelu": fast_gelu,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "leaky_relu": lambda x: functional.leaky_relu(x, LEAKY_SLOPE),
    "silu": functional.silu,
    "hard_swish": functional.hardswish,
    "identity": lambda x: x,
}


def check_activation(name: str) -> None:
    """Raise ValueError, naming the legal values, for an unknown activation."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {sorted(ACTIVATIONS)}, found {name!r}")
