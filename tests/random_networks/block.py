"""What a block of a random network is, and what the blocks share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import prod
from random import Random
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

#: By name, what makes a block for a tensor (batch, channels, *space), or None where no such block fits.
BLOCKS: dict[str, Callable[..., nn.Module | None]] = {}
LARGEST = 4000  # elements, beyond which nothing makes a tensor larger


class Block(nn.Module):
    """A function of the block itself and a tensor, with the modules, parameters and buffers that it names."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Any):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)

    def extra_repr(self) -> str:
        """What the function has taken from its surroundings, and the shapes of its parameters."""
        taken = {k: v for k, v in inspect.getclosurevars(self.function).nonlocals.items() if not isinstance(v, Random)}
        shapes = {k: tuple(t.shape) for k, t in (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False))}
        return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in {**taken, **shapes}.items())


def block(make: Callable[..., nn.Module | None]) -> Callable[..., nn.Module | None]:
    """Register a kind of block under the name of the function that makes it."""
    BLOCKS[make.__name__] = make
    return make


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 2)


def conv(space: int, inputs: int, outputs: int, kernel: Any = 1, **options: Any) -> nn.Module:
    """A convolution over so many dims."""
    return [nn.Conv1d, nn.Conv2d, nn.Conv3d][space - 1](inputs, outputs, kernel, **options)


def of(names: str, space: int) -> Any:
    """The module of ``torch.nn`` of that name for so many dims."""
    return getattr(nn, f"{names}{space}d")


class _Contiguous(torch.autograd.Function):
    """The same tensor, contiguous; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.contiguous()


class Norm(nn.Module):
    """A norm that gets contiguous tensors where there is one process: of unusual strides torch's kernels on a CPU make wrong
    gradients, and read outside of the tensor.
    """

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            return self.norm(x)
        return _Contiguous.apply(self.norm(_Contiguous.apply(x)))


def divisor(r: Random, number: int) -> int:
    return r.choice([d for d in range(1, number + 1) if number % d == 0])


def shape_after(module: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that ``module`` makes of one such as ``shape``; its buffers stay."""
    state = {id(m): m.training for m in module.modules()}
    random = torch.get_rng_state()
    try:
        with torch.no_grad():
            return tuple(module.eval()(torch.ones(shape, dtype=next(module.parameters(), torch.empty(0)).dtype)).shape)
    finally:
        torch.set_rng_state(random)
        for m in module.modules():
            m.training = state[id(m)]


def some(r: Random, shape: tuple[int, ...], depth: int = 1) -> nn.Module:
    """One to three blocks, one after another, for use inside of another block."""
    layers: list[nn.Module] = []
    for _ in range(r.randint(1, 3)):
        layer = one(r, shape, depth)
        layers.append(layer)
        shape = shape_after(layer, shape)
    return nn.Sequential(*layers)


def one(r: Random, shape: tuple[int, ...], depth: int = 0) -> nn.Module:
    """A block of any kind that fits; at depth 1 only such as hold no others."""
    while True:
        make = r.choice([make for name, make in BLOCKS.items() if not depth or name not in NESTED])
        made = make(r, *shape)
        if made is not None and (prod(shape_after(made, shape)) <= max(LARGEST, prod(shape))):
            return made


NESTED: set[str] = set()


def nested(make: Callable[..., nn.Module | None]) -> Callable[..., nn.Module | None]:
    """Register a kind of block that holds others."""
    NESTED.add(make.__name__)
    return block(make)


def fitted(inner: nn.Module, before: tuple[int, ...], after: tuple[int, ...]) -> nn.Module:
    """``inner``, made to give a tensor of the shape ``after``: resized and with other channels where it does not."""
    shape = shape_after(inner, before)
    layers = [inner]
    if shape[2:] != after[2:]:
        layers.append(nn.Upsample(size=after[2:]))
    if shape[1] != after[1]:
        layers.append(conv(len(after) - 2, shape[1], after[1]))
    return nn.Sequential(*layers)
