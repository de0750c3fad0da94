"""Interpolation: along each dim an output is a weighted sum of few inputs, its taps.

Plain torch's own kernel does the work wherever it can: along dims that are not sharded, and along sharded ones that grow by a
whole ratio, where a part of the input gives a part of the output. Along the others each tap is one weighted index_select, whose
adjoint is an index_add.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard

from torchhalo.exchange.memory import formatted, memory_format
from torchhalo.exchange.task import Task
from torchhalo.exchange.windowed import adjoint, forward
from torchhalo.ops.taps import Taps, counting
from torchhalo.torch_internals import dtensors, fake_tensors, handlers
from torchhalo.torch_internals.constants import constant

aten = torch.ops.aten


class _Kind(NamedTuple):
    """A kind of interpolation and its aten ops."""

    mode: str
    op: handlers.Op
    backward: handlers.Op

    @property
    def nearest(self) -> bool:
        return self.mode.startswith("nearest")


def _kinds() -> list[_Kind]:
    """The kinds that this torch has."""
    names = {f"upsample_nearest{n}d": "nearest" for n in (1, 2, 3)}
    names |= {f"_upsample_nearest_exact{n}d": "nearest_exact" for n in (1, 2, 3)}
    names |= {"upsample_linear1d": "linear", "upsample_bilinear2d": "linear", "upsample_trilinear3d": "linear"}
    names |= {"upsample_bicubic2d": "cubic"}
    names |= {f"_upsample_{mode}2d_aa": f"{mode}_aa" for mode in ("bilinear", "bicubic", "lanczos")}
    return [
        _Kind(mode, getattr(aten, name).default, getattr(aten, f"{name}_backward").default)
        for name, mode in names.items()
        if hasattr(aten, name)  # lanczos is younger than the others
    ]


KINDS = _kinds()
BY_OP = {op: kind for kind in KINDS for op in (kind.op, kind.backward)}


class _Call(NamedTuple):
    """One interpolation: the taps of each spatial dim, and ``align_corners`` and the scale factors as the op takes them."""

    kind: _Kind
    relations: dict[int, Taps]
    corners: tuple[bool, ...]
    scales: tuple[float | None, ...]

    @classmethod
    def of(
        cls,
        kind: _Kind,
        inputs: Sequence[int],
        outputs: Sequence[int],
        rest: Sequence[Any],
        single: bool,
        plain: bool,
        on_cpu: bool,
    ) -> _Call:
        corners, scales = tuple(rest[: -len(outputs)]), tuple(rest[-len(outputs) :])
        counted = counting(kind.mode, inputs, outputs, scales, plain, on_cpu)
        sizes = enumerate(zip(map(int, inputs), map(int, outputs), counted, strict=True), start=2)
        relations = {dim: Taps(n, m, kind.mode, any(corners), scale, single, plain) for dim, (n, m, scale) in sizes}
        return cls(kind, relations, corners, scales)

    def tapped(self, dims: Sequence[int]) -> list[int]:
        """The dims along which plain torch's kernel cannot do a part of the work as it does the whole; ``dims`` are sharded.

        Nearest modes are among these also where they are not sharded: which input is the nearest may depend on the size of
        the tensor, as torch's kernels round in different ways. So are sizes that stay while the scale factor says otherwise:
        whether it counts may depend on the other sizes.
        """
        found = self.relations.items()
        by_taps = [*dims, *(dim for dim, taps in found if taps.nearest or taps.inputs == taps.outputs)]
        return [dim for dim, taps in found if taps.ratio is None and dim in by_taps]

    def local(self, task: Task) -> tuple[list[int], list[int], list[float | None], list[slice]]:
        """The spatial sizes of what plain torch's kernel reads and makes on this rank, its scales, and the rank's part of it.

        Along dims with taps, and where the kernel has nothing to do, it makes what it reads.
        """
        tapped = self.tapped(task.dims)
        reads, makes, scales, part = [], [], [], [slice(None)] * 2
        for (dim, taps), scale in zip(self.relations.items(), self.scales, strict=True):
            own = task.outputs.spans[dim]
            if dim in tapped:
                reads.append(own.size)
                makes.append(own.size)
            elif dim in task.dims:
                assert taps.ratio is not None
                held = task.held(dim)
                reads.append(held.size)
                makes.append(taps.ratio * held.size)
            else:
                reads.append(taps.inputs)
                makes.append(taps.outputs)
            sharded = dim in task.dims or dim in tapped
            scales.append(None if sharded else scale)
            part.append(own.within(task.held(dim).start * (taps.ratio or 0)) if makes[-1] != own.size else slice(None))
        return reads, makes, scales, part

    def forward(self, region: torch.Tensor, task: Task) -> torch.Tensor:
        """The kernel of `windowed.forward`."""
        shape = [*region.shape[:2], *task.outputs.shape[2:]]
        if 0 in shape or not region.numel():
            return region.new_zeros(shape)
        tapped = self.tapped(task.dims)
        out = region if self.kind.nearest or not tapped else _wide(region)
        for dim in tapped:
            out = _gather(out, dim, self.relations[dim], task)
        if len(tapped) < len(self.relations):
            _, makes, scales, part = self.local(task)
            out = self._kernel(out, makes, scales)[tuple(part)]
        return out.to(region.dtype)

    def _kernel(self, x: torch.Tensor, makes: list[int], scales: list[float | None]) -> torch.Tensor:
        """Plain torch's kernel. Antialiasing on a CPU repeats the first row of an image of one column: such a part is turned.

        Where the whole image has one column, it has plain torch's numbers.
        """
        if self.kind.mode.endswith("_aa") and x.shape[-1] == makes[-1] == 1 < self.relations[x.ndim - 1].outputs:
            return self.kind.op(x.mT, makes[::-1], *self.corners, *scales[::-1]).mT
        return self.kind.op(x, makes, *self.corners, *scales)

    def backward(self, grad: torch.Tensor, task: Task) -> torch.Tensor:
        """The kernel of `windowed.adjoint`."""
        held = [task.held(dim).size for dim in self.relations]
        if 0 in held or not grad.numel():
            return grad.new_zeros([*grad.shape[:2], *held])
        tapped = self.tapped(task.dims)
        out = _wide(grad) if tapped else grad
        if len(tapped) < len(self.relations):
            reads, makes, scales, part = self.local(task)
            out = _embedded(out, makes, part)
            out = self.kind.backward(out, makes, [*grad.shape[:2], *reads], *self.corners, *scales)
        for dim in tapped:
            out = _scatter(out, dim, self.relations[dim], task)
        return out.to(grad.dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In the dtype in which sums are made: half types are added up in float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _embedded(grad: torch.Tensor, sizes: Sequence[int], part: Sequence[slice]) -> torch.Tensor:
    """``grad`` as that part of a larger tensor that is zero elsewhere."""
    ends = [(cut.start or 0, size) for size, cut in zip(sizes, part[2:], strict=True)]
    padding = [
        end for (before, size), n in zip(ends, grad.shape[2:], strict=True) for end in (size - before - n, before)
    ]  # the last dim comes first
    return aten.constant_pad_nd(grad, padding[::-1]) if any(padding) else grad


def _weighted(tensor: torch.Tensor, dim: int, weights: list[float]) -> torch.Tensor:
    if all(weight == 1 for weight in weights):
        return tensor
    return tensor * constant(weights, tensor).view(-1, *[1] * (tensor.ndim - dim - 1))


def _gather(region: torch.Tensor, dim: int, taps: Taps, task: Task) -> torch.Tensor:
    """The rank's outputs along ``dim``: the sum over the taps of what they read, times their weight."""
    origin, out = task.held(dim).start, None
    for reads, weights in taps.table(task.outputs.spans[dim]):
        index = constant([i - origin for i in reads], region, torch.int64)
        part = _weighted(region.index_select(dim, index), dim, weights)
        out = part if out is None else out.add_(part)
    assert out is not None
    return out


