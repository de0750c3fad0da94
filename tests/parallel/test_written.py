"""Plain tensors that shards are written to: they become sharded where they have the size of these, and else whole.

In both cases one process's values, of the tensor that was written to and of what the write returns.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import DEVICE, mesh_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchhalo

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]

#: Of ``o``, a plain tensor; of values as large; and of labels with one channel.
WRITES: dict[str, Write] = {
    "one hot": lambda o, x, labels: o.scatter_(1, labels, 1),
    "one hot by values": lambda o, x, labels: o.scatter_(1, labels, x[:, :1]),
    "added": lambda o, x, labels: o.scatter_add_(1, labels, x[:, :1]),
    "copied": lambda o, x, labels: o.copy_(x),
    "multiplied": lambda o, x, labels: o.__imul__(x),
    "broadcast": lambda o, x, labels: o.add_(x[0, 0]),
    "channels": lambda o, x, labels: o.__setitem__((slice(None), slice(1, None)), x[:, 1:]),
    "a channel": lambda o, x, labels: o.__setitem__((slice(None), 2), x[:, 2]),
    "where a mask is": lambda o, x, labels: o.masked_fill_(labels == 1, 5.0),
    "by a mask": lambda o, x, labels: o.__setitem__(x > 0, 7.0),
    "by a mask of the first dims": lambda o, x, labels: o.__setitem__((x > 0)[:, :, :, 0], 7.0),
    "out": lambda o, x, labels: torch.add(x, 1.0, out=o),
}
#: These write a piece that may lack the dim that is sharded.
PIECES = {"broadcast", "by a mask of the first dims"}
PLACEMENTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "rows": ((3,), [Shard(2)]),
    "columns": ((2,), [Shard(3)]),
    "samples": ((3,), [Shard(0)]),
    "both": ((2, 2), [Shard(2), Shard(3)]),
    "rows of rows": ((2, 2), [Shard(2), Shard(2)]),
    "rows beside copies": ((2, 2), [Replicate(), Shard(2)]),
}
SIZES = {"even": (2, 3, 12, 6), "uneven": (2, 3, 7, 5), "empty": (1, 3, 2, 4)}


def mesh_and_permission(shape: tuple[int, ...]) -> Any:
    mesh = mesh_of(shape)
    torchhalo.parallelize(nn.Conv2d(1, 1, 1), mesh)
    return mesh


def given(size: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(size[1], (size[0], 1, *size[2:]), generator=generator)
    return torch.randn(size, dtype=torch.float64, generator=generator), labels


def check_writes(name: str) -> None:
    shape, placements = PLACEMENTS[name]
    mesh = mesh_and_permission(shape)
    for size in SIZES.values():
        x, labels = given(size)
        sharded = [distribute_tensor(t, mesh, placements) for t in (x, labels)]
        for kind, write in WRITES.items():
            for memory in (torch.contiguous_format, torch.channels_last):
                for inside in (False, True):
                    expected, found = (torch.ones(size, dtype=x.dtype).to(memory_format=memory) for _ in range(2))
                    wanted = write(expected, x, labels)
                    with torchhalo.strict():
                        if inside:
                            with torchhalo.plain_as_replicated():
                                returned = write(found, *sharded)
                        else:
                            returned = write(found, *sharded)
                    where = f"{kind}, {size}, {memory}"
                    if kind not in PIECES:
                        assert found.placements == tuple(placements), where
                    for got, want in ((found, expected), (returned, wanted)):
                        assert (got is None) == (want is None)
                        if want is not None:
                            assert got.shape == want.shape and got.stride() == want.stride(), where
                            got = got.full_tensor() if hasattr(got, "full_tensor") else got
                            assert ((got - want).abs() <= 1e-12).all(), where


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_plain_tensor_of_their_size_becomes_sharded(pool, name: str) -> None:
    pool(3 if PLACEMENTS[name][0] == (3,) else 2 if PLACEMENTS[name][0] == (2,) else 4).run(check_writes, name)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


def check_uses() -> None:
    mesh = mesh_and_permission((2,))
    x, labels = given((2, 3, 7, 5))
    expected, found = torch.zeros(2, 3, 7, 5, dtype=x.dtype), torch.zeros(2, 3, 7, 5, dtype=x.dtype)
    expected.scatter_(1, labels, 1)
    found.scatter_(1, torchhalo.shard(labels, mesh), 1)
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    weight = torch.randn(4, 3, 3, 3, dtype=x.dtype, generator=torch.Generator().manual_seed(1), requires_grad=True)
    uses: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda o: o + 1,
        lambda o: torch.stack([x, o]),
        lambda o: torch.cat([o, o.flip(1)]),
        lambda o: nn.functional.conv2d(o, weight, padding=1),
        lambda o: nn.functional.mse_loss(o, x),
        lambda o: o.requires_grad_(False)[:, 1:].sum(),
        lambda o: Double.apply(o),
        lambda o: copy.deepcopy(o),
        lambda o: o.mul_(3),
        lambda o: o,
    ]
    with torchhalo.strict():
        for use in uses:
            want, got = use(expected), use(found)
            assert isinstance(got, DTensor) or got is found
            torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=1e-12)
            with torchhalo.plain_as_replicated():
                torch.testing.assert_close((use(found) * 1).full_tensor(), use(expected) * 1, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.load(file, weights_only=False).full_tensor() * 9, expected, rtol=0, atol=0)
    assert "DTensor" in repr(found), "and nothing is sent: only one rank may print"
    with pytest.raises(TypeError, match=r"call `tensor\.full_tensor"):
        found.numpy()
    (gradient,) = torch.autograd.grad(nn.functional.conv2d(found, weight).sum(), weight)
    (wanted,) = torch.autograd.grad(nn.functional.conv2d(expected, weight).sum(), weight)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)


def test_it_is_used_as_any_sharded_tensor(pool) -> None:
    pool(2).run(check_uses)


class Writer(nn.Module):
    """A model that writes to a plain tensor, and returns it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        o = torch.zeros(x.shape, dtype=x.dtype)
        o[x > 0] = 1
        return o


