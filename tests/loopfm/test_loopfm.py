from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from kernels.quantize import dequantize_int4
from loopfm.augment import Augmented
from loopfm.autoencoder import AutoencoderConfig, fit_autoencoder, load_autoencoder, save_autoencoder
from loopfm.distill import DistillConfig, distillation_loss, scale_gradient
from streams.artifact import ArtifactError


def low_rank(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(2_000, 6)) @ rng.normal(size=(6, 24)) + 0.05 * rng.normal(size=(2_000, 24))).astype(
        np.float32
    )


def test_longer_prefixes_explain_more_and_enough(tmp_path: Path) -> None:
    data = low_rank()
    model = fit_autoencoder(data, AutoencoderConfig(24, z_dim=8, prefixes=(2, 4)))
    left = model.unexplained(torch.from_numpy(data))
    assert left == sorted(left, reverse=True)
    assert left[-1] < 0.2 < left[0]
    z = model.encode(torch.from_numpy(data))
    assert z.abs().max() < 1
    version = save_autoencoder(tmp_path / "ae", model)
    again, found = load_autoencoder(tmp_path / "ae")
    assert found == version
    assert torch.equal(again.encode(torch.from_numpy(data)), z)


def test_the_same_data_give_the_same_autoencoder_whatever_ran_before() -> None:
    config = AutoencoderConfig(24, z_dim=8, prefixes=(2,), steps=20)
    one = fit_autoencoder(low_rank(), config)
    torch.rand(7)
    two = fit_autoencoder(low_rank(), config)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_no_gradient_reaches_the_foundation_model() -> None:
    embedding = torch.randn(16, 24, requires_grad=True)
    model = fit_autoencoder(low_rank(), AutoencoderConfig(24, z_dim=8, prefixes=(2,), steps=1)).train()
    model.loss(embedding).backward()
    assert embedding.grad is None
    assert model.encoder.weight.grad is not None


def test_bad_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prefixes"):
        AutoencoderConfig(24, z_dim=8, prefixes=(8,))
    for bad in (np.zeros((0, 24), np.float32), np.zeros((3, 23), np.float32)):
        with pytest.raises(ValueError, match="embeddings must be"):
            fit_autoencoder(bad, AutoencoderConfig(24))
    with pytest.raises(ArtifactError, match="missing"):
        load_autoencoder(tmp_path)


def test_int4_codes_stand_for_z() -> None:
    data = torch.from_numpy(low_rank())
    model = fit_autoencoder(low_rank(), AutoencoderConfig(24, z_dim=8, prefixes=(2,)))
    codes, z = model.encode_int4(data), model.encode(data)
    assert codes.dtype == torch.int8
    assert len(codes.unique()) == 16, "all levels must be in use, else the test shows little"
    error = (dequantize_int4(codes) - z).abs()
    assert (error[z <= 15 / 16] <= 1 / 16).all()
    plain, coarse = model.decode(z)[-1], model.decode(dequantize_int4(codes))[-1]
    target = (data - model.mean) / model.spread
    assert (target - coarse).square().mean() < (target - plain).square().mean() + 0.05


def batch() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    serving, auxiliary = (torch.randn(10, 2, generator=generator, requires_grad=True) for _ in range(2))
    labels, teacher = (torch.rand(10, 2, generator=generator).round(), torch.rand(10, 2, generator=generator))
    return serving, auxiliary, labels, teacher, torch.arange(10) % 2 == 0


def test_the_teacher_never_touches_the_serving_head() -> None:
    serving, auxiliary, labels, teacher, has = batch()
    gradients = []
    for target in (teacher, 1 - teacher):
        serving.grad = auxiliary.grad = None
        distillation_loss(serving, auxiliary, labels, target, has, DistillConfig(weight=3.0)).backward()
        gradients.append((serving.grad.clone(), auxiliary.grad.clone()))
    plain = torch.autograd.grad(F.binary_cross_entropy_with_logits(serving, labels), serving)[0]
    assert torch.allclose(gradients[0][0], plain)
    assert torch.allclose(gradients[1][0], plain)
    assert not torch.allclose(gradients[0][1], gradients[1][1])
    assert not gradients[0][1][~has].any(), "examples without a teacher teach nothing"


def test_without_a_teacher_the_loss_is_the_task() -> None:
    serving, auxiliary, labels, teacher, has = batch()
    found = distillation_loss(serving, auxiliary, labels, teacher, torch.zeros_like(has), DistillConfig())
    assert torch.equal(found, F.binary_cross_entropy_with_logits(serving, labels))


def test_label_scale_is_clipped_and_gradient_scale_scales() -> None:
    serving, auxiliary, labels, teacher, has = batch()
    one = distillation_loss(serving, auxiliary, labels, teacher, has, DistillConfig(label_scale=100.0))
    ones = distillation_loss(serving, auxiliary, labels, torch.ones_like(teacher), has, DistillConfig())
    assert torch.allclose(one, ones), "a label may not exceed 1, however it is scaled"
    x = torch.ones(3, requires_grad=True)
    (scale_gradient(x, 0.25) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad.tolist() == [0.25, 0.5, 0.75]


def test_augmented_tables_survive_the_disk_and_refuse_mixed_versions(tmp_path: Path) -> None:
    def table(version: int) -> Augmented:
        return Augmented(np.arange(3), np.ones((3, 2), np.float32) * version, np.eye(3, 4, dtype=np.float32), version)

    table(7).write(tmp_path / "a.parquet")
    again = Augmented.read(tmp_path / "a.parquet")
    assert again.version == 7
    assert np.array_equal(again.z, np.eye(3, 4))
    assert np.array_equal(again.logits, np.full((3, 2), 7))
    import polars as pl

    table(8).write(tmp_path / "b.parquet")
    pl.concat([pl.read_parquet(tmp_path / f"{name}.parquet") for name in "ab"]).write_parquet(tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="2 FM versions"):
        Augmented.read(tmp_path / "c.parquet")
    pl.DataFrame({"x": [1]}).write_parquet(tmp_path / "d.parquet")
    with pytest.raises(ValueError, match="no augmented table"):
        Augmented.read(tmp_path / "d.parquet")
