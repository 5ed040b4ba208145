"""`TensorBatch`: an encoded `RequestBatch` as torch tensors, with the jagged sizes that the layers share."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from streams.encode import RequestBatch


@dataclass(frozen=True)
class TensorBatch:
    """The arrays of `streams.encode.RequestBatch` as tensors; see there for shapes."""

    surface: Tensor
    hour: Tensor
    user_categories: Tensor
    user_dense: Tensor
    offsets: Tensor
    history_ad: Tensor
    history_categories: Tensor
    event_ad: Tensor
    event_surface: Tensor
    event_actions: Tensor
    event_value: Tensor
    event_gap_ms: Tensor
    ad: Tensor
    ad_categories: Tensor
    ad_dense: Tensor
    request: Tensor

    @classmethod
    def of(cls, batch: RequestBatch, device: torch.device | str = "cpu") -> TensorBatch:
        """Tensors of an encoded batch, on a device; shares memory on the CPU."""
        return cls(**{name: torch.from_numpy(array).to(device) for name, array in batch.arrays().items()})

    @property
    def num_requests(self) -> int:
        """B."""
        return len(self.surface)

    @property
    def lengths(self) -> Tensor:
        """History length of each request, i8[B]."""
        return self.offsets.diff()

    @property
    def candidate_lengths(self) -> Tensor:
        """Number of candidates of each request, i8[B]."""
        return torch.bincount(self.request, minlength=self.num_requests)

    def with_candidates(self, ad: Tensor, ad_categories: Tensor, ad_dense: Tensor, request: Tensor) -> TensorBatch:
        """The same requests with other candidates."""
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        kept.update(ad=ad, ad_categories=ad_categories, ad_dense=ad_dense, request=request)
        return TensorBatch(**kept)
