"""Prediction heads: one per objective, shared over surfaces, with a surface-specific expert beside the shared one.

Shapes: C candidates, P pair width, K objectives.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Heads(nn.Module):
    """logit = shared(pair) + w[surface] · pair + b[surface]; a surface's own part starts at zero and is learned from its data only."""

    def __init__(self, pair_dim: int, num_surfaces: int, num_objectives: int) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(pair_dim, pair_dim), nn.SiLU(), nn.Linear(pair_dim, num_objectives))
        self.surface_weight = nn.Parameter(torch.zeros(num_surfaces, num_objectives, pair_dim))
        self.surface_bias = nn.Parameter(torch.zeros(num_surfaces, num_objectives))

    def forward(self, pair: Tensor, surface: Tensor) -> Tensor:
        """[C, P], i8[C] -> logits [C, K]."""
        own = torch.einsum("cp,ckp->ck", pair, self.surface_weight[surface])
        return self.shared(pair) + own + self.surface_bias[surface]
