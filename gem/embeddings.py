"""Embedding tables, through torchrec's collections and KeyedJaggedTensor.

Tables are shared between the history and the candidates (one ad, one row), and all categorical features of one side live in one
unified table. An ad that occurs many times in a batch's histories is looked up once.

Shapes: B requests, C candidates, U different ads in the histories, D width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from gem.batch import TensorBatch
from gem.config import Vocabulary
from streams.encode import HOURS

INIT_RANGE = 0.05

# feature -> table; a feature is one key of the KeyedJaggedTensor
FEATURES = {
    "history_ad": "ad",
    "history_category": "ad_category",
    "user_category": "user_category",
    "surface": "surface",
    "hour": "hour",
    "ad": "ad",
    "category": "ad_category",
}


class Tables(nn.Module):
    """All tables of the model, of one width D."""

    def __init__(self, vocabulary: Vocabulary, dim: int) -> None:
        super().__init__()
        self.dim = dim
        sizes = {
            "ad": vocabulary.num_ads,
            "ad_category": vocabulary.num_ad_categories,
            "user_category": vocabulary.num_user_categories,
            "surface": vocabulary.num_surfaces,
            "hour": HOURS,
        }
        self.collection = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=table,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    feature_names=[feature for feature, owner in FEATURES.items() if owner == table],
                    init_fn=lambda weight: nn.init.uniform_(weight, -INIT_RANGE, INIT_RANGE),
                )
                for table, rows in sizes.items()
            ]
        )

    def request(self, batch: TensorBatch) -> dict[str, Tensor]:
        """Rows of the request side: history_ad [U, D], history_category [U, Fa, D], user_category [B, Fu, D], surface, hour [B, D]."""
        return self._lookup(
            {
                "history_ad": batch.history_ad,
                "history_category": batch.history_categories,
                "user_category": batch.user_categories,
                "surface": batch.surface,
                "hour": batch.hour,
            }
        )

    def candidate(self, batch: TensorBatch) -> dict[str, Tensor]:
        """Rows of the candidate side: ad [C, D], category [C, Fa, D]."""
        return self._lookup({"ad": batch.ad, "category": batch.ad_categories})

    def _lookup(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Sides differ in their number of rows, so each key is one bag holding all of its values, and absent keys are empty bags.
        some = next(iter(values.values()))
        bags = {
            feature: JaggedTensor(values=found.flatten(), lengths=torch.tensor([found.numel()], device=found.device))
            for feature in FEATURES
            for found in [values.get(feature, some.new_empty(0))]
        }
        rows = self.collection(KeyedJaggedTensor.from_jt_dict(bags))
        return {feature: rows[feature].values().view(*found.shape, self.dim) for feature, found in values.items()}
