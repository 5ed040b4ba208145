"""The Kunlun layer (arXiv 2602.10016), written as a request side and a candidate side.

Request side: an interaction block (weight generation, hierarchical seed pooling, mixture of Wukong experts) and a transformer block
(GDPA-PFFN or self-attention) over the jagged history. Candidate side: target attention over the same history and a Wukong expert
that reads the request's tokens. The request side never reads a candidate.

Shapes: B requests, C candidates, T history events, n request tokens, m candidate tokens, D width, H heads, E = D / H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from gem.config import GemConfig
from gem.experts import ExpertMixture, WukongExpert
from kernels.block_attention import block_attention
from kernels.broadcast_attention import broadcast_attention
from kernels.broadcast_linear import broadcast_linear
from kernels.gdpa import gdpa_pffn
from kernels.jagged_attention import rotary
from kernels.seed_pooling import seed_pooling, sum_kron

KRON_TERMS = 2


@dataclass(frozen=True)
class Events:
    """Where the packed events lie and when they happened: offsets i8[B + 1], position i8[T], gap_ms f4[T]."""

    offsets: Tensor
    position: Tensor
    gap_ms: Tensor


def _heads(x_TD: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """[T, parts * D] -> `parts` tensors [T, H, E]; sizes are spelled out, since no events leave nothing to infer them from."""
    return x_TD.view(len(x_TD), parts, heads, x_TD.shape[1] // (parts * heads)).unbind(1)


class SeedPooling(nn.Module):
    """HSP (§4.3.2): more learned seeds than tokens attend over the history, then SumKron reduces them."""

    def __init__(self, config: GemConfig) -> None:
        super().__init__()
        dim = config.dim
        self.heads = config.heads
        self.seeds = nn.Parameter(torch.empty(config.num_seeds, dim))
        nn.init.trunc_normal_(self.seeds, std=0.02)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.z = nn.Parameter(torch.randn(KRON_TERMS, config.num_seeds, config.num_summary) * config.num_seeds**-0.5)
        self.w = nn.Parameter(torch.randn(KRON_TERMS, dim, dim) * (KRON_TERMS * dim) ** -0.5)

    def forward(self, s_TD: Tensor, events: Events) -> Tensor:
        """[T, D] -> [B, num_summary, D]."""
        key, value = _heads(self.key_value(s_TD), 2, self.heads)
        seeds = F.layer_norm(self.seeds, (self.seeds.shape[1],)).view(len(self.seeds), self.heads, -1)
        return sum_kron(seed_pooling(seeds, key, value, events.offsets).flatten(2), self.z, self.w)


class PersonalisedFFN(nn.Module):
    """GDPA-PFFN (§4.3.1): keys and values generated from the request's summary act on every event."""

    def __init__(self, config: GemConfig, num_tokens: int) -> None:
        super().__init__()
        self.heads, self.generated = config.heads, config.num_generated
        self.mix = nn.Linear(num_tokens, 2 * config.num_generated, bias=False)
        self.key = nn.Linear(config.dim, config.dim, bias=False)
        self.value = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BnD: Tensor, s_TD: Tensor, events: Events) -> Tensor:
        """[B, n, D], [T, D] -> [T, D]."""
        mixed = F.layer_norm(self.mix(x_BnD.transpose(1, 2)).transpose(1, 2), (x_BnD.shape[-1],))
        shape = (len(x_BnD), self.generated, self.heads, x_BnD.shape[-1] // self.heads)
        # 1/tau of the paper is folded into the generated keys: the unscaled operator then computes its formula exactly.
        key = self.key(mixed[:, : self.generated]).view(shape) * x_BnD.shape[-1] ** -0.5
        value = self.value(mixed[:, self.generated :]).view(shape)
        query = s_TD.unflatten(1, (self.heads, s_TD.shape[1] // self.heads))
        return gdpa_pffn(query, key, value, events.offsets, activation="gelu_tanh").flatten(1)


class SelfAttention(nn.Module):
    """Block-diagonal self-attention of the history with rotary temporal encoding (§4.2, §1.6 block attention)."""

    def __init__(self, config: GemConfig) -> None:
        super().__init__()
        self.heads, self.block_size = config.heads, config.block_size
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, s_TD: Tensor, events: Events) -> Tensor:
        """[T, D] -> [T, D], residual included."""
        normed = F.layer_norm(s_TD, (s_TD.shape[1],))
        query, key, value = _heads(self.qkv(normed), 3, self.heads)
        turned = rotary(torch.cat([query, key], dim=1), events.position, events.gap_ms)
        query, key = turned.chunk(2, dim=1)
        return s_TD + self.out(
            block_attention(query, key, value, events.offsets, block_size=self.block_size).flatten(1)
        )


class KunlunLayer(nn.Module):
    """One layer; `index` decides the CompSkip parity (§4.4.1): even layers pool and personalise, odd ones self-attend."""

    def __init__(self, config: GemConfig, index: int, num_request: int, num_candidate: int) -> None:
        super().__init__()
        dim = config.dim
        self.heads = config.heads
        self.pools = index % 2 == 0
        if self.pools:
            self.pooling = SeedPooling(config)
            self.ffn = PersonalisedFFN(config, num_request)
        else:
            self.attention = SelfAttention(config)
        tokens = num_request + config.num_summary
        self.interaction = ExpertMixture(
            tokens, num_request, dim, config.fm_rank, config.expert_hidden, config.num_experts
        )
        # Candidate side: deep cross attention (arXiv 2607.27744) and an expert that reads the request.
        own, read = num_candidate * dim, tokens * dim
        self.query_own = nn.Parameter(torch.randn(own, own) * (own + read) ** -0.5)
        self.query_read = nn.Parameter(torch.randn(read, own) * (own + read) ** -0.5)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.cross = WukongExpert(2 * num_candidate, tokens, num_candidate, dim, config.fm_rank, config.expert_hidden)

    def request(
        self, x_BnD: Tensor, s_TD: Tensor, summary: Tensor | None, events: Events
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(request tokens, history, summary) of the next layer; the summary is reused by layers that do not pool."""
        if self.pools or summary is None:
            summary = self.pooling(s_TD, events)
        mixed = self.interaction(torch.cat([x_BnD, summary], dim=1))
        s_TD = self.ffn(mixed, s_TD, events) if self.pools else self.attention(s_TD, events)
        return mixed, s_TD, summary

    def keys_values(self, s_TD: Tensor) -> tuple[Tensor, Tensor]:
        """What candidates read of the history, [T, H, E] twice: request side, so computed once per request."""
        key, value = _heads(self.key_value(F.layer_norm(s_TD, (s_TD.shape[1],))), 2, self.heads)
        return key, value

    def candidate(
        self, c_CmD: Tensor, read_BrD: Tensor, keys_values: tuple[Tensor, Tensor], offsets: Tensor, request: Tensor
    ) -> Tensor:
        """[C, m, D] -> [C, m, D]: target attention over the request's history, then the expert."""
        count, num, dim = c_CmD.shape
        # What a candidate asks of the history depends on the request too; that share of the query is computed once per request.
        query = broadcast_linear(read_BrD.flatten(1), c_CmD.flatten(1), self.query_read, self.query_own, request)
        heads = query.view(count, num, self.heads, dim // self.heads)
        found = broadcast_attention(heads, *keys_values, offsets, request).reshape(count, num, dim)
        return self.cross(torch.cat([c_CmD, found], dim=1), read_BrD, request)
