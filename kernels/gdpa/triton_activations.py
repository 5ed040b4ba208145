"""The activations of `kernels.gdpa.activations` and their derivatives inside Triton kernels, in fp32.

A named constant stands behind the tensor it meets: the interpreter takes `tensor * constant` but not the reverse.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from kernels._shared.triton import tl, triton
from kernels.gdpa import activations

INV_SQRT2 = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.044715)  # the cubic term of the tanh form of GELU
C2 = tl.constexpr(activations.GELU_C2)
C4 = tl.constexpr(activations.GELU_C4)
C6 = tl.constexpr(activations.GELU_C6)
SLOPE = tl.constexpr(activations.LEAKY_SLOPE)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in fp32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, NAME: tl.constexpr):
    """act(x)."""
    if NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * INV_SQRT2))
    elif NAME == "gelu_tanh":
        # 0.5 (1 + tanh(u)) = sigmoid(2 u)
        y = x * sigmoid(x * (x * x * CUBIC + 1.0) * SQRT_8_OVER_PI)
    elif NAME == "fast_gelu":
        x2 = x * x
        y = 0.5 * x + x2 * (x2 * (x2 * C6 + C4) + C2)
    elif NAME == "relu":
        y = tl.maximum(x, 0.0)
    elif NAME == "relu2":
        positive = tl.maximum(x, 0.0)
        y = positive * positive
    elif NAME == "leaky_relu":
        y = tl.where(x > 0.0, x, x * SLOPE)
    elif NAME == "silu":
        y = x * sigmoid(x)
    elif NAME == "hard_swish":
        y = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    else:
        tl.static_assert(NAME == "identity")
        y = x
    return y


@triton.jit
def derivative(x, NAME: tl.constexpr):
    """act'(x)."""
    if NAME == "gelu":
        y = 0.5 * (1.0 + tl.erf(x * INV_SQRT2)) + x * INV_SQRT_2PI * tl.exp(-0.5 * x * x)
    elif NAME == "gelu_tanh":
        gate = sigmoid(x * (x * x * CUBIC + 1.0) * SQRT_8_OVER_PI)
        y = gate + x * gate * (1.0 - gate) * (x * x * CUBIC * 3.0 + 1.0) * SQRT_8_OVER_PI
    elif NAME == "fast_gelu":
        x2 = x * x
        y = x * (x2 * (x2 * C6 * 6.0 + C4 * 4.0) + C2 * 2.0) + 0.5
    elif NAME == "relu":
        y = tl.where(x > 0.0, 1.0, 0.0)
    elif NAME == "relu2":
        y = 2.0 * tl.maximum(x, 0.0)
    elif NAME == "leaky_relu":
        y = tl.where(x > 0.0, 1.0, SLOPE)
    elif NAME == "silu":
        gate = sigmoid(x)
        y = gate * (1.0 + x * (1.0 - gate))
    elif NAME == "hard_swish":
        y = tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, 1.0, x * (1.0 / 3.0) + 0.5))
    else:
        tl.static_assert(NAME == "identity")
        y = tl.full(x.shape, 1.0, tl.float32)
    return y
