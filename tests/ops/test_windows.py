"""Windows that shards do not divide into: each goes to the rank that owns most of it, and the rest of it comes back."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, assert_parity, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tokens import like, weight
from torch import nn
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torchhalo
from torchhalo.geometry import chunks, window_chunks
from torchhalo.torch_internals.grid_shard import GridShard, WindowShard


def windows(x: torch.Tensor, size: int, shift: int) -> torch.Tensor:
    """Attention in shifted windows, as Swin has it: partition, a bias of a table, a mask, and all of it reversed."""
    b, h, w, c = x.shape
    y = x.roll((-shift, -shift), (1, 2)) if shift else x
    y = y.view(b, h // size, size, w // size, size, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, c)
    scores = y @ y.transpose(1, 2) + like(x, weight(1, size * size, size * size))
    if shift:
        mask = (weight(h * w // size**2, size * size, size * size) > 0).to(x.dtype)
        scores = scores.view(b, -1, size * size, size * size) + like(x, mask)
        scores = scores.view(-1, size * size, size * size)
    y = scores.softmax(-1) @ y
    y = y.view(b, h // size, w // size, size, size, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
    return y.roll((shift, shift), (1, 2)) if shift else y


@pytest.mark.parametrize("mesh, dims", [((2,), (2,)), ((2,), (1,)), ((3,), (2,)), ((2, 2), (1, 2))])
@pytest.mark.parametrize("shift", [0, 1])
def test_windows_send_the_halo_of_the_roll_and_nothing_else(mesh: tuple[int, ...], dims: tuple[int, ...], shift: int) -> None:
    """Shard edges are edges of windows of 2 x 2; the gradient of the table aside, which is a sum over ranks."""
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        x = weight(2, 12, 12, 3)
        placements = [Shard(dim) for dim in dims]
        out = assert_parity(lambda x: windows(x, 2, shift), [x], devices, [placements])
        assert list(out.placements) == placements
        source = shard(x, devices, placements).requires_grad_()
        with wire() as rolls:
            y = source.roll((-shift, -shift), (1, 2)).roll((shift, shift), (1, 2)) if shift else source * 1
            y.backward(y.detach())
        with wire() as sent, torchhalo.strict():
            y = windows(source, 2, shift)
            y.backward(y.detach())
        assert [each.received for each in sent] == [each.received for each in rolls]


def test_windows_across_edges() -> None:
    for mesh, dims, size in (((2,), (2,), 3), ((3,), (2,), 2), ((2, 2), (1, 2), 3)):
        with simulated(math.prod(mesh)):
            devices = init_device_mesh(DEVICE, mesh)
            step = functools.partial(windows, size=size, shift=1)
            assert_parity(step, [weight(2, 6, 5 * size, 3)], devices, [[Shard(dim) for dim in dims]], long_strides=True)


def test_each_window_goes_with_most_of_it() -> None:
    for count, window, ranks in itertools.product(range(1, 13), range(2, 9), range(1, 6)):
        parts, owned = window_chunks(count, window, (ranks,)), chunks(count * window, (ranks,))
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])] and parts[-1].stop == count
        assert max(part.size for part in parts) <= max(part.size for part in chunks(count, (ranks,)))
        for rank, part in enumerate(parts):
            for index in range(part.start, part.stop):
                shares = [min(own.stop, (index + 1) * window) - max(own.start, index * window) for own in owned]
                if window <= owned[0].size:
                    assert shares[rank] == max(shares)


def test_names() -> None:
    grid, windows = GridShard(1, (3, 5), 1, window=7), WindowShard(2, 5, 7)
    assert repr(grid) == "GridShard(dim=1, sizes=(3, 5), part=1, window=7)" and repr(windows) in str((windows,))
    assert grid != GridShard(1, (3, 5), 1) and windows != Shard(2) and Shard(2) != windows and hash(windows) != hash(Shard(2))
    for placement in (grid, windows):
        for again in (copy.deepcopy(placement), pickle.loads(pickle.dumps(placement)), placement.at(0).at(placement.dim)):
            assert again == placement and type(again) is type(placement)


class WindowAttention(nn.Module):
    """As in Swin: windows of an image (batch, height, width, channels), shifted, with a mask and a bias of positions."""

    def __init__(self, window: int, shift: int = 0, norm: bool = False, fused: bool = False, across: bool = False):
        super().__init__()
        self.window, self.shift, self.norm, self.fused, self.across = window, shift, norm, fused, across
        self.qkv, self.out, self.scale = nn.Linear(4, 12), nn.Linear(4, 4), nn.LayerNorm(4)
        self.table = nn.Parameter(torch.randn(window**4 if not across else 1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, height, width, c = x.shape
        n, given = self.window, x
        x = F.pad(x, (0, 0, 0, -width % n, 0, -height % n))
        h, w = x.shape[1] // n, x.shape[2] // n
        if self.shift:
            x = x.roll((-self.shift, -self.shift), (1, 2))
        x = x.view(b, h, n, w, n, c)
        x = x.permute(0, 2, 4, 1, 3, 5) if self.across else x.permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(-1, h * w if self.across else n * n, c)
        if self.norm:
            x = self.scale(x)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 2).permute(2, 0, 3, 1, 4).unbind(0)
        bias = (
            self.table.view(n * n, n * n, 2).permute(2, 0, 1).unsqueeze(0) if not self.across else self.table.view(1, 2, 1, 1)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None if self.across else bias)
        else:
            scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) + bias
            if self.shift and not self.across:
                mask = torch.sin(torch.arange(h * w * n**4, dtype=x.dtype)).view(h * w, 1, n * n, n * n)
                scores = (scores.view(b, h * w, 2, n * n, n * n) + mask).view(-1, 2, n * n, n * n)
            y = F.dropout(scores.softmax(-1), 0.0) @ v
        y = self.out(y.transpose(1, 2).reshape(x.shape)) + x
        y = y.view(b, n, n, h, w, c) if self.across else y.view(b, h, w, n, n, c)
        y = (y.permute(0, 3, 1, 4, 2, 5) if self.across else y.permute(0, 1, 3, 2, 4, 5)).reshape(b, h * n, w * n, c)
        if self.shift:
            y = y.roll((self.shift, self.shift), (1, 2))
        return given + y[:, :height, :width]


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_windows(data: st.DataObject) -> None:
    """Outputs and all gradients are those of one process, and the image comes back as it went."""
    mesh, dims = data.draw(
        st.sampled_from([((2,), (2,)), ((3,), (2,)), ((4,), (2,)), ((4,), (1,)), ((2, 2), (1, 2)), ((2, 2), (2, 2))])
    )
    window, across = data.draw(st.integers(2, 4)), data.draw(st.booleans())
    shape = data.draw(st.integers(1, 2)), data.draw(st.integers(3, 9)), data.draw(st.integers(8, 17)), 4
    shape = shape if dims != (1,) else (shape[0], shape[2], shape[1], 4)
    fused = st.booleans() if torch.__version__ >= "2.12" else st.just(False)  # 2.11 cannot simulate it on uneven shards
    options = data.draw(st.fixed_dictionaries({"shift": st.integers(0, 1), "norm": st.booleans(), "fused": fused}))
    torch.manual_seed(0)
    plain = WindowAttention(window, across=across, **options).double()
    names = [name for name, _ in plain.named_parameters()]
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            x = torch.randn(shape, dtype=torch.float64)

        def function(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            with torchhalo.plain_as_replicated():
                return torch.func.functional_call(plain, dict(zip(names, parameters, strict=True)), (x,))

        placements = [Shard(dim) for dim in dims]
        whole_everywhere = [[Replicate()] * len(mesh)] * len(names)
        values = [value.detach() for value in plain.parameters()]
        unused = {"scale": not options["norm"], "table": across and options["fused"]}
        used = [not unused.get(name.split(".")[0], False) for name in names]
        out = assert_parity(function, [x, *values], devices, [placements, *whole_everywhere], 1e-10, needs_grad=[True, *used])
        if all(-(-shape[dim] // window) >= math.prod(mesh) for dim in dims) and not any(shape[dim] % window for dim in dims):
            assert list(out.placements) == placements


@pytest.mark.parametrize("dim", [1, 2])
def test_what_is_missing_travels_once_there_and_once_back(dim: int) -> None:
    """Of ten windows of seven on four ranks, which end at 18, 36 and 54 of 70: 3 + 1 + 2 columns, four times in a step."""
    torch.manual_seed(0)
    module = WindowAttention(7, norm=True)
    shape = [1, 7, 7, 4]
    shape[dim] = 70
    with simulated(4), torchhalo.strict():
        mesh = init_device_mesh(DEVICE, (4,))
        model = torchhalo.parallelize(module, mesh, dims=dim)
        x = shard(torch.randn(shape), mesh, [Shard(dim)]).requires_grad_()
        gradient = shard(torch.ones(shape), mesh, [Shard(dim)])
        with wire() as sent:
            model(x).backward(gradient)
    moves = [sum(each.received.values()) for each in sent if each.name == "all_to_all_single"]
    assert moves == [(3 + 1 + 2) * 7 * 4] * 4


@pytest.mark.parametrize("name", ["conv", "flip", "mean", "amax", "cumsum", "fold", "written", "selected"])
def test_other_ops_have_the_windows_moved(name: str) -> None:
    functions = {
        "conv": lambda t: F.conv2d(t, like(t, weight(4, 4, 3, 3)), padding=1),
        "flip": lambda t: t.flip(3) + t,
        "mean": lambda t: t - t.mean((2, 3), keepdim=True),
        "amax": lambda t: t - t.amax(3, keepdim=True),
        "cumsum": lambda t: t.cumsum(3),
        "fold": lambda t: F.pixel_shuffle(t, 2).mean((1,), keepdim=True),
        "written": lambda t: written(t.clone()),
        "selected": lambda t: t[..., 3] + t[..., -2:].sum(-1),
    }

    def written(t: torch.Tensor) -> torch.Tensor:
        t[..., 1:3] = 2.0
        t.mul_(1.5)
        return t

    def function(x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        y = x.view(b, c, h, w // 3, 3).permute(0, 1, 4, 2, 3).reshape(b, c * 3, h, w // 3)
        return functions[name](y[:, :4])

    with simulated(4):
        mesh = init_device_mesh(DEVICE, (4,))
        with maybe_disable_local_tensor_mode():
            x = torch.randn(2, 2, 4, 30, dtype=torch.float64)
        y = shard(x, mesh, [Shard(3)]).view(2, 2, 4, 10, 3)
        assert y.placements == (WindowShard(3, 10, 3),) and y.flatten(2, 3).placements == (GridShard(2, (4, 10), 1, window=3),)
        assert_parity(function, [x], mesh, [[Shard(3)]], 1e-11)


@pytest.mark.parametrize("name", ["amax", "amin", "all", "any", "var", "var_mean", "mean", "vector_norm"])
def test_reductions_over_other_dims_leave_the_windows(name: str) -> None:
    """As in Hiera, whose queries are the largest of each unit of tokens."""
    functions = {
        "all": lambda t: (t > 0).all(1) * t.sum(1),
        "any": lambda t: (t > 0).any(1) * t.sum(1),
        "var_mean": lambda t: sum(torch.var_mean(t, 1)),
        "vector_norm": lambda t: torch.linalg.vector_norm(t, dim=1),
    }

    def function(x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        y = x.view(b, h // 2, 2, w // 3, 3, c).permute(0, 2, 4, 1, 3, 5).reshape(b, 6, h // 2 * (w // 3), c)
        return functions.get(name, lambda t: getattr(t, name)(1))(y)

    with simulated(4), torchhalo.strict():
        mesh = init_device_mesh(DEVICE, (4,))
        with maybe_disable_local_tensor_mode():
            x = torch.randn(2, 4, 30, 3, dtype=torch.float64)
        out = assert_parity(function, [x], mesh, [[Shard(2)]], 1e-11)
        assert out.placements == (GridShard(1, (2, 10), 1, window=3),)
        given = shard(x, mesh, [Shard(2)])
        with wire() as sent:
            function(given)
    assert [each.name for each in sent] == ["all_to_all_single"], "the windows go with most of each, and no more"


def check_processes() -> None:
    """Uneven shards of processes, eager and compiled."""
    torch.manual_seed(0)
    plain = WindowAttention(3, shift=1, norm=True, fused=True).double()
    model = torchhalo.parallelize(copy.deepcopy(plain), mesh_of((3,)), dims=2)
    x = torch.randn(2, 7, 20, 4, dtype=torch.float64)
    expected = plain(x)
    expected.square().sum().backward()
    for run in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        out = run(x)
        assert isinstance(out, DTensor) and out.placements == (Shard(2),)
        torch.testing.assert_close(out.full_tensor(), expected, rtol=0, atol=1e-11)
        out.square().sum().backward()
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_processes(pool) -> None:
    pool(3).run(check_processes)


def test_sub_mesh() -> None:
    torch.manual_seed(0)
    plain = WindowAttention(3, shift=1).double()
    with simulated(4):
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "space"))["space"]
        with maybe_disable_local_tensor_mode():
            x = torch.randn(1, 5, 15, 4, dtype=torch.float64)
            expected = plain(x)
        out = torchhalo.parallelize(copy.deepcopy(plain), mesh, dims=2)(torchhalo.shard(x, mesh, dims=2))
        torch.testing.assert_close(whole(out), expected.detach(), rtol=0, atol=1e-11)
