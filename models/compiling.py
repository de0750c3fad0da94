"""Compile a model on shards, and compare with the same model, run eagerly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from models.zoo.model import Model
from torchhalo.parallel.arrays import shard
from torchhalo.parallel.parallelize import parallelize
from torchhalo.parallel.structures import tensors_in, whole
from torchhalo.torch_internals import redistribution, switch

BACKEND = "aot_eager"


def difference(model: Model, dims: tuple[int, ...], mesh_shape: tuple[int, ...] | None) -> float:
    """The largest difference between a step that is one compiled graph and an eager one, in outputs and gradients.

    Args:
        dims: Along which dim each axis of the mesh cuts the inputs.
        mesh_shape: None for one process, without torchhalo.
    """
    torch.manual_seed(0)
    net = model.make().double().train()
    given = [x if isinstance(x, torch.Tensor) else torch.randn(x, dtype=torch.float64) for x in model.inputs]
    inputs = [x.double() if x.is_floating_point() else x for x in given]
    if mesh_shape is not None:
        redistribution.silence_hints()
        switch.enable()
        mesh = init_device_mesh("cpu", mesh_shape)
        parallelize(net, mesh, dims=dims)
        inputs = [shard(x, mesh, dims) if x.ndim == inputs[0].ndim >= 3 else x for x in inputs]
    state = {name: value.detach().clone() for name, value in net.state_dict().items()}
    expected = _stepped(net, net, state, inputs)
    found = _stepped(net, torch.compile(net, backend=BACKEND, fullgraph=True), state, inputs)
    assert len(expected) == len(found)
    return max(_difference(a, b) for a, b in zip(expected, found, strict=True))


def _stepped(net: nn.Module, run: Any, state: dict[str, torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs and gradients of a step from ``state``."""
    net.load_state_dict(state)
    net.zero_grad()
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    torch.manual_seed(0)
    outputs = [output for output in tensors_in(run(*leaves)) if output.requires_grad]
    torch.stack([output.sin().square().sum() for output in outputs]).sum().backward()
    gradients = [x.grad for x in [*leaves, *net.parameters()] if x.grad is not None]
    return [whole(value).detach() for value in [*outputs, *gradients]]


def _difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Relative to the largest value, or to 1."""
    return float((expected - found).abs().max()) / max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
