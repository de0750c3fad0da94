"""Random numbers that do not depend on how a tensor is sharded.

Each draw takes one seed from torch's default generator of the CPU, on every rank the same, and element ``i`` of the whole
tensor, in row-major order, gets a hash of seed and ``i``. So one seed gives the same numbers on any number of ranks, any
layout and any device, replicated tensors get the same ones everywhere, and what saves and restores the state of the
generator, such as `torch.utils.checkpoint`, works as for plain torch. The numbers are not those of plain torch, which depend
on the size of a shard.

While a CUDA graph records, the seed is drawn on the device instead, from the generator of CUDA, which each replay moves on.

The ranks must be seeded alike and must draw alike. That they did is checked at the first draw on a mesh and at each
`CHECK_EVERY`-th after it; under torch.compile and in CUDA graphs it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.broadcasting import aligned
from torchhalo.exchange.layout import layout
from torchhalo.exchange.memory import laid_out, memory_format, strides
from torchhalo.kernels import draws, random_numbers
from torchhalo.torch_internals import (
    collectives,
    dtensors,
    fake_tensors,
    handlers,
    process_groups,
    redistribution,
    simulation,
    streams,
    tracing,
)

aten = torch.ops.aten

CHECK_EVERY = 64


_torch_stream = False


class _Chosen:
    """What `torch_random` returns: leaving it as a context restores what was in force before the call."""

    def __init__(self, before: bool):
        self._before = before

    def __enter__(self) -> _Chosen:
        return self

    def __exit__(self, *exc: object) -> None:
        _choose(self._before)


def torch_random(on: bool = True) -> _Chosen:
    """Leave random numbers to stock DTensor: torch's own stream, which depends on the number of ranks and on the layout.

    It holds for the whole process until it is called with False or, if used as a context manager, until the block ends.
    A function that torch.compile has compiled keeps the numbers that it was compiled with.

    Example:
        >>> import torchhalo
        >>> with torchhalo.torch_random():
        ...     pass  # here F.dropout on a DTensor draws as stock DTensor does
    """
    before = _torch_stream
    _choose(on)
    return _Chosen(before)


def torch_stream() -> bool:
    """Whether random numbers are left to stock DTensor."""
    return _torch_stream


def _choose(on: bool) -> None:
    global _torch_stream
    _torch_stream = on
    config, tag = torch.compiler.config, "torchhalo-torch-random"  # what is compiled for one is not to be used for the other
    config.cache_key_tag = config.cache_key_tag.replace(tag, "") + (tag if on else "")


_draws: dict[DeviceMesh, int] = {}


def seed_of(op: handlers.Op, mesh: DeviceMesh, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """The seed of one draw on ``device``. Ranks outside the mesh draw one too, so that their generators keep step.

    It lies where it was drawn: on the CPU, except in a CUDA graph and of a generator of the device.
    """
    capturing = streams.capturing(device)
    if generator is not None:
        if capturing and generator.device.type == "cpu":
            raise RuntimeError(
                f"{_name(op)}: a CUDA graph would repeat the draw of a generator of the CPU at each replay; give it one of the "
                "device, made known to the graph with `torch.cuda.CUDAGraph.register_generator_state`"
            )
        seed = simulation.without_modes(lambda: torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    else:
        # The generator of the device knows of graphs: each replay draws on from where it is then.
        seed = torch.randint(2**63 - 1, (), device=device if capturing else "cpu")
    if process_groups.coordinate(mesh) is not None and tracing.has_values(seed) and not capturing:
        _draws[mesh] = _draws.get(mesh, 0) + 1
        if _draws[mesh] % CHECK_EVERY == 1:
            _check(op, mesh, simulation.per_rank(lambda seed: seed.to(device), seed))
    return seed


def _check(op: handlers.Op, mesh: DeviceMesh, seed: torch.Tensor) -> None:
    ends = collectives.all_reduce(torch.stack([seed, -seed]), mesh, range(mesh.ndim), "max")
    highest, lowest = (int(end.item()) for end in ends.unbind())
    if highest != -lowest:
        raise RuntimeError(
            f"{_name(op)}: the ranks of {mesh} drew different seeds, so that they would disagree on what they share. Call "
            "torch.manual_seed with the same seed on all of them, and let what only some ranks draw have a torch.Generator of "
            "its own; or leave random numbers to stock DTensor with torchhalo.torch_random()"
        )


def _name(op: handlers.Op) -> str:
    return op.overloadpacket.__name__


def _overloads(*names: str) -> list[handlers.Op]:
    """Those of the named overloads, such as ``rand_like.generator``, that this torch has."""
    pairs = (name.split(".") for name in names)
    return [getattr(getattr(aten, op), overload) for op, overload in pairs if overload in getattr(aten, op).overloads()]


FILLS: dict[handlers.Op, draws.Draw] = {
    aten.bernoulli_.float: random_numbers.bernoulli,
    aten.bernoulli_.Tensor: random_numbers.bernoulli,
    aten.uniform_.default: random_numbers.uniform,
    aten.normal_.default: random_numbers.normal,
    aten.log_normal_.default: random_numbers.log_normal,
    aten.exponential_.default: random_numbers.exponential,
    aten.cauchy_.default: random_numbers.cauchy,
    aten.geometric_.default: random_numbers.geometric,
    aten.random_.default: random_numbers.any_integer,
    aten.random_.to: random_numbers.below,
    getattr(aten.random_, "from"): random_numbers.integer,
}
LIKES: dict[handlers.Op, draws.Draw] = {
    aten.bernoulli.p: random_numbers.bernoulli,
    aten.bernoulli.Tensor: random_numbers.bernoulli,
    aten.uniform.default: random_numbers.uniform,
    aten.normal_functional.default: random_numbers.normal,
    aten.log_normal.default: random_numbers.log_normal,
    aten.exponential.default: random_numbers.exponential,
    aten.cauchy.default: random_numbers.cauchy,
    aten.geometric.default: random_numbers.geometric,
    aten.random.default: random_numbers.any_integer,
    aten.random.to: random_numbers.below,
    getattr(aten.random, "from"): random_numbers.integer,
    **dict.fromkeys(_overloads("rand_like.default", "rand_like.generator"), random_numbers.uniform),
    **dict.fromkeys(_overloads("randn_like.default", "randn_like.generator"), random_numbers.normal),
    **dict.fromkeys(_overloads("randint_like.default", "randint_like.generator"), random_numbers.below),
    **dict.fromkeys(_overloads("randint_like.low_dtype", "randint_like.low_generator_dtype"), random_numbers.integer),
}
TRAFFIC = "nothing, but two numbers now and again to see that all ranks draw alike"
LIMITS = "not the numbers of plain torch; the ranks must be seeded alike"


@handlers.register(*FILLS, traffic=TRAFFIC, limits=LIMITS)
def fill(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of the ops that fill a tensor with random numbers."""
    if _torch_stream:
        return handlers.stock(op, args, kwargs)
    tensor, *parameters = _positional(op, args, kwargs)
    _object(op, tensor.dtype, parameters)
    _drawn(op, FILLS[op], tensor, tensor.placements, dtensors.meta(tensor), parameters, kwargs, out=dtensors.local(tensor))
    return tensor


