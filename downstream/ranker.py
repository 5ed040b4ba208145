"""The ranker: target attention over the fresh history and dense features, written request side / candidate side.

What depends on the request alone (event keys and values, its share of the first layer) is computed once and broadcast over candidates.
The vector of an ad folds its id, categories and numbers into one row, a constant of the exported graph.

Shapes: B requests, N candidates, L events, D width, H heads, K objectives.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from downstream.inputs import FM_STATE
from loopfm.distill import scale_gradient
from streams.encode import HOURS, Encoder
from streams.features import FmLayout


@dataclass(frozen=True)
class RankerConfig:
    """Shape of the ranker.

    Attributes:
        dim: width D. heads: attention heads. hidden: width of the MLP.
        history: fresh events of a user that are read; long histories are the FM's.
        use_fm: whether it reads FM embeddings; the control of an experiment does not.
        fm_dropout: share of requests that lose theirs in training, so that an outage is no surprise.
    """

    dim: int = 16
    heads: int = 2
    hidden: int = 64
    history: int = 10
    use_fm: bool = True
    fm_dropout: float = 0.05

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class RequestPart:
    """f_R of the ranker: keys and values of the events [B, 1 + L, D], their mask [B, L], context [B, D], first layer [B, hidden]."""

    key: Tensor
    value: Tensor
    mask: Tensor
    context: Tensor
    first: Tensor


class Ranker(nn.Module):
    """Logits of all objectives for each candidate."""

    catalogue_categories: Tensor
    catalogue_numbers: Tensor

    def __init__(self, config: RankerConfig, encoder: Encoder, layout: FmLayout) -> None:
        super().__init__()
        self.config, self.num_objectives = config, layout.num_objectives
        dim, hidden = config.dim, config.hidden
        facts = encoder.num_event_types + encoder.num_surfaces + 3
        # Row 0 is padding, then the catalogue's ads, then hashed rows of unknown ones, which have no categories.
        categories = np.zeros((encoder.num_ad_rows, encoder.ads.categories.shape[1]), dtype=np.int64)
        numbers = np.zeros((encoder.num_ad_rows, encoder.ads.numbers.shape[1]), dtype=np.float32)
        known = slice(1, 1 + len(encoder.ads.ids))
        categories[known], numbers[known] = encoder.ads.categories, encoder.ads.numbers
        self.register_buffer("catalogue_categories", torch.from_numpy(categories), persistent=False)
        self.register_buffer("catalogue_numbers", torch.from_numpy(numbers), persistent=False)
        self.ad_id = _embedding(encoder.num_ad_rows, dim)
        self.ad_category = _embedding(encoder.ads.num_category_rows, dim)
        self.ad_numbers = nn.Linear(numbers.shape[1], dim)
        self.event_facts = nn.Linear(facts, 2 * dim)
        self.null_event = nn.Parameter(torch.zeros(dim))
        self.key_value = nn.Linear(dim, 2 * dim)
        self.query = nn.Linear(dim, dim)
        self.surface = _embedding(encoder.num_surfaces, dim)
        self.hour = _embedding(HOURS, dim)
        self.user_category = _embedding(encoder.users.num_category_rows, dim)
        request_width = 2 * dim + encoder.num_user_dense + (layout.user_dim if config.use_fm else 0)
        self.request = nn.Sequential(nn.Linear(request_width, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        candidate_width = 3 * dim + (layout.pair_dim - 1 + FM_STATE if config.use_fm else 0)
        self.candidate = nn.Linear(candidate_width, hidden)
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(hidden, hidden // 2), nn.SiLU())
        self.head = nn.Linear(hidden // 2, layout.num_objectives)
        self.distill_head = nn.Linear(hidden // 2, layout.num_objectives)

    def ad_vectors(self) -> Tensor:
        """One vector per row of the ad table, [A, D]."""
        categories = F.embedding(self.catalogue_categories, self.ad_category.weight).sum(1)
        return self.ad_id.weight + categories + self.ad_numbers(self.catalogue_numbers)

    def encode_request(self, inputs: dict[str, Tensor], ads: Tensor) -> RequestPart:
        """f_R: reads only the request side of the inputs; ads [A, D] are `ad_vectors`."""
        key, value = self._keys_values(inputs, ads)
        context = self.surface(inputs["surface"]) + self.hour(inputs["hour"])
        user = self.user_category(inputs["user_categories"]).mean(1)
        request = [context, user, inputs["user_dense"]]
        if self.config.use_fm:
            request.append(inputs["fm_user"])
        return RequestPart(key, value, inputs["event_mask"], context, self.request(torch.cat(request, dim=-1)))

    def encode_candidates(self, part: RequestPart, inputs: dict[str, Tensor], ads: Tensor) -> Tensor:
        """f_C: the last hidden layer, [B, N, hidden / 2]; candidates never see each other."""
        ad = ads[inputs["ad"]]
        attended = self._attend(self.query(ad + part.context[:, None]), part.key, part.value, part.mask)
        candidate = [ad, attended, ad * attended]
        if self.config.use_fm:
            candidate += [inputs["fm_pair"], inputs["fm_state"]]
        out: Tensor = self.mlp(self.candidate(torch.cat(candidate, dim=-1)) + part.first[:, None])
        return out

    def hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        """Both sides: the last hidden layer, [B, N, hidden / 2]."""
        ads = self.ad_vectors()
        return self.encode_candidates(self.encode_request(inputs, ads), inputs, ads)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Logits [B, N, K]; see `downstream.inputs` for the inputs."""
        logits: Tensor = self.head(self.hidden(inputs))
        return logits

    def with_auxiliary(self, inputs: dict[str, Tensor], gradient_scale: float) -> tuple[Tensor, Tensor]:
        """(logits, logits of the distillation head), [B, N, K] each."""
        hidden = self.hidden(inputs)
        return self.head(hidden), self.distill_head(scale_gradient(hidden, gradient_scale))

    def _keys_values(self, inputs: dict[str, Tensor], ads: Tensor) -> tuple[Tensor, Tensor]:
        gate, shift = self.event_facts(inputs["event_facts"]).chunk(2, dim=-1)
        events = torch.addcmul(shift, ads[inputs["event_ad"]], 1 + gate)
        # A learned event before all others: no history is then a history of one.
        null = self.null_event.expand(len(events), 1, -1)
        events = F.layer_norm(torch.cat([null, events], dim=1), (self.config.dim,))
        key, value = self.key_value(events).chunk(2, dim=-1)
        return key, value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        heads = self.config.heads

        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (heads, x.shape[-1] // heads)).transpose(1, 2)

        scores = split(query) @ split(key).transpose(2, 3) * (self.config.dim // heads) ** -0.5
        bias = F.pad((mask - 1.0) * 1e4, (1, 0))[:, None, None, :]
        return (torch.softmax(scores + bias, dim=-1) @ split(value)).transpose(1, 2).flatten(2)


def _embedding(rows: int, dim: int) -> nn.Embedding:
    table = nn.Embedding(max(rows, 1), dim)
    nn.init.uniform_(table.weight, -0.05, 0.05)
    return table
