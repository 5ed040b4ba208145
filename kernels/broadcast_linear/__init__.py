"""A linear layer over request and candidate features in which the request part is computed once per request.

Source: in-kernel broadcast optimisation of request/candidate models (PyTorch engineering post, 2026-05).
"""

from __future__ import annotations

from torch import Tensor

from kernels._checks import check_device, check_floats, check_index, check_shape

__all__ = ["broadcast_linear"]


def broadcast_linear(x_RK: Tensor, x_CJ: Tensor, w_KO: Tensor, w_JO: Tensor, cand_to_request: Tensor) -> Tensor:
    """x_C w_C + (x_R w_R)[cand_to_request]: the linear map of [x_R; x_C] with no request row copied per candidate.

    Args:
        x_RK: request features [R, K].
        x_CJ: candidate features [C, J].
        w_KO: weight of the request features [K, O].
        w_JO: weight of the candidate features [J, O].
        cand_to_request: int64 [C], values in [0, R).

    Returns:
        [C, O].

    Raises:
        TypeError: dtypes that are not floating or differ, indices that are not int64.
        ValueError: shapes, devices or indices that do not fit.
    """
    check_floats(x_RK=x_RK, x_CJ=x_CJ, w_KO=w_KO, w_JO=w_JO)
    check_shape("x_RK", x_RK, (None, None))
    check_shape("x_CJ", x_CJ, (None, None))
    check_shape("w_KO", w_KO, (x_RK.shape[1], None))
    check_shape("w_JO", w_JO, (x_CJ.shape[1], w_KO.shape[1]))
    check_device("cand_to_request", cand_to_request, x_CJ)
    check_index("cand_to_request", cand_to_request, x_CJ.shape[0], x_RK.shape[0])
    if x_CJ.is_cuda:
        from kernels.broadcast_linear import triton

        return triton.broadcast_linear(x_RK, x_CJ, w_KO, w_JO, cand_to_request)
    return x_CJ @ w_JO + (x_RK @ w_KO).index_select(0, cand_to_request)
