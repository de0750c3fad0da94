"""Losses and metrics of other libraries, called outside of a model with sharded predictions: as in one process.

Labels are plain and whole, as a data loader gives them, or sharded. Nothing is asked for but `parallelize`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

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
        distances = torch.tensor([[0, 1, 1], [1, 0, 0.5], [1, 0.5, 0]]).numpy()
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
            found = loss(y, *given)
            backward(found)
            try:
                torch.testing.assert_close(whole(found), expected, rtol=0, atol=tolerance * max(1, expected.abs().max().item()))
                torch.testing.assert_close(whole(y.grad), x.grad, rtol=0, atol=tolerance * max(1, x.grad.abs().max().item()))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            count += 1
    return count


#: Those that no case above has, and why.
UNTRIED = {
    "BoundaryLoss": "distances by SciPy",
    "HausdorffDTLoss": "distances by SciPy",
    "LogHausdorffDTLoss": "distances by SciPy",
    "PerceptualLoss": "downloads weights",
}


def test_every_loss_is_tried() -> None:
    import monai.losses
    import segmentation_models_pytorch.losses as smp

    tried = {name.split(" ")[0] for cases in (monai_losses, smp_losses) for name, *_ in cases()}
    for library in (monai.losses, smp):
        there = {each.__name__ for each in vars(library).values() if isinstance(each, type) and issubclass(each, nn.Module)}
        assert there <= tried | UNTRIED.keys()


@pytest.mark.slow
@pytest.mark.parametrize("library, count", [("monai", 90), ("smp", 50)])
def test_losses(pool, library: str, count: int) -> None:
    assert pool(2).run(check_losses, library) == [count] * 2


IMAGES = torch.randn(2, 2, 3, 33, 32, generator=GENERATOR).sigmoid()
SEGMENTED = F.one_hot(LOGITS.argmax(1), 3).movedim(-1, 1)
Metric = tuple[str, Callable[[], Any], torch.Tensor, torch.Tensor]


def torchmetrics_metrics() -> Iterator[Metric]:
    from torchmetrics import classification as c
    from torchmetrics import image as i
    from torchmetrics import segmentation as s

    first, second = IMAGES
    scores, labels, chances, yes = LOGITS.float(), LABELS[:, 0], BINARY[:, 0].sigmoid().float(), YES[:, 0]
    yield "PSNR", lambda: i.PeakSignalNoiseRatio(data_range=1.0), first, second
    yield "SSIM", lambda: i.StructuralSimilarityIndexMeasure(data_range=1.0), first, second
    for kind in (i.UniversalImageQualityIndex, i.SpectralAngleMapper, i.SpatialCorrelationCoefficient):
        yield kind.__name__, kind, first, second
    scales = {"kernel_size": 3, "betas": (0.5, 0.5), "data_range": 1.0}
    yield "MS-SSIM", lambda: i.MultiScaleStructuralSimilarityIndexMeasure(**scales), first, second
    for kind in (i.SpectralDistortionIndex, i.RelativeAverageSpectralError, i.RootMeanSquaredErrorUsingSlidingWindow):
        yield kind.__name__, kind, first, second
    for average in ("macro", "micro", "none", "weighted"):
        yield f"F1 {average}", lambda average=average: c.MulticlassF1Score(3, average=average), scores, labels
    yield "F1 ignoring", lambda: c.MulticlassF1Score(3, ignore_index=1), scores, labels
    yield "accuracy of two", lambda: c.MulticlassAccuracy(3, top_k=2), scores, labels
    yield "accuracy of samples", lambda: c.MulticlassAccuracy(3, multidim_average="samplewise"), scores, labels
    yield "IoU", lambda: c.MulticlassJaccardIndex(3), scores, labels
    yield "IoU ignoring", lambda: c.MulticlassJaccardIndex(3, ignore_index=0), scores, labels
    yield "confusion", lambda: c.MulticlassConfusionMatrix(3, sync_on_compute=False), scores, labels
    yield "binary F1", lambda: c.BinaryF1Score(ignore_index=0), chances, yes
    yield "binary IoU", c.BinaryJaccardIndex, chances, yes
    yield "AUROC", lambda: c.BinaryAUROC(thresholds=20), chances, yes
    yield "precision", lambda: c.MulticlassAveragePrecision(3), scores, labels
    yield "calibration", c.BinaryCalibrationError, chances, yes
    yield "Dice", lambda: s.DiceScore(3), SEGMENTED, ONE_HOT
    yield "Dice of indices", lambda: s.DiceScore(3, input_format="index"), LOGITS.argmax(1), labels
    yield "mean IoU", lambda: s.MeanIoU(3), SEGMENTED, ONE_HOT
    yield "generalized Dice", lambda: s.GeneralizedDiceScore(3), SEGMENTED, ONE_HOT


class Monai:
    """A metric of MONAI with the methods of the others."""

    def __init__(self, metric: Any):
        self.update, self.compute = metric, metric.aggregate


class Function:
    def __init__(self, function: Callable[..., Any]):
        self._function, self._found = function, None

    def update(self, *tensors: torch.Tensor) -> None:
        self._found = self._function(*tensors)

    def compute(self) -> Any:
        return self._found


def monai_metrics() -> Iterator[Metric]:
    from monai import metrics as m

    first, second = IMAGES
    for name, settings in (
        ("DiceMetric", {}),
        ("DiceMetric", {"include_background": False, "reduction": "mean_batch"}),
        ("MeanIoU", {}),
        ("GeneralizedDiceScore", {}),
        ("ConfusionMatrixMetric", {"metric_name": "f1 score"}),
        ("FBetaScore", {}),
    ):
        make = lambda name=name, settings=settings: Monai(getattr(m, name)(**settings))  # noqa: E731
        yield f"{name} {settings}", make, SEGMENTED, ONE_HOT
    for name, settings in (
        ("MSEMetric", {}),
        ("RMSEMetric", {}),
        ("MAPEMetric", {}),
        ("MultiScaleSSIMMetric", {"spatial_dims": 2, "kernel_size": 3, "weights": (0.5, 0.5)}),
        ("PSNRMetric", {"max_val": 1}),
        ("SSIMMetric", {"spatial_dims": 2, "win_size": 5}),
        ("MAEMetric", {}),
    ):
        yield name, lambda name=name, settings=settings: Monai(getattr(m, name)(**settings)), first, second
    panoptic = classes(2, 1, 2, 11, 8)
    yield "AbsoluteVolumeDifferenceMetric", lambda: Monai(m.AbsoluteVolumeDifferenceMetric()), SEGMENTED, ONE_HOT
    yield "panoptic quality", lambda: Monai(m.PanopticQualityMetric(num_classes=2)), panoptic, panoptic
    yield "compute_dice", lambda: Function(m.compute_dice), SEGMENTED, ONE_HOT
    yield "compute_iou", lambda: Function(m.compute_iou), SEGMENTED, ONE_HOT


def smp_metrics() -> Iterator[Metric]:
    from segmentation_models_pytorch import metrics as s

    def score(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return s.iou_score(*s.get_stats(prediction, target, mode="multiclass", num_classes=3), reduction="micro")

    yield "IoU", lambda: Function(score), LOGITS.argmax(1), LABELS[:, 0]


def flat(value: Any) -> torch.Tensor:
    if isinstance(value, (list, tuple)):
        return torch.cat([flat(each) for each in value])
    return whole(value).double().flatten()


def check_metrics(library: str) -> list[float]:
    torchhalo.parallelize(nn.Conv2d(1, 1, 1), mesh_of((2,)))
    seen = []
    makers = {"torchmetrics": torchmetrics_metrics, "monai": monai_metrics, "smp": smp_metrics}
    for name, make, prediction, target in makers[library]():
        metric = make()
        metric.update(prediction, target)
        expected = flat(metric.compute())
        dim = 2 if prediction.ndim > 3 else 1
        for given in (target, torchhalo.shard(target, mesh_of((2,)), dim + target.ndim - prediction.ndim)):
            metric = make()
            metric.update(torchhalo.shard(prediction, mesh_of((2,)), dim), given)
            found = flat(metric.compute())
            try:  # float32
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            seen += [0.0 if math.isnan(number) else number for number in found.tolist()]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torchmetrics", "monai", "smp"])
def test_metrics(pool, library: str) -> None:
    """The same on every rank, too."""
    first, second = pool(2).run(check_metrics, library)
    assert first == second and first


def check_leaving_torch() -> None:
    from monai.utils import convert_to_numpy

    torchhalo.parallelize(nn.Conv2d(1, 1, 1), mesh_of((2,)))
    x = torchhalo.shard(LOGITS, mesh_of((2,)))
    with pytest.raises(TypeError, match=r"shape \(2, 3, 11, 8\); call `tensor.full_tensor\(\)`"):
        x.numpy()
    with pytest.raises(TypeError, match=r"metrics of surfaces and rankings need that"):
        convert_to_numpy(x)  # as MONAI's Hausdorff and surface distances do
    assert x.full_tensor().numpy(force=True).shape == (2, 3, 11, 8)
    assert x.amax().numpy(force=True) == LOGITS.numpy(force=True).max()


def test_numpy_is_given_what_all_ranks_have(pool) -> None:
    pool(2).run(check_leaving_torch)
