"""Losses of other libraries, called outside of a model with sharded predictions: values and gradients of one process.

Labels are plain and whole, as a data loader gives them, or sharded. Nothing is asked for but `parallelize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor

import torchhalo

GENERATOR = torch.Generator().manual_seed(0)


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def classes(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(limit, shape, generator=GENERATOR)


LOGITS, OTHER, BINARY = values(2, 3, 11, 8), values(2, 3, 11, 8), values(2, 1, 11, 8)
LABELS, YES = classes(3, 2, 1, 11, 8), classes(2, 2, 1, 11, 8)
ONE_HOT = F.one_hot(LABELS[:, 0], 3).movedim(-1, 1)
FEATURES = values(2, 6, 4)  # of samples
BOXES = torch.cat([values(2, 6, 2).sigmoid(), 1 + values(2, 6, 2).sigmoid()], 2)
VOLUME, VOLUME_LABELS = values(1, 2, 9, 6, 7), classes(2, 1, 1, 9, 6, 7)

Case = tuple[str, Callable[..., torch.Tensor], torch.Tensor, list[torch.Tensor]]


def monai_losses() -> Iterator[Case]:
    from monai import losses as m

    hot: dict[str, Any] = {"to_onehot_y": True, "softmax": True}
    for kind in (m.DiceLoss, m.DiceCELoss, m.DiceFocalLoss, m.GeneralizedDiceLoss, m.GeneralizedDiceFocalLoss, m.TverskyLoss):
        yield kind.__name__, kind(**hot), LOGITS, [LABELS]
        yield f"{kind.__name__} of a volume", kind(**hot), VOLUME, [VOLUME_LABELS]
    for settings in (
        {"include_background": False},
        {"jaccard": True},
        {"batch": True},
        {"reduction": "none"},
        {"squared_pred": True},
        {"weight": [0.2, 0.5, 0.3]},
    ):
        yield f"DiceLoss {settings}", m.DiceLoss(**hot, **settings), LOGITS, [LABELS]
    yield "DiceLoss sigmoid", m.DiceLoss(sigmoid=True), BINARY, [YES]
    yield "FocalLoss", m.FocalLoss(to_onehot_y=True), LOGITS, [LABELS]
    yield (
        "FocalLoss softmax",
        m.FocalLoss(to_onehot_y=True, use_softmax=True, alpha=0.3, weight=[0.1, 0.2, 0.3]),
        LOGITS,
        [LABELS],
    )
    yield "MaskedDiceLoss", m.MaskedDiceLoss(**hot), LOGITS, [LABELS, YES.double()]
    yield "SoftclDiceLoss", m.SoftclDiceLoss(), LOGITS.softmax(1), [ONE_HOT.double()]
    yield "SoftDiceclDiceLoss", m.SoftDiceclDiceLoss(), LOGITS.softmax(1), [ONE_HOT.double()]
    yield "AsymmetricUnifiedFocalLoss", m.AsymmetricUnifiedFocalLoss(to_onehot_y=True), LOGITS[:, :2].sigmoid(), [YES]
    for distance in ("l1", "l2"):
        yield f"NACLLoss {distance}", m.NACLLoss(classes=3, dim=2, distance_type=distance), LOGITS, [LABELS[:, 0]]
    for mode in ("default", "GDL"):
        distances = np.array([[0, 1, 1], [1, 0, 0.5], [1, 0.5, 0]], np.float32)
        yield (
            f"GeneralizedWassersteinDiceLoss {mode}",
            m.GeneralizedWassersteinDiceLoss(distances, weighting_mode=mode),
            LOGITS,
            [LABELS],
        )
    yield "SSIMLoss", m.SSIMLoss(spatial_dims=2, win_size=5), LOGITS, [OTHER]
    for kernel in ("rectangular", "gaussian"):
        loss = m.LocalNormalizedCrossCorrelationLoss(spatial_dims=2, kernel_size=3, kernel_type=kernel)
        yield f"LocalNormalizedCrossCorrelationLoss {kernel}", loss, LOGITS, [OTHER]
    for kernel in ("gaussian", "b-spline"):
        loss = m.GlobalMutualInformationLoss(num_bins=8, kernel_type=kernel)
        yield f"GlobalMutualInformationLoss {kernel}", loss, LOGITS.sigmoid(), [OTHER.sigmoid()]
    yield "BendingEnergyLoss", m.BendingEnergyLoss(), LOGITS[:, :2], []
    yield "DiffusionLoss", m.DiffusionLoss(normalize=True), LOGITS[:, :2], []
    yield "MultiScaleLoss", m.MultiScaleLoss(nn.MSELoss(), scales=[0, 1]), VOLUME[:, :1], [VOLUME[:, 1:]]
    yield "DeepSupervisionLoss", m.DeepSupervisionLoss(m.DiceLoss(**hot)), LOGITS, [LABELS]
    yield "MaskedLoss", m.MaskedLoss(nn.MSELoss), LOGITS, [OTHER, YES.double()]
    yield "AUCMLoss", m.AUCMLoss(), BINARY, [YES.double()]
    for kind in (m.BarlowTwinsLoss, m.ContrastiveLoss):
        yield kind.__name__, kind(), FEATURES[0], [FEATURES[1]]
    yield "BoxGIoULoss", m.BoxGIoULoss(), BOXES[0], [BOXES[1]]
    risk, noise = m.SURELoss(perturb_noise=OTHER[:, :1], eps=0.1), lambda x: 0.5 * x + 0.1 * x.square()
    yield "SURELoss", lambda x: risk(noise, x, noise(x)), BINARY, []
    yield "JukeboxLoss", m.JukeboxLoss(spatial_dims=2), LOGITS, [OTHER]
    for criterion in ("least_squares", "bce", "hinge"):
        adversary = m.PatchAdversarialLoss(criterion=criterion)
        yield (
            f"PatchAdversarialLoss {criterion}",
            lambda x, a=adversary: a(x, target_is_real=True, for_discriminator=True),
            LOGITS,
            [],
        )
    torch.manual_seed(0)
    perceptual = m.PerceptualLoss(spatial_dims=2, network_type="resnet50", pretrained=False).double()
    # It writes to what it is given.
    yield "PerceptualLoss", lambda x, y: perceptual(x * 1, y * 1), LOGITS, [OTHER]


def smp_losses() -> Iterator[Case]:
    from segmentation_models_pytorch import losses as s
    from torchvision.ops import sigmoid_focal_loss

    given = {"binary": (BINARY, YES), "multiclass": (LOGITS, LABELS[:, 0]), "multilabel": (LOGITS, ONE_HOT)}
    for mode, (prediction, target) in given.items():
        for kind in (s.DiceLoss, s.JaccardLoss, s.TverskyLoss, s.FocalLoss):
            yield f"{kind.__name__} {mode}", kind(mode), prediction, [target]
    yield "DiceLoss ignoring", s.DiceLoss("multiclass", log_loss=True, ignore_index=1, smooth=1.0), LOGITS, [LABELS[:, 0]]
    yield "DiceLoss of classes", s.DiceLoss("multiclass", classes=[0, 2]), LOGITS, [LABELS[:, 0]]
    focal = s.FocalLoss("multiclass", ignore_index=1, alpha=0.3, normalized=True)
    yield "FocalLoss ignoring", focal, LOGITS, [LABELS[:, 0]]
    yield "FocalLoss ignoring binary", s.FocalLoss("binary", ignore_index=1, reduced_threshold=0.5), BINARY, [YES]
    yield "LovaszLoss binary", s.LovaszLoss("binary"), BINARY.float(), [YES]
    for settings in ({}, {"per_image": True, "ignore_index": 1}):
        lovasz = s.LovaszLoss("multiclass", **settings)
        yield f"LovaszLoss {settings}", lovasz, LOGITS.float().softmax(1), [LABELS[:, 0]]
    yield "MCCLoss", s.MCCLoss(), BINARY, [YES.double()]
    yield "SoftBCEWithLogitsLoss", s.SoftBCEWithLogitsLoss(ignore_index=1, smooth_factor=0.1), BINARY, [YES.double()]
    yield "SoftCrossEntropyLoss", s.SoftCrossEntropyLoss(smooth_factor=0.1, ignore_index=1), LOGITS, [LABELS[:, 0]]
    for reduction in ("mean", "sum", "none"):
        loss = lambda x, t, r=reduction: sigmoid_focal_loss(x, t, reduction=r)  # noqa: E731
        yield f"sigmoid_focal_loss {reduction}", loss, LOGITS, [ONE_HOT.double()]


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)


def backward(value: torch.Tensor) -> None:
    """Of a sum in which no two elements weigh the same."""
    weights = torch.arange(1.0, value.numel() + 1, dtype=value.dtype).view(value.shape)
    (value * weights).sum().backward()


def cut(prediction: torch.Tensor) -> int:
    """The dim that is sharded."""
    return 2 if prediction.ndim > 2 else 0


def both(tensors: list[torch.Tensor], prediction: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Plain and whole, and sharded as a prediction is."""
    yield tensors
    if tensors:
        yield [torchhalo.shard(x, mesh_of((2,)), cut(prediction) - prediction.ndim + x.ndim) for x in tensors]


