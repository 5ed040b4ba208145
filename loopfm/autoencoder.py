"""The representation autoencoder (arXiv 2605.29280): z = tanh f_enc(e), trained on detached FM embeddings.

Matryoshka: several decoders, each reading the first d' entries of z, so that a prefix of z is a representation too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kernels.quantize import quantize_int4
from streams.artifact import ArtifactError, read_manifest, write_artifact

KIND = "autoencoder"


@dataclass(frozen=True)
class AutoencoderConfig:
    """Shape and training.

    Attributes:
        input_dim: width of the FM embedding e.
        z_dim: width of the representation.
        prefixes: widths d' that have a decoder of their own, besides z_dim.
        steps, batch, learning_rate, seed: of the fit.
    """

    input_dim: int
    z_dim: int = 32
    prefixes: tuple[int, ...] = (8, 16)
    steps: int = 400
    batch: int = 1024
    learning_rate: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses prefixes that are not shorter than z."""
        if any(not 0 < prefix < self.z_dim for prefix in self.prefixes):
            raise ValueError(f"prefixes must lie between 1 and {self.z_dim - 1}, found {self.prefixes}")


class Autoencoder(nn.Module):
    """Encoder and the decoders of all prefixes; standardises its input by the statistics of the fit."""

    mean: Tensor
    spread: Tensor

    def __init__(self, config: AutoencoderConfig) -> None:
        """Draws its weights from a generator of its own: it may be fitted beside a training run without disturbing it."""
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(config.seed)
        self.register_buffer("mean", torch.zeros(config.input_dim))
        self.register_buffer("spread", torch.ones(config.input_dim))
        self.encoder = _linear(config.input_dim, config.z_dim, generator)
        widths = (*config.prefixes, config.z_dim)
        self.decoders = nn.ModuleList(_linear(width, config.input_dim, generator) for width in widths)

    def encode(self, embedding: Tensor) -> Tensor:
        """[n, input_dim] -> z [n, z_dim], each entry in (-1, 1)."""
        return torch.tanh(self.encoder((embedding - self.mean) / self.spread))

    @torch.no_grad()
    def encode_int4(self, embedding: Tensor) -> Tensor:
        """[n, input_dim] -> INT4 codes of z, int8 [n, z_dim]; `kernels.quantize.dequantize_int4` gives z back, to 1/16."""
        return quantize_int4(self.encode(embedding))

    def decode(self, z: Tensor) -> list[Tensor]:
        """[n, z_dim] -> reconstruction of the standardised embedding from each prefix, z itself last."""
        return [decoder(z[:, : decoder.in_features]) for decoder in self.decoders]

    def loss(self, embedding: Tensor) -> Tensor:
        """Sum over prefixes of the mean squared error, in units of the embedding's variance."""
        target = (embedding.detach() - self.mean) / self.spread
        return torch.stack(
            [(target - found).square().mean() for found in self.decode(self.encode(embedding.detach()))]
        ).sum()

    @torch.no_grad()
    def unexplained(self, embedding: Tensor) -> list[float]:
        """Share of the embedding's variance that each prefix leaves unexplained."""
        target = (embedding - self.mean) / self.spread
        total = (target - target.mean(0)).square().mean()
        return [float((target - found).square().mean() / total) for found in self.decode(self.encode(embedding))]


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
    assert isinstance(linear, nn.Linear)
    bound = inputs**-0.5
    for parameter in (linear.weight, linear.bias):
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return linear


def fit_autoencoder(embeddings: NDArray[np.float32], config: AutoencoderConfig) -> Autoencoder:
    """Fits on FM embeddings, f4[n, input_dim].

    Raises:
        ValueError: no embeddings, or of another width.
    """
    if embeddings.ndim != 2 or embeddings.shape[1] != config.input_dim or not len(embeddings):
        raise ValueError(f"embeddings must be [n > 0, {config.input_dim}], found {list(embeddings.shape)}")
    generator = torch.Generator().manual_seed(config.seed)
    model = Autoencoder(config)
    data = torch.from_numpy(np.ascontiguousarray(embeddings))
    model.mean.copy_(data.mean(0))
    model.spread.copy_(data.std(0, correction=0).clamp_min(1e-3))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    for _ in range(config.steps):
        rows = torch.randint(len(data), (min(config.batch, len(data)),), generator=generator)
        optimizer.zero_grad()
        model.loss(data[rows]).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def save_autoencoder(folder: Path, model: Autoencoder, meta: dict[str, Any] | None = None) -> str:
    """Writes the artifact; returns its version."""

    def write(staging: Path) -> None:
        save_file(model.state_dict(), staging / "model.safetensors")
        (staging / "config.json").write_bytes(msgspec.json.encode(asdict(model.config)))

    return write_artifact(folder, KIND, meta or {}, write)


def load_autoencoder(folder: Path) -> tuple[Autoencoder, str]:
    """(model in eval mode, version) of an artifact.

    Raises:
        ArtifactError: naming the file and what is wrong with it.
    """
    manifest = read_manifest(folder, KIND)
    try:
        values = msgspec.json.decode((folder / "config.json").read_bytes())
        model = Autoencoder(AutoencoderConfig(**{**values, "prefixes": tuple(values["prefixes"])}))
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (TypeError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise ArtifactError(f"{folder / 'model.safetensors'} does not fit this version: {error}") from error
    return model.eval(), str(manifest["version"])
