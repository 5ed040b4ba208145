"""Wukong experts (arXiv 2403.02545) written request side / candidate side (block lower-triangular, arXiv 2607.27744).

Shapes: R rows (requests or candidates), n own tokens, r read tokens, D width, B requests.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class WukongExpert(nn.Module):
    """LN(concat(FMB, LCB) + residual) over a row's own tokens, reading its request's tokens.

    FM(X) = X Xᵀ Y is computed as (X_own X_ownᵀ) Y_own + X_own (X_readᵀ Y_read)[request]: the request's share is computed once per
    request and broadcast, and the request's rows never see the candidate's.
    """

    def __init__(self, own: int, read: int, out: int, dim: int, fm_rank: int, hidden: int) -> None:
        super().__init__()
        self.dim, self.width = dim, own * fm_rank
        self.num_fm = out // 2
        self.num_linear = out - self.num_fm
        self.y_own = nn.Parameter(torch.randn(own, fm_rank) * own**-0.5)
        self.lcb_own = nn.Parameter(torch.randn(self.num_linear, own) * own**-0.5)
        if read:
            self.y_read = nn.Parameter(torch.randn(read, fm_rank) * read**-0.5)
            self.lcb_read = nn.Parameter(torch.randn(self.num_linear, read) * read**-0.5)
        self.residual = nn.Parameter(torch.randn(out, own) * own**-0.5) if out != own else None
        self.mlp = nn.Sequential(
            nn.Linear(self.width, hidden, bias=False), nn.SiLU(), nn.Linear(hidden, self.num_fm * dim, bias=False)
        )

    def forward(self, own: Tensor, read: Tensor | None = None, request: Tensor | None = None) -> Tensor:
        """[R, n, D], read [B, r, D], request i8[R] -> [R, out, D]."""
        fm = (own @ own.transpose(1, 2)) @ self.y_own
        linear = torch.einsum("on,rnd->rod", self.lcb_own, own)
        if read is not None and request is not None:
            projected = torch.einsum("brd,rk->bdk", read, self.y_read)
            shared = torch.einsum("or,brd->bod", self.lcb_read, read)
            each = _rows_each(request, len(read))
            if each:  # then rows of one request are one block, and nothing has to be copied per row
                fm = fm + (own.reshape(len(read), -1, self.dim) @ projected).view(fm.shape)
                linear = (linear.view(len(read), each, -1, self.dim) + shared[:, None]).view(linear.shape)
            else:
                fm = fm + own @ projected[request]
                linear = linear + shared[request]
        fm = fm * self.dim**-0.5
        fmb = self.mlp(F.layer_norm(fm.flatten(1), (self.width,))).view(len(own), self.num_fm, self.dim)
        residual = own if self.residual is None else torch.einsum("on,rnd->rod", self.residual, own)
        return F.layer_norm(torch.cat([fmb, linear], dim=1) + residual, (self.dim,))


def _rows_each(request: Tensor, num_requests: int) -> int:
    """How many rows each request has, if all have as many and they come in order; else 0. On a GPU the answer would cost a wait."""
    if request.is_cuda or not num_requests or not len(request) or len(request) % num_requests:
        return 0
    each = len(request) // num_requests
    expected = torch.arange(num_requests).repeat_interleave(each)
    return each if torch.equal(request, expected) else 0


class ExpertMixture(nn.Module):
    """Static partition of the tokens among experts, outputs concatenated (Kunlun §4.4.3: no router)."""

    def __init__(self, own: int, out: int, dim: int, fm_rank: int, hidden: int, experts: int) -> None:
        super().__init__()
        if own < experts or out < experts:
            raise ValueError(f"{experts} experts need at least as many tokens; found {own} in and {out} out")
        self.cuts = [own * i // experts for i in range(experts + 1)]
        outs = [out * (i + 1) // experts - out * i // experts for i in range(experts)]
        self.experts = nn.ModuleList(
            WukongExpert(self.cuts[i + 1] - self.cuts[i], 0, outs[i], dim, fm_rank, hidden) for i in range(experts)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, n, D] -> [B, out, D]."""
        parts = [expert(tokens[:, a:b]) for expert, a, b in zip(self.experts, self.cuts, self.cuts[1:], strict=False)]
        return torch.cat(parts, dim=1)
