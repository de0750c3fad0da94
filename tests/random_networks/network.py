"""A random network: how it is drawn, built, and compared with one process."""

from __future__ import annotations

import copy
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

import torch
from harness import mesh_of
from memory import Memory
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.nn import functional as F

import torchhalo
from random_networks import combining, mixing, spatial  # noqa: F401  (they register their blocks)
from random_networks.block import BLOCKS, shape_after

MESHES = [(2,), (2,), (3,), (4,), (2, 2), (1, 3), (2, 1)]
ORDERS = ["usual", "usual", "usual", "channels last", "transposed"]


class Network(NamedTuple):
    """A network and how it is sharded; blocks are drawn from their own seeds, so that one can be left out.

    Attributes:
        seed: Of the values, and of the head.
        shape: Of the input.
        mesh, dims: Of how many ranks, and which dims they cut.
        blocks: The kind and the seed of each.
        head: Whether there may be one.
        training: Or evaluation.
        memory: How the shards of the input lie in memory.
    """

    seed: int
    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    dims: tuple[int, ...]
    blocks: tuple[tuple[str, int], ...]
    head: bool = True
    training: bool = True
    memory: str = "usual"


class Result(NamedTuple):
    """How a comparison ended.

    Attributes:
        kind: ``exact``, ``void`` (nothing to compare: not finite), ``unstable`` (one process differs from itself where every
            module rounds more), ``wrong``, ``raised``, ``died``, or ``broken`` (one process raised).
        text: What differs, or the error.
        gathers: The warnings of torchhalo.
    """

    kind: str
    text: str = ""
    gathers: tuple[str, ...] = ()


def draw(seed: int, ranks: int | None = None, kinds: Sequence[str] | None = None) -> Network:
    """The network number ``seed``, on so many ranks and of these kinds of blocks if given."""
    r = Random(seed)
    mesh = r.choice([mesh for mesh in MESHES if ranks is None or mesh[0] * mesh[-1] ** (len(mesh) - 1) == ranks])
    space = r.choice([1, 2, 2, 2, 2, 3, 3]) if len(mesh) == 1 else r.choice([2, 2, 3])
    largest = [40, 17, 9][space - 1]
    size = [r.choice([r.randint(1, 4), r.randint(4, largest), r.randint(4, largest), 8]) for _ in range(space)]
    shape = (r.randint(1, 3), r.choice([1, 2, 3, 4, 4, 6, 8]), *size)
    dims = tuple(r.sample(range(2, space + 2), len(mesh)))
    blocks = tuple((r.choice(kinds or list(BLOCKS)), r.randrange(1 << 30)) for _ in range(r.randint(2, 7)))
    return Network(seed, shape, mesh, dims, blocks, training=r.random() < 0.8, memory=r.choice(ORDERS))


def build(network: Network) -> nn.Sequential:
    """The network for one process; a block that does not fit where it comes is left out."""
    shape, layers = network.shape, []
    for kind, seed in network.blocks:
        torch.manual_seed(seed)
        layer = BLOCKS[kind](Random(seed), *shape)
        after = None if layer is None else shape_after(layer, shape)
        if after is not None and torch.Size(after).numel() <= max(4000, torch.Size(shape).numel()):
            layers.append(layer)
            shape = after
    torch.manual_seed(network.seed)
    last = combining.head(Random(network.seed), shape) if network.head and len(shape) > 2 else None
    return nn.Sequential(*layers, *[last] * (last is not None)).double().train(network.training)


def step(model: nn.Module, x: torch.Tensor, seed: int) -> torch.Tensor:
    """The output, after a backward pass."""
    y = model(x)
    kind = seed % 5
    generator = torch.Generator().manual_seed(seed)
    other = torch.randn(y.shape, dtype=torch.float64, generator=generator)
    if kind == 0:
        F.mse_loss(y, other).backward()
    elif kind == 1:
        (y * other).sum().backward()
    else:
        if isinstance(y, DTensor):
            kept = [Replicate() if isinstance(p, Partial) else p for p in y.placements]
            other = distribute_tensor(other, y.device_mesh, kept, src_data_rank=None)
        y.backward(other)
    return y


def values(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Everything that is compared, by name, whole."""
    yield "output", y.detach()
    yield "gradient of the input", x.grad
    for name, parameter in model.named_parameters():
        yield f"gradient of {name}", parameter.grad
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(network: Network) -> Result:
    """On every rank: one training step of the sharded network beside one process."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = _compare(network)
    gathers = {str(warning.message) for warning in caught if issubclass(warning.category, torchhalo.GatherWarning)}
    return result._replace(gathers=tuple(sorted(gathers)))


def _compare(network: Network) -> Result:
    try:
        model = build(network)
        torch.manual_seed(network.seed)
        x = Memory(network.memory)(torch.randn(network.shape, dtype=torch.float64)).requires_grad_()
        plain = copy.deepcopy(model)
        expected = dict(values(plain, x, step(plain, x, network.seed)))
    except Exception:
        return Result("broken", _trace())
    if not all(t is None or t.isfinite().all() for t in expected.values()):
        return Result("void")
    mesh = mesh_of(network.mesh)
    try:
        sharded = torchhalo.parallelize(copy.deepcopy(model), mesh, dims=network.dims)
        sx = torchhalo.shard(x.detach(), mesh, network.dims).requires_grad_()
        got = {name: None if t is None else whole(t) for name, t in values(sharded, sx, step(sharded, sx, network.seed))}
    except Exception:
        return Result("raised", _trace())
    wrong = {name: text for name, t in expected.items() if (text := _difference(t, got[name], 1e-9))}
    if not wrong:
        return Result("exact")
    # Rounding may decide what is the largest, or be magnified by a norm of nearly equal values.
    torch.manual_seed(network.seed + 1)
    near = _rounded(x.detach()).requires_grad_()
    plain = copy.deepcopy(model)
    for module in plain.modules():
        module.register_forward_hook(lambda module, args, y: _rounded(y) if isinstance(y, torch.Tensor) else y)
    moved = dict(values(plain, near, step(plain, near, network.seed)))
    unstable = any(_difference(expected[name], t, 1e-8) for name, t in moved.items())
    return Result("unstable" if unstable else "wrong", "\n".join(f"{name}: {text}" for name, text in wrong.items()))


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """As if computed with less precision."""
    return x + 1e-11 * torch.randn_like(x) * x.detach().abs().max() if x.is_floating_point() and x.numel() else x


def _trace() -> str:
    """The error being handled, in one line, under where it passed through torchhalo and the network."""
    _, error, trace = sys.exc_info()
    frames = [f for f in traceback.extract_tb(trace) if "/torchhalo/" in f.filename or "random_networks" in f.filename]
    error_text = " ".join(f"{type(error).__name__}: {error}".split())
    return "\n".join([*(f"{f.filename}:{f.lineno} {f.name}: {f.line}" for f in frames), error_text])


def _difference(expected: torch.Tensor | None, got: torch.Tensor | None, tolerance: float) -> str:
    """What differs; nothing if they are equal."""
    if expected is None or got is None:
        missing = (expected is None or not expected.any()) and (got is None or not got.any())
        return "" if missing else f"expected {_brief(expected)}, got {_brief(got)}"
    if expected.shape != got.shape:
        return f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    if not expected.numel():
        return ""
    error = (expected.double() - got.double()).abs().nan_to_num(nan=float("inf"))
    bound = tolerance * (1 + expected.double().abs().max())
    return f"off by {error.max():.3g}, values up to {expected.double().abs().max():.3g}" if (error > bound).any() else ""


def _brief(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else f"values up to {tensor.abs().max():.3g}"
