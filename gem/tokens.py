"""Tokens: OneSeq history events, request tokens and candidate tokens (dense tokenization).

Shapes: B requests, C candidates, T history events, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from gem.batch import TensorBatch
from gem.config import GemConfig, Vocabulary
from gem.embeddings import Tables

MINUTE_MS = 60_000.0
NUM_USER_TOKENS = 2
NUM_REQUEST_TOKENS = NUM_USER_TOKENS + 2  # + statistics, context
NUM_CANDIDATE_TOKENS = 3


class EventTokens(nn.Module):
    """OneSeq: impressions, clicks, likes … of all surfaces as one time-ordered sequence; type and surface enter as indicators."""

    def __init__(self, vocabulary: Vocabulary, config: GemConfig) -> None:
        super().__init__()
        self.num_surfaces = vocabulary.num_surfaces + 1  # + events from before the log
        self.facts = nn.Linear(vocabulary.num_event_types + self.num_surfaces + 2, 2 * config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, batch: TensorBatch, rows: dict[str, Tensor]) -> Tensor:
        """[T, D]."""
        gap = torch.log1p(batch.event_gap_ms / MINUTE_MS) / 10
        surface = F.one_hot(batch.event_surface, self.num_surfaces).to(gap.dtype)
        facts = torch.cat([batch.event_actions, surface, batch.event_value[:, None], gap[:, None]], dim=1)
        gate, shift = self.facts(facts).chunk(2, dim=1)
        ad = self.dropout(rows["history_ad"] + rows["history_category"].sum(1))[batch.event_ad]
        # What was done gates what it was done to: the same ad liked and hidden are opposite evidence.
        return F.layer_norm(torch.addcmul(shift + ad, ad, gate), (ad.shape[1],))


class RequestTokens(nn.Module):
    """Static user features, history statistics and context as `NUM_REQUEST_TOKENS` tokens."""

    def __init__(self, vocabulary: Vocabulary, config: GemConfig) -> None:
        super().__init__()
        self.compress = nn.Linear(vocabulary.num_user_features, NUM_USER_TOKENS, bias=False)
        self.statistics = nn.Sequential(
            nn.Linear(vocabulary.user_dense, config.dim), nn.SiLU(), nn.Linear(config.dim, config.dim)
        )

    def forward(self, batch: TensorBatch, rows: dict[str, Tensor]) -> Tensor:
        """[B, NUM_REQUEST_TOKENS, D]."""
        users = self.compress(rows["user_category"].transpose(1, 2)).transpose(1, 2)
        context = rows["surface"] + rows["hour"]
        tokens = torch.cat([users, self.statistics(batch.user_dense)[:, None], context[:, None]], dim=1)
        return F.layer_norm(tokens, (tokens.shape[-1],))


class CandidateTokens(nn.Module):
    """An ad's identity, its categories and its numbers, one token each."""

    def __init__(self, vocabulary: Vocabulary, config: GemConfig) -> None:
        super().__init__()
        self.numbers = nn.Sequential(
            nn.Linear(vocabulary.ad_dense, config.dim), nn.SiLU(), nn.Linear(config.dim, config.dim)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, batch: TensorBatch, tables: Tables) -> Tensor:
        """[C, NUM_CANDIDATE_TOKENS, D]."""
        rows = tables.candidate(batch)
        categories = rows["category"].sum(1)
        identity = self.dropout(rows["ad"]) + categories
        tokens = torch.stack([identity, categories, self.numbers(batch.ad_dense)], dim=1)
        return F.layer_norm(tokens, (tokens.shape[-1],))
