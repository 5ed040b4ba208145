"""GEM: tokens -> Kunlun layers -> heads, as f(request, candidate) = f_C(f_R(request), candidate).

Shapes: B requests, C candidates, T history events, n request tokens, m candidate tokens, D width, P pair width, U user width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from gem.batch import TensorBatch
from gem.config import GemConfig, Vocabulary
from gem.embeddings import Tables
from gem.heads import Heads
from gem.kunlun import Events, KunlunLayer
from gem.tokens import NUM_CANDIDATE_TOKENS, NUM_REQUEST_TOKENS, CandidateTokens, EventTokens, RequestTokens


@dataclass(frozen=True)
class RequestState:
    """f_R(request): all that candidates read. One per batch; request b is row b.

    Attributes:
        tokens: per layer, what the candidate's expert reads, [B, n + summary, D].
        keys_values: per layer, keys and values of the history, [T, H, E].
        offsets: i8[B + 1] of the history.
        user: user embedding, [B, U].
        surface: i8[B].
    """

    tokens: tuple[Tensor, ...]
    keys_values: tuple[tuple[Tensor, Tensor], ...]
    offsets: Tensor
    user: Tensor
    surface: Tensor


@dataclass(frozen=True)
class PairOutput:
    """f_C: pair embedding [C, P] and logits [C, K]."""

    pair: Tensor
    logits: Tensor


class Gem(nn.Module):
    """The foundation model."""

    def __init__(self, config: GemConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config, self.vocabulary = config, vocabulary
        self.tables = Tables(vocabulary, config.dim)
        self.event_tokens = EventTokens(vocabulary, config)
        self.request_tokens = RequestTokens(vocabulary, config)
        self.candidate_tokens = CandidateTokens(vocabulary, config)
        self.layers = nn.ModuleList(
            KunlunLayer(config, index, NUM_REQUEST_TOKENS, NUM_CANDIDATE_TOKENS) for index in range(config.layers)
        )
        self.user = nn.Linear(NUM_REQUEST_TOKENS * config.dim, config.user_dim)
        self.pair = nn.Linear(NUM_CANDIDATE_TOKENS * config.dim + config.user_dim, config.pair_dim)
        self.user_match = nn.Linear(config.dim * NUM_CANDIDATE_TOKENS, config.user_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.heads = Heads(config.pair_dim, vocabulary.num_surfaces, vocabulary.num_objectives)

    def encode_request(self, batch: TensorBatch) -> RequestState:
        """f_R: reads only the request side of the batch."""
        rows = self.tables.request(batch)
        lengths = batch.lengths
        position = torch.arange(len(batch.event_ad), device=batch.offsets.device) - batch.offsets[
            :-1
        ].repeat_interleave(lengths)
        events = Events(batch.offsets, position, batch.event_gap_ms)
        history = self.event_tokens(batch, rows)
        tokens = self.request_tokens(batch, rows)
        summary: Tensor | None = None
        read, keys_values = [], []
        for layer in self._layers():
            tokens, history, summary = layer.request(tokens, history, summary, events)
            read.append(torch.cat([tokens, summary], dim=1))
            keys_values.append(layer.keys_values(history))
        user = torch.tanh(self.user(tokens.flatten(1)))
        return RequestState(tuple(read), tuple(keys_values), batch.offsets, user, batch.surface)

    def encode_candidates(self, state: RequestState, batch: TensorBatch) -> PairOutput:
        """f_C: candidates read the request's state, never each other."""
        tokens = self.candidate_tokens(batch, self.tables)
        for layer, read, keys_values in zip(self._layers(), state.tokens, state.keys_values, strict=True):
            tokens = layer.candidate(tokens, read, keys_values, state.offsets, batch.request)
        flat = tokens.flatten(1)
        match = state.user[batch.request] * self.user_match(flat)
        pair = F.silu(self.pair(torch.cat([flat, match], dim=1)))
        return PairOutput(pair, self.heads(self.dropout(pair), state.surface[batch.request]))

    def _layers(self) -> Iterator[KunlunLayer]:
        return (layer for layer in self.layers if isinstance(layer, KunlunLayer))

    def forward(self, batch: TensorBatch) -> PairOutput:
        """Both sides: pair embeddings [C, P] and logits [C, K]."""
        return self.encode_candidates(self.encode_request(batch), batch)