def check_models() -> None:
    mesh, (x, _) = mesh_and_permission((2,)), given((1, 3, 7, 5))
    for outputs, kind in (("sharded", DTensor), ("whole", torch.Tensor)):
        image = torch.zeros_like(x)
        image.copy_(torchhalo.shard(x, mesh))
        with torchhalo.strict() if outputs == "sharded" else torch.no_grad():
            found = torchhalo.parallelize(Writer(), mesh, outputs=outputs)(image)
        assert type(found) is kind
        assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, Writer()(x))


def test_models_may_be_given_one_and_return_one(pool) -> None:
    pool(2).run(check_models)


def test_explain_and_one_device_know_it_too() -> None:
    x, model = torch.randn(1, 3, 16, 8), nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Writer())
    assert "gathered                nothing" in str(torchhalo.explain(model, x, (2,)))
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(torchhalo.stream(copy.deepcopy(model), memory="1MB")(x), expected)


def check_what_stays_plain() -> None:
    """Others know the elements, or there is another size, or a gradient: a gather, of which strict() tells."""
    mesh = mesh_and_permission((2,))
    x, _ = given((1, 3, 6, 4))
    sharded, weight = torchhalo.shard(x, mesh), torch.ones(4, dtype=x.dtype, requires_grad=True)
    for case in ("view", "array", "piece", "larger", "gradient", "weights"):
        found = []
        for value in (x, sharded):
            o = torch.zeros(1, 3, 6, 4, dtype=x.dtype)
            kept: list[Any] = [o]
            if case == "view":
                kept.append(o[:, 1])
            elif case == "array":
                kept.append(torch.from_numpy(o.numpy()) if DEVICE == "cpu" else torch.from_dlpack(o))
            elif case == "piece":
                o = o[:, :, 1:]
                value = value[:, :, 1:]
            elif case == "larger":
                kept = [o := torch.zeros(1, 3, 9, 4, dtype=x.dtype)]
            write = {
                "larger": lambda o, value: o.__setitem__((..., slice(2, 8), slice(None)), value),
                "gradient": lambda o, value: o.add_(value * weight),
                "weights": lambda o, value: o.copy_(value).mul_(weight) if value is x else None,
            }.get(case, lambda o, value: o.copy_(value))
            if value is not x and case not in ("piece", "weights"):
                with torchhalo.strict(), pytest.raises(torchhalo.GatherError):
                    write(o, value)
            write(o, value)
            found.append(kept)
        for got, want in zip(found[1], found[0], strict=True) if case != "weights" else ():
            assert type(got) is torch.Tensor, case
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    o = torch.zeros(1, 3, 6, 4, dtype=x.dtype)
    o.copy_(sharded).mul_(weight)
    with pytest.raises(RuntimeError, match="can't carry a gradient: make it from a sharded one"):
        o.sum()


@pytest.mark.filterwarnings("ignore::torchhalo.GatherWarning")
def test_what_others_know_stays_plain(pool) -> None:
    pool(2).run(check_what_stays_plain)


def check_a_view_on_one_rank() -> None:
    mesh = mesh_and_permission((3,))
    plain = torch.zeros(2, 3, 12, 7)
    kept = plain[0] if torch.distributed.get_rank() == 1 else None
    with pytest.raises(RuntimeError, match=r"the ranks are not in step.*of shards to a plain tensor of shape \(2, 3, 12, 7\)"):
        plain.copy_(distribute_tensor(torch.ones(2, 3, 12, 7), mesh, [Shard(2)]))
    assert kept is None or not kept.any()


def test_a_view_on_one_rank_is_an_error_on_all(pool) -> None:
    """Else that rank would gather, and the others would not come."""
    pool(3).run(check_a_view_on_one_rank)