#: The sums of a histogram beside a plain whole target, and features of a single pixel.
GATHERING = ("GlobalMutualInformationLoss", "PerceptualLoss")


def check_losses(library: str) -> int:
    torchhalo.parallelize(nn.Conv2d(1, 1, 1), mesh_of((2,)))  # any model: from now on plain tensors mix on its mesh
    count = 0
    for name, loss, prediction, targets in {"monai": monai_losses, "smp": smp_losses}[library]():
        x = prediction.clone().requires_grad_()
        expected = loss(x, *targets)
        backward(expected)
        # Some compute in float32 inside.
        tolerance = (
            1e-6 if expected.dtype == torch.float32 or any(part in name for part in ("Focal", "Mutual", "GIoU")) else 1e-9
        )
        for given in both(targets, prediction):
            y = torchhalo.shard(prediction, mesh_of((2,)), cut(prediction)).requires_grad_()
            with nullcontext() if name.startswith(GATHERING) else torchhalo.strict():
                found = loss(y, *given)
                backward(found)
            try:
                torch.testing.assert_close(whole(found), expected, rtol=0, atol=tolerance * max(1, expected.abs().max().item()))
                torch.testing.assert_close(whole(y.grad), x.grad, rtol=0, atol=tolerance * max(1, x.grad.abs().max().item()))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            count += 1
    return count