@handlers.register(*LIKES, traffic=TRAFFIC, limits=LIMITS)
def like(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of the ops that make a tensor of random numbers like another one."""
    if _torch_stream:
        return handlers.stock(op, args, kwargs)
    tensor, *parameters = _positional(op, args, kwargs)
    options = {key: value for key, value in kwargs.items() if key in ("dtype", "memory_format")}
    (result,) = fake_tensors.plain_result(aten.empty_like.default, tensor, **options)
    _object(op, result.dtype, parameters)
    placements = redistribution.reduced_placements(tensor.placements)
    shard = _drawn(op, LIKES[op], tensor, placements, result, parameters, kwargs)
    return dtensors.wrap(laid_out(shard, result), tensor.device_mesh, placements, result)


@handlers.register(aten.bernoulli.default, traffic=TRAFFIC, limits=LIMITS)
def bernoulli(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``torch.bernoulli``, whose input holds the probabilities."""
    if _torch_stream:
        return handlers.stock(op, args, kwargs)
    return aten.bernoulli.Tensor(args[0], args[0], **kwargs)


@handlers.register(
    aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor, traffic=TRAFFIC, limits=LIMITS
)
def normal(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``torch.normal`` with tensors for mean, standard deviation, or both."""
    if _torch_stream:
        return handlers.stock(op, args, kwargs)
    mean, std = _positional(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, mean, std)
    both = mean + std  # sharded and shaped as the result is to be
    return (aten.normal_functional.default(both, **kwargs) * std + mean).to(result.dtype)


@handlers.register(aten.native_dropout.default, traffic=TRAFFIC, limits=LIMITS)
def native_dropout(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.native_dropout``, which CUDA tensors take; a Partial input stays one, as dropout is linear."""
    if _torch_stream:
        return handlers.stock(op, args, kwargs)
    input, p, train = handlers.bind(op, args, kwargs)
    result, mask = fake_tensors.plain_result(op, input, p, train)
    mesh = input.device_mesh
    placements = redistribution.reduced_placements(input.placements)
    if train is False:
        out, kept = dtensors.local(input) * 1.0, torch.ones_like(dtensors.local(input), dtype=torch.bool)
    else:
        _object(aten.bernoulli_.float, torch.float32, [p])

        def drop(part: draws.Part, coordinate: tuple[int, ...], shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return draws.dropout(shard, p, part, _strides(part, result))

        shard = dtensors.local(input)
        out, kept = _on_part(op, input, placements, kwargs, drop, shard) or (shard, shard.new_empty(0, dtype=torch.bool))
    return (
        dtensors.wrap(laid_out(out, result), mesh, input.placements, result),
        dtensors.wrap(laid_out(kept, mask), mesh, placements, mask),
    )


@handlers.register(aten.dropout.default, traffic=TRAFFIC, limits=LIMITS)
def dropout(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.dropout``, which `torch.inference_mode` leaves undecomposed."""
    input, p, train = handlers.bind(op, args, kwargs)
    return aten.native_dropout.default(input, p, True)[0] if train else input.clone()


handlers.register_composites(
    __name__,
    aten.dropout_.default,
    aten.alpha_dropout.default,
    aten.alpha_dropout_.default,
    aten.feature_dropout.default,
    aten.feature_dropout_.default,
    aten.feature_alpha_dropout.default,
    aten.feature_alpha_dropout_.default,
    traffic=TRAFFIC,
    limits=LIMITS,
)


def _positional(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The positional arguments of ``op``, defaults filled in; tensors as DTensors."""
    given = dtensors.named_dtensors(op, args, kwargs)
    return [given[argument.name] for argument in op._schema.arguments if not argument.kwarg_only]


def _object(op: handlers.Op, dtype: torch.dtype, parameters: Sequence[Any]) -> None:
    """Let plain torch object to wrong parameters, with its own words."""
    if not any(isinstance(parameter, torch.Tensor) for parameter in parameters):
        _try(op, dtype, *parameters)


@lru_cache(maxsize=256)
def _try(op: handlers.Op, dtype: torch.dtype, *parameters: float) -> None:
    generator = {"generator": None} if "generator" in op._overloadname else {}  # has no default there
    simulation.without_modes(lambda: op(torch.empty(0, dtype=dtype), *parameters, **generator))


def _drawn(
    op: handlers.Op,
    draw: draws.Draw,
    tensor: DTensor,
    placements: Sequence[Placement],
    result: dtensors.Meta,
    parameters: Sequence[Any],
    kwargs: dict[str, Any],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's part of one draw in the shape of ``tensor``.

    Args:
        parameters: Of ``draw``: numbers, or one DTensor that broadcasts to the shape.
        out: Where to put it; a new tensor as ``result`` says if not given. Of a sum over ranks, the first rank gets all.
    """
    shard = dtensors.local(tensor)
    others = [dtensors.local(aligned(p, placements, tensor.shape)) if isinstance(p, DTensor) else p for p in parameters]
    summed = [axis for axis, placement in enumerate(placements) if placement == Partial()]

    def kernel(
        part: draws.Part, coordinate: tuple[int, ...], shard: torch.Tensor, out: torch.Tensor | None, others: Sequence[Any]
    ) -> torch.Tensor:
        if out is None:
            out = shard.new_empty_strided(part.box.shape, _strides(part, result), dtype=result.dtype)
        if any(coordinate[axis] for axis in summed):
            return out.zero_()
        draws.fill(out, draw, part, *others)
        return out

    drawn = _on_part(op, tensor, placements, kwargs, kernel, shard, out, others)
    return shard.new_empty(0, dtype=result.dtype) if drawn is None else drawn


def _strides(part: draws.Part, result: dtensors.Meta) -> tuple[int, ...]:
    """Those of a part of ``result`` in its memory format."""
    return strides(part.box.shape, memory_format(result.shape, result.stride))


def _on_part(
    op: handlers.Op,
    tensor: DTensor,
    placements: Sequence[Placement],
    kwargs: dict[str, Any],
    kernel: Callable[..., Any],
    *others: Any,
) -> Any:
    """What ``kernel`` gives for this rank's part of one draw, its place in the mesh and ``others``; None outside the mesh."""
    mesh = tensor.device_mesh
    seed = seed_of(op, mesh, dtensors.local(tensor).device, kwargs.get("generator"))
    coordinate = process_groups.coordinate(mesh)
    if coordinate is None:
        return None
    whole = layout(tensor.shape, mesh, placements)

    def on_rank(seed: torch.Tensor, others: Sequence[Any], *coordinate: int) -> Any:
        return kernel(draws.Part(whole.owned(coordinate), whole.shape, seed), coordinate, *others)

    return simulation.per_rank(on_rank, seed, others, *coordinate)
