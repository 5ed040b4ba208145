"""Configuration of GEM: frozen dataclasses; `GemConfig.build` makes the model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gem.model import Gem
    from streams.encode import Encoder


@dataclass(frozen=True)
class Vocabulary:
    """Sizes that the data decide; taken from an encoder."""

    num_ads: int
    num_ad_categories: int
    num_user_categories: int
    num_surfaces: int
    num_event_types: int
    num_ad_features: int
    num_user_features: int
    ad_dense: int
    user_dense: int
    num_objectives: int

    @classmethod
    def of(cls, encoder: Encoder) -> Vocabulary:
        """The sizes of an encoder."""
        return cls(
            num_ads=encoder.num_ad_rows,
            num_ad_categories=encoder.ads.num_category_rows,
            num_user_categories=encoder.users.num_category_rows,
            num_surfaces=encoder.num_surfaces,
            num_event_types=encoder.num_event_types,
            num_ad_features=encoder.ads.categories.shape[1],
            num_user_features=encoder.users.categories.shape[1],
            ad_dense=encoder.ads.numbers.shape[1],
            user_dense=encoder.num_user_dense,
            num_objectives=len(encoder.schema.objectives),
        )


@dataclass(frozen=True)
class GemConfig:
    """Shape of the model.

    Attributes:
        dim: width D of a token.
        heads: attention heads.
        layers: Kunlun layers; even ones pool and personalise, odd ones self-attend (CompSkip).
        history: events of a user that a request reads, newest first cut.
        num_seeds: seeds of hierarchical seed pooling.
        num_summary: tokens that the pooling leaves.
        num_generated: keys and values generated for GDPA.
        num_experts: Wukong experts that share the request tokens.
        fm_rank: rank k of the low-rank factorisation machine.
        expert_hidden: width of the experts' MLP.
        user_dim: width of the user embedding.
        pair_dim: width of the pair embedding.
        block_size: block of block attention.
        dropout: dropout rate of embeddings and of the pair embedding, in training.
    """

    dim: int = 32
    heads: int = 2
    layers: int = 2
    history: int = 50
    num_seeds: int = 16
    num_summary: int = 4
    num_generated: int = 16
    num_experts: int = 2
    fm_rank: int = 8
    expert_hidden: int = 128
    user_dim: int = 32
    pair_dim: int = 64
    block_size: int = 64
    dropout: float = 0.1

    def __post_init__(self) -> None:
        """Refuses shapes that cannot be built."""
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if self.layers < 1:
            raise ValueError(f"layers must be at least 1, found {self.layers}")

    def build(self, vocabulary: Vocabulary) -> Gem:
        """The model, randomly initialised from torch's global generator."""
        from gem.model import Gem

        return Gem(self, vocabulary)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint's manifest."""
        return asdict(self)