#: Those that leave torch for SciPy, and so want whole tensors.
OF_DISTANCES = ("BoundaryLoss", "HausdorffDTLoss", "LogHausdorffDTLoss")


@pytest.mark.slow
def test_every_loss_is_tried() -> None:
    import monai.losses
    import segmentation_models_pytorch.losses as smp

    tried = {name.split(" ")[0] for cases in (monai_losses, smp_losses) for name, *_ in cases()}
    for library in (monai.losses, smp):
        there = {each.__name__ for each in vars(library).values() if isinstance(each, type) and issubclass(each, nn.Module)}
        assert there <= tried | {*OF_DISTANCES}


@pytest.mark.slow
@pytest.mark.parametrize("library, count", [("monai", 92), ("smp", 50)])
def test_losses(pool, library: str, count: int) -> None:
    assert pool(2).run(check_losses, library) == [count] * 2


def distance_transform_edt(mask: np.ndarray, distances: np.ndarray, **settings: object) -> None:
    """SciPy's, by brute force: how far it is from each pixel to the next one that is not in the mask."""
    places = np.stack(np.nonzero(np.ones_like(mask)), 1).astype(float)
    outside = np.stack(np.nonzero(mask == 0), 1)
    away = np.sqrt(((places[:, None] - outside[None]) ** 2).sum(-1)).min(1) if len(outside) else np.zeros(mask.size)
    distances[...] = away.reshape(mask.shape)


def check_distances() -> None:
    """A clear error, and with the gather that it names, the loss and the gradient of one process."""
    from monai import losses
    from monai.transforms import utils

    mesh, ndimage = mesh_of((2,)), SimpleNamespace(distance_transform_edt=distance_transform_edt)
    torchhalo.parallelize(nn.Conv2d(1, 1, 1), mesh)
    with mock.patch.multiple(utils, ndimage=ndimage, has_ndimage=True):
        for name in OF_DISTANCES:
            loss, boundary = getattr(losses, name)(softmax=True, to_onehot_y=True), name == "BoundaryLoss"
            x, y = LOGITS.clone().requires_grad_(), torchhalo.shard(LOGITS, mesh).requires_grad_()
            expected = loss(x, LABELS)
            expected.backward()
            for labels in (LABELS, torchhalo.shard(LABELS, mesh)):
                if boundary and labels is LABELS:  # of which alone it wants distances
                    found = loss(y, labels)
                else:
                    with pytest.raises(TypeError, match=r"call `tensor\.full_tensor\(\)` first"):
                        loss(y, labels)
                    found = loss(y.full_tensor(), LABELS)
                y.grad = None
                found.backward()
                torch.testing.assert_close(whole(found), expected.detach(), rtol=0, atol=1e-6, msg=name)  # float32
                torch.testing.assert_close(whole(y.grad), x.grad, rtol=0, atol=1e-6, msg=name)


@pytest.mark.slow
def test_losses_of_distances_say_what_to_do(pool) -> None:
    pool(2).run(check_distances)
