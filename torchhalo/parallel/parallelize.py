"""A model made ready for sharded inputs: parameters replicated, inputs cut, nothing of the model itself changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from torchhalo.parallel.edges import Edges, Inputs, Outputs, edges_of, replace_tensors
from torchhalo.parallel.structures import whole
from torchhalo.torch_internals import switch


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dims: int | Sequence[int] | None = None,
    inputs: Inputs = "whole",
    outputs: Outputs = "sharded",
    methods: Sequence[str] = (),
) -> nn.Module:
    """Make ``model`` run on inputs that are sharded in space over ``mesh``.

    Parameters and buffers become DTensors, replicated over the mesh with the values of its first rank; make the optimizer
    afterwards. Their gradients are summed over the mesh once per backward, many in one collective, while it goes on: when
    ``backward()`` returns they are replicated too; `no_sync` puts that off. Parameters that ``fully_shard`` or
    `DistributedDataParallel` keeps, if called before, are left to it.

    The keys of ``state_dict`` stay, and checkpoints of the plain model load as before; `plain_state_dict` gives one to save. A
    plain tensor given to the model is sharded if it has three or more dims and as many as the first tensor that the model is
    given; a DTensor is taken as it is. Plain tensors that the model makes for itself count as replicated. The call enables
    torchhalo. A model that is parallelized already, with the same settings, is returned as it is.

    Args:
        model: Changed in place.
        mesh: The ranks that share a sample. Of a larger mesh, the sub-mesh: ``mesh["space"]``.
        dims: Along which dim each axis of the mesh cuts the inputs. If not given: the first spatial dim (2), or, on a mesh of
            several axes, as many of the largest.
        inputs: Whether plain inputs are whole, the same on every rank, or only this rank's shard, cut as `torch.chunk` cuts.
        outputs: Whether outputs stay sharded, or come back as whole plain tensors, in dataclasses and distributions too.
        methods: What of the model is called in the same way as the model itself, beside its ``encode`` and ``decode``.

    Returns:
        The model.

    Example:
        >>> model = torchhalo.parallelize(model, init_device_mesh("cuda", (4,)))  # doctest: +SKIP
        >>> loss = F.cross_entropy(model(image), torchhalo.shard(labels, mesh, dims=1))  # doctest: +SKIP
    """
    switch.enable()
    edges = Edges(mesh, dims, inputs, outputs, methods)
    present = edges_of(model)
    if present is not None:
        if present.settings != edges.settings:
            raise ValueError(
                f"parallelize: the model is parallelized already, with {present}; asked for {edges}. "
                "Call torchhalo.unparallelize(model) first"
            )
        return model
    edges.attach(model)
    return model


def unparallelize(model: nn.Module) -> nn.Module:
    """Undo `parallelize`: parameters and buffers are plain tensors again, with their present values.

    Example:
        >>> torchhalo.unparallelize(model)  # doctest: +SKIP
    """
    edges = edges_of(model)
    if edges is not None:
        edges.detach(model)
        replace_tensors(model, whole)
    return model


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, gradients of a parallelized model gather on each rank; the next backward outside sums them over the mesh.

    For gradient accumulation: one reduction for several backwards. Until that backward, ``grad`` holds partial sums. Where DDP
    or FSDP keeps the parameters, use its own way.

    Example:
        >>> with torchhalo.no_sync(model):  # doctest: +SKIP
        ...     loss(model(first)).backward()
        >>> loss(model(second)).backward()  # doctest: +SKIP
    """
    found = [edges for module in model.modules() if (edges := edges_of(module)) is not None]
    if not found or any(edges.wrapped for edges in found):
        reason = "DDP or FSDP keeps its parameters: use its own way" if found else "call torchhalo.parallelize first"
        raise ValueError(f"no_sync: torchhalo does not reduce the gradients of this model; {reason}")
    before = [edges.reducer.on for edges in found]
    for edges in found:
        edges.reducer.on = False
    try:
        yield
    finally:
        for edges, on in zip(found, before, strict=True):
            edges.reducer.on = on


def plain_state_dict(model: nn.Module) -> dict[str, Any]:
    """The ``state_dict`` of the plain model: the same keys, with plain tensors, the same on every rank.

    Example:
        >>> torch.save(torchhalo.plain_state_dict(model), "checkpoint.pt")  # doctest: +SKIP
    """
    return {key: whole(value) if isinstance(value, torch.Tensor) else value for key, value in model.state_dict().items()}


class SpatialParallel(ParallelStyle):
    """`parallelize` as a style for torch's ``parallelize_module``, of a model or of some of its modules.

    Args:
        dims, inputs, outputs, methods: As for `parallelize`.

    Example:
        >>> parallelize_module(model, mesh, {"encoder": SpatialParallel(dims=3)})  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        dims: int | Sequence[int] | None = None,
        inputs: Inputs = "whole",
        outputs: Outputs = "sharded",
        methods: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.dims, self.inputs, self.outputs, self.methods = dims, inputs, outputs, methods

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        settings = {"dims": self.dims, "inputs": self.inputs, "outputs": self.outputs, "methods": self.methods}
        return parallelize(module, device_mesh, **settings)  # type: ignore[arg-type]