def _scatter(grad: torch.Tensor, dim: int, taps: Taps, task: Task) -> torch.Tensor:
    """The adjoint of `_gather`."""
    held = task.held(dim)
    out = grad.new_zeros([held.size if d == dim else size for d, size in enumerate(grad.shape)])
    for reads, weights in taps.table(task.outputs.spans[dim]):
        index = constant([i - held.start for i in reads], grad, torch.int64)
        out.index_add_(dim, index, _weighted(grad, dim, weights))
    return out


@handlers.register(
    *(kind.op for kind in KINDS),
    traffic="the halo of the input",
    limits="linear and cubic modes on integer tensors only by powers of two along sharded dims",
)
def interpolate(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of the forward ops."""
    kind = BY_OP[op]
    input, outputs, *rest = handlers.bind(op, args, kwargs)
    if len(outputs) != input.ndim - 2 or min(*input.shape[2:], *outputs) < 1:  # which fake tensors do not check
        raise RuntimeError(
            f"{op.name()}: needs an input of {len(outputs) + 2} dims and sizes greater than 0, "
            f"got input (={tuple(input.shape)}) and output size (={tuple(outputs)})"
        )
    result = dtensors.Meta(tuple(map(int, (*input.shape[:2], *outputs))), (), input.dtype)
    plain = _rounds_plainly(input, outputs)
    single = input.dtype != torch.float64 or (kind.nearest and plain)
    call = _Call.of(kind, input.shape[2:], outputs, rest, single, plain, input.device.type == "cpu")
    if not input.is_floating_point() and not kind.nearest:
        sharded = [p.dim for p in input.placements if isinstance(p, Shard)]
        if found := [dim for dim in call.tapped(sharded) if dim in sharded]:
            raise NotImplementedError(
                f"{op.name()}: a tensor of {input.dtype} that is sharded along dim {found[0]} can only grow there by a power "
                f"of two, got {call.relations[found[0]].inputs} -> {call.relations[found[0]].outputs}: convert it to a "
                "floating dtype first"
            )
    return forward(call.forward, input, call.relations, [formatted(result, input)])[0]


@handlers.register(*(kind.backward for kind in KINDS), traffic="the halo of the gradient of the input, on its way back")
def interpolate_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of the backward ops."""
    kind = BY_OP[op]
    grad, outputs, inputs, *rest = handlers.bind(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, grad, outputs, inputs, *rest)
    single = grad.dtype != torch.float64 or kind.nearest
    call = _Call.of(kind, inputs[2:], outputs, rest, single, plain=True, on_cpu=grad.device.type == "cpu")
    return adjoint(call.backward, grad, call.relations, formatted(result, grad))


def _rounds_plainly(input: DTensor, outputs: Sequence[int]) -> bool:
    """Whether plain torch takes the kernel of nearest modes that computes coordinates in one step, in float32.

    On CPU there is another one, in which float64 tensors have coordinates in float64, and which is taken for large outputs
    unless they are channels-last. That can be seen where a coordinate is a whole number but for rounding.
    """
    if input.device.type != "cpu":
        return True
    channels_last = memory_format(input.shape, input.stride()) != torch.contiguous_format and input.shape[1] > 3
    return channels_last or (len(outputs) == 2 and sum(outputs) <= 128)


@handlers.register(*(kind.op.overloadpacket.vec for kind in KINDS), traffic="the halo of the input")
def composite(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of the forms that `torch.inference_mode` leaves undecomposed, which take sizes or scale factors."""
    input, _, *corners, factors = handlers.bind(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, *args, **kwargs)
    sizes = result.shape[2:]
    return op.overloadpacket.default(input, sizes, *corners, *(factors or [None] * len(sizes)))
