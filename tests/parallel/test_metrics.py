"""Metrics of other libraries, given sharded predictions: those of one process, the same on every rank.

Labels are plain and whole, as a data loader gives them, or sharded. Nothing is asked for but `parallelize`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, mesh_of
from test_criteria import BINARY, GENERATOR, LABELS, LOGITS, ONE_HOT, YES, classes, whole
from torch import nn

import torchhalo

IMAGES = torch.randn(2, 2, 3, 33, 32, generator=GENERATOR).sigmoid()
SEGMENTED = F.one_hot(LOGITS.argmax(1), 3).movedim(-1, 1)
LARGE = torch.rand(2, 1, 1, 48, 44, generator=GENERATOR)
CHANCES, CORRECT = torch.rand(20, 3, generator=GENERATOR), classes(2, 20, 3)  # of samples
Metric = tuple[str, Callable[[], Any], torch.Tensor, torch.Tensor | None]


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
    for kind in (
        i.SpectralDistortionIndex,
        i.RelativeAverageSpectralError,
        i.RootMeanSquaredErrorUsingSlidingWindow,
        i.ErrorRelativeGlobalDimensionlessSynthesis,
    ):
        yield kind.__name__, lambda kind=kind: kind(sync_on_compute=False), first, second
    yield "TotalVariation", i.TotalVariation, first, None
    yield "PSNRB", lambda: i.PeakSignalNoiseRatioWithBlockedEffect(data_range=1.0), first[:, :1], second[:, :1]
    yield "VisualInformationFidelity", i.VisualInformationFidelity, *LARGE
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
        self.update, self.compute, self.kind = metric, metric.aggregate, type(metric).__name__


class Function:
    """A metric that computes at once, with the methods of the others."""

    def __init__(self, function: Callable[..., Any]):
        self._function, self._found, self.kind = function, None, type(function).__name__

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
    yield "average precision", lambda: Monai(m.AveragePrecisionMetric()), CHANCES, CORRECT
    yield "ROC", lambda: Monai(m.ROCAUCMetric()), CHANCES, CORRECT
    yield "calibration", lambda: Monai(m.CalibrationErrorMetric()), LOGITS.softmax(1), ONE_HOT
    yield "quality of labels", lambda: Function(m.LabelQualityScore()), LOGITS.softmax(1), ONE_HOT
    yield "variance", lambda: Function(m.VarianceMetric()), LOGITS, None
    yield "loss", lambda: Monai(m.LossMetric(nn.MSELoss())), first, second
    yield "MMD", lambda: Function(m.MMDMetric()), first[:, :1].double(), second[:, :1].double()
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


#: They read by lists of indices along the sharded dims; the last one has scales of a single pixel.
GATHERING = {"RelativeAverageSpectralError", "RootMeanSquaredErrorUsingSlidingWindow", "PSNRB", "VisualInformationFidelity"}


def check_metrics(library: str) -> list[float]:
    torchhalo.parallelize(nn.Conv2d(1, 1, 1), mesh_of((2,)))
    seen = []
    makers = {"torchmetrics": torchmetrics_metrics, "monai": monai_metrics, "smp": smp_metrics}
    for name, make, prediction, target in makers[library]():
        metric = make()
        metric.update(*([prediction] if target is None else [prediction, target]))
        expected = flat(metric.compute())
        dim = max(0, min(2, prediction.ndim - 2))
        sharded = None if target is None else torchhalo.shard(target, mesh_of((2,)), dim + target.ndim - prediction.ndim)
        for given in (target, sharded)[: 1 if target is None else 2]:
            metric = make()
            with nullcontext() if name in GATHERING else torchhalo.strict():
                metric.update(torchhalo.shard(prediction, mesh_of((2,)), dim), *([] if given is None else [given]))
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
    assert first and first == (second if DEVICE == "cpu" else pytest.approx(second, rel=1e-6))  # CUDA adds in any order


#: Those that no case above has, and why.
WEIGHTS, RANKINGS = "downloads weights", "of features of whole images, by SciPy"
UNTRIED = {
    "DeepImageStructureAndTextureSimilarity": WEIGHTS,
    "LearnedPerceptualImagePatchSimilarity": WEIGHTS,
    "MemorizationInformedFrechetInceptionDistance": WEIGHTS,
    "PerceptualPathLength": WEIGHTS,
    "QualityWithNoReference": "of three images of different sizes; made of SpectralDistortionIndex and SpatialDistortionIndex",
    "SpatialDistortionIndex": "of three images of different sizes",
    "HausdorffDistance": "an index error of its own, also in one process",
    "FIDMetric": RANKINGS,
    "EmbeddingCollapseMetric": "of features of whole images; returns a dict",
    "MetricsReloadedBinary": "of the package MetricsReloaded",
    "MetricsReloadedCategorical": "of the package MetricsReloaded",
}
#: They leave torch: see `check_leaving_torch`.
OF_SURFACES = ("HausdorffDistanceMetric", "SurfaceDiceMetric", "SurfaceDistanceMetric")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Metric .* will save all targets")
def test_every_metric_is_tried() -> None:
    import monai.metrics
    import torchmetrics.image
    import torchmetrics.segmentation

    made = [make() for cases in (torchmetrics_metrics, monai_metrics) for _, make, *_ in cases()]
    tried = {getattr(metric, "kind", type(metric).__name__) for metric in made}
    for library in (monai.metrics, torchmetrics.image, torchmetrics.segmentation):
        there = {name: each for name, each in vars(library).items() if isinstance(each, type)}
        kinds = {name for name in there if not name.startswith(("Cumulative", "Iteration")) and name != "Metric"}
        assert kinds - {"CalibrationReduction", "DiceHelper"} <= tried | UNTRIED.keys() | {*OF_SURFACES}


def check_leaving_torch() -> None:
    from monai import metrics
    from monai.data import MetaTensor
    from monai.utils import convert_to_numpy

    torchhalo.parallelize(nn.Conv2d(1, 1, 1), mesh_of((2,)))
    x = torchhalo.shard(LOGITS, mesh_of((2,)))
    with pytest.raises(TypeError, match=r"shape \(2, 3, 11, 8\); call `tensor.full_tensor\(\)`"):
        x.numpy()
    with pytest.raises(TypeError, match=r"metrics of surfaces and rankings need that"):
        convert_to_numpy(x)
    segmented = torchhalo.shard(SEGMENTED, mesh_of((2,)))
    for name in OF_SURFACES:
        metric = getattr(metrics, name)(**({"class_thresholds": [1.0, 1.0]} if name == "SurfaceDiceMetric" else {}))
        for labels in (ONE_HOT, torchhalo.shard(ONE_HOT, mesh_of((2,)))):
            with pytest.raises(TypeError, match=r"each rank has a part of this tensor .* call `tensor\.full_tensor\(\)` first"):
                metric(segmented, labels)
    assert x.full_tensor().numpy(force=True).shape == (2, 3, 11, 8)
    assert x.amax().numpy(force=True) == LOGITS.numpy(force=True).max()
    number = MetaTensor(x.amax())
    assert type(number) is MetaTensor and number == LOGITS.max()


def test_what_leaves_torch_is_what_all_ranks_have(pool) -> None:
    pool(2).run(check_leaving_torch)
