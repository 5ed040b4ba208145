"""Embedding tables, through torchrec's collections and KeyedJaggedTensor.

Tables are shared between the history and the candidate list (one ad, one row), and all categorical features of one side live in
one unified table. Each key is jagged over requests: a request's candidates are a list, never repeated rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from gem.batch import TensorBatch
from gem.config import Vocabulary
from streams.encode import HOURS

INIT_RANGE = 0.05

REQUEST_KEYS = ("event_ad", "event_category", "event_surface", "user_category", "surface", "hour")
CANDIDATE_KEYS = ("ad", "ad_category")


class Tables(nn.Module):
    """All tables of the model, of one width D."""

    def __init__(self, vocabulary: Vocabulary, dim: int) -> None:
        super().__init__()
        self.dim = dim
        sizes = {
            "ad": (vocabulary.num_ads, ["event_ad", "ad"]),
            "ad_category": (vocabulary.num_ad_categories, ["event_category", "ad_category"]),
            "user_category": (vocabulary.num_user_categories, ["user_category"]),
            "surface": (vocabulary.num_surfaces + 1, ["event_surface", "surface"]),
            "hour": (HOURS, ["hour"]),
        }
        self.collection = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    feature_names=features,
                    init_fn=lambda weight: nn.init.uniform_(weight, -INIT_RANGE, INIT_RANGE),
                )
                for name, (rows, features) in sizes.items()
            ]
        )

    def request(self, batch: TensorBatch) -> dict[str, Tensor]:
        """Rows of the request side: event_* [T, D] (event_category [T, Fa, D]), user_category [B, Fu, D], surface, hour [B, D]."""
        ones = torch.ones_like(batch.surface)
        num_ad, num_user = batch.event_categories.shape[1], batch.user_categories.shape[1]
        found = self._lookup(
            REQUEST_KEYS,
            [batch.event_ad, batch.event_categories, batch.event_surface, batch.user_categories, batch.surface, batch.hour],
            [batch.lengths, batch.lengths * num_ad, batch.lengths, ones * num_user, ones, ones],
        )
        found["event_category"] = found["event_category"].view(-1, num_ad, self.dim)
        found["user_category"] = found["user_category"].view(-1, num_user, self.dim)
        return found

    def candidate(self, batch: TensorBatch) -> dict[str, Tensor]:
        """Rows of the candidate side: ad [C, D], ad_category [C, Fa, D]."""
        num_ad = batch.ad_categories.shape[1]
        lengths = batch.candidate_lengths
        found = self._lookup(CANDIDATE_KEYS, [batch.ad, batch.ad_categories], [lengths, lengths * num_ad])
        found["ad_category"] = found["ad_category"].view(-1, num_ad, self.dim)
        return found

    def _lookup(self, keys: tuple[str, ...], values: list[Tensor], lengths: list[Tensor]) -> dict[str, Tensor]:
        # The collection wants every one of its features in the tensor; absent ones are empty bags.
        size = len(lengths[0])
        given = dict(zip(keys, zip(values, lengths, strict=True), strict=True))
        features = KeyedJaggedTensor.from_jt_dict(
            {
                key: JaggedTensor(values=given[key][0].flatten(), lengths=given[key][1])
                if key in given
                else JaggedTensor(values=values[0].new_empty(0), lengths=lengths[0].new_zeros(size))
                for key in (*REQUEST_KEYS, *CANDIDATE_KEYS)
            }
        )
        found = self.collection(features)
        return {key: found[key].values() for key in keys}
