"""Fourier transforms of a sharded tensor, and networks of them, against one process, and what they send."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from harness import DEVICE, Sent, assert_parity, mesh_of, shard, simulated, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory import memories
from torch import fft, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import torchhalo
from torchhalo.exchange.gathers import GatherError, GatherWarning
from torchhalo.torch_internals.transforms import cuda_strides

aten = torch.ops.aten

MESHES = [(1,), (2,), (3,), (4,), (2, 2)]
NAMES = [f"{inverse}{name}{ndim}" for name in ("fft", "rfft", "hfft") for inverse in ("", "i") for ndim in ("", "2", "n")]
REAL = {"rfft", "rfft2", "rfftn", "ihfft", "ihfft2", "ihfftn"}  # of real numbers alone


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::torchhalo.exchange.gathers.GatherWarning")  # where no other dim has two elements
def test_random_transforms(data: st.DataObject) -> None:
    """All functions, sizes, norms and dims; 1e-9, since the sums of a transform are made in another order."""
    mesh, name = data.draw(st.sampled_from(MESHES)), data.draw(st.sampled_from(NAMES))
    shape = data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=4))
    least = 2 if name in ("hfft", "irfft", "hfft2", "irfft2", "hfftn", "irfftn") else 1  # of one element these make none
    most = {"2": 2, "n": len(shape)}.get(name[-1], 1)
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1 if most != 2 else 2, max_size=most, unique=True))
    shape = [max(size, least) if dim in dims else size for dim, size in enumerate(shape)]
    dims = [dim - len(shape) if data.draw(st.booleans()) else dim for dim in dims]
    sizes = data.draw(st.sampled_from([None, [data.draw(st.integers(1, 8)) for _ in dims]]))
    where = {"dim": dims, "s": sizes} if name[-1] in "2n" else {"dim": dims[0], "n": sizes and sizes[0]}
    norm = data.draw(st.sampled_from([None, "forward", "backward", "ortho"]))
    placements = [data.draw(st.sampled_from([Replicate(), Partial(), *map(Shard, range(len(shape)))])) for _ in mesh]
    dtype = torch.float64 if name in REAL or data.draw(st.booleans()) else torch.complex128
    order = data.draw(st.permutations(range(len(shape))))
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            x = torch.randn([shape[dim] for dim in order], dtype=dtype, device=DEVICE)
            x = x.permute([order.index(dim) for dim in range(len(shape))])
        result = assert_parity(
            lambda x: getattr(fft, name)(x, norm=norm, **where),
            [x],
            devices,
            [placements],
            atol=1e-9,
            long_strides=True,
            memory=data.draw(memories(1)),
        )
        if Partial() not in placements:  # which stock, that makes complex numbers of real ones, may make shards of
            assert list(result.placements) == placements


def kept(x: torch.Tensor) -> torch.Tensor:
    """As Fourier neural operators write the modes that they keep."""
    modes = fft.rfft2(x)
    out = torch.zeros_like(modes)
    out[..., :2, :2] = modes[..., :2, :2] * 2
    out[..., -2:, :2] = modes[..., -2:, :2] * 3
    out.conj()[..., 2:3, :].mul_(2)
    return fft.irfft2(out, s=x.shape[-2:])


@pytest.mark.parametrize("dim", [2, 3])
def test_modes_are_written_in_place(dim: int) -> None:
    with simulated(3):
        x = torch.randn(1, 3, 8, 7, dtype=torch.float64)
        assert_parity(kept, [x], init_device_mesh(DEVICE, (3,)), [[Shard(dim)]], atol=1e-9)


def test_whole_dims_do_not_travel() -> None:
    with simulated(3):
        x = shard(torch.randn(2, 4, 5, 6), init_device_mesh(DEVICE, (3,)), [Shard(2)]).requires_grad_()
        with wire() as sent:
            y = fft.irfft(fft.rfft(x, dim=-1).conj(), dim=-1)
            y.backward(torch.ones_like(y))
            fft.fftn(x, dim=(0, 1, 3))
    assert not sent


def test_a_cut_dim_travels_once_there_and_back() -> None:
    """Instead of the 5 rows the 4 channels are cut, into 2 and 2: a rank gets its channels of rows that others have.

    A complex number travels as two real ones.
    """
    with simulated(2):
        x = shard(torch.randn(1, 4, 5, 6, dtype=torch.cdouble), init_device_mesh(DEVICE, (2,)), [Shard(2)])
        with wire() as sent:
            fft.fft2(x)
    assert sent == [
        Sent("all_to_all_single", {0: 2 * (2 * 2 * 6), 1: 2 * (2 * 3 * 6)}),
        Sent("all_to_all_single", {0: 2 * (2 * 3 * 6), 1: 2 * (2 * 2 * 6)}),
    ]


def test_dims_take_turns() -> None:
    """Of an image of one channel the columns are cut instead of the rows; of 8 real ones a transform makes 5 complex ones."""
    with simulated(2):
        x = shard(torch.randn(1, 1, 4, 8), init_device_mesh(DEVICE, (2,)), [Shard(2)])
        with wire() as sent:
            y = fft.rfft2(x)
        assert sent == [
            Sent("all_to_all_single", {0: 2 * (2 * 3), 1: 2 * (2 * 2)}),
            Sent("all_to_all_single", {0: 2 * (2 * 2), 1: 2 * (2 * 3)}),
        ]
        with wire() as back:
            fft.irfft2(y)
        assert back == [
            Sent("all_to_all_single", {0: 2 * (2 * 3), 1: 2 * (2 * 2)}),
            Sent("all_to_all_single", {0: 2 * (2 * 2), 1: 2 * (2 * 3)}),
        ]


def test_a_signal_alone_is_gathered() -> None:
    """Where no dim is left to cut, it is told, and inside `strict` nothing is sent."""
    with simulated(2):
        x = torch.randn(1, 1, 9, dtype=torch.float64)
        mesh = init_device_mesh(DEVICE, (2,))
        with pytest.warns(GatherWarning, match="_fft_r2c"):
            assert_parity(fft.rfft, [x], mesh, [[Shard(2)]], needs_grad=[False], atol=1e-9, long_strides=True)
        with wire() as sent, torchhalo.strict(), pytest.raises(GatherError, match="_fft_r2c"):
            fft.rfft(shard(x, mesh, [Shard(2)]))
    assert not sent


@pytest.mark.parametrize(
    "call",
    [
        lambda x: fft.fft(x, n=0),
        lambda x: fft.fft2(x, dim=(1, 1)),
        lambda x: fft.fftn(x, dim=(4,)),
        lambda x: fft.fft(x, norm="half"),
        lambda x: fft.fft2(x, s=(1, 2, 3)),
        lambda x: fft.rfft(torch.complex(x, x)),
        lambda x: fft.irfft(x[..., :1]),
        lambda x: fft.fft(x.half()),
        lambda x: torch.view_as_complex(x),
        lambda x: torch.view_as_real(x),
    ],
)
def test_errors_are_those_of_one_process(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with simulated(2):
        with maybe_disable_local_tensor_mode(), pytest.raises((RuntimeError, IndexError, TypeError)) as expected:
            call(torch.randn(1, 2, 5, 7))
        x = shard(torch.randn(1, 2, 5, 7), init_device_mesh(DEVICE, (2,)), [Shard(2)])
        with wire() as sent, pytest.raises(expected.type) as found:
            call(x)
    assert not sent and str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


# Networks.


class Operator(nn.Module):
    """A layer of a Fourier neural operator: weights for the lowest modes, and a convolution beside them."""

    def __init__(self, channels: int = 4, modes: int = 3):
        super().__init__()
        self.modes = modes
        shape = (2, channels, channels, modes, modes)
        self.weights = nn.Parameter(torch.randn(shape, dtype=torch.complex128) / channels)
        self.beside = nn.Conv2d(channels, channels, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        m = self.modes
        grid = torch.stack(torch.meshgrid(fft.fftfreq(h), fft.rfftfreq(w), indexing="ij")).double().square().sum(0)
        found = fft.rfft2(x) * torch.exp(-grid)
        out = torch.zeros(b, c, h, w // 2 + 1, dtype=torch.complex128, device=x.device)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, :m, :m], self.weights[0])
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, -m:, :m], self.weights[1])
        return nn.functional.gelu(fft.irfft2(out, s=(h, w)) + self.beside(x))


class Filter(nn.Module):
    """The global filter of GFNet, on tokens."""

    def __init__(self, channels: int = 4, size: tuple[int, int] = (9, 8)):
        super().__init__()
        self.size = size
        self.norm = nn.LayerNorm(channels, dtype=torch.float64)
        self.weight = nn.Parameter(torch.randn(size[0], size[1] // 2 + 1, channels, 2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        grid = self.norm(tokens).reshape(x.shape[0], *self.size, -1)
        found = fft.rfft2(grid, dim=(1, 2), norm="ortho") * torch.view_as_complex(self.weight)
        tokens = tokens + fft.irfft2(found, s=self.size, dim=(1, 2), norm="ortho").flatten(1, 2)
        return tokens.transpose(1, 2).reshape(x.shape)


class Mixer(nn.Module):
    """The token mixer of AFNO: blocks of channels, mixed mode by mode, soft-shrunk."""

    def __init__(self, channels: int = 4, blocks: int = 2):
        super().__init__()
        self.blocks, each = blocks, channels // blocks
        self.first = nn.Parameter(torch.randn(2, blocks, each, each, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(2, blocks, each, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        found = fft.rfft2(x.permute(0, 2, 3, 1), dim=(1, 2), norm="ortho").reshape(b, h, w // 2 + 1, self.blocks, -1)
        mix = "...bi,bio->...bo"
        real = torch.einsum(mix, found.real, self.first[0]) - torch.einsum(mix, found.imag, self.first[1]) + self.bias[0]
        imag = torch.einsum(mix, found.imag, self.first[0]) + torch.einsum(mix, found.real, self.first[1]) + self.bias[1]
        found = nn.functional.softshrink(torch.stack([real.relu(), imag.relu()], -1), 0.01)
        found = torch.view_as_complex(found).reshape(b, h, w // 2 + 1, c)
        return fft.irfft2(found, s=(h, w), dim=(1, 2), norm="ortho").permute(0, 3, 1, 2) + x


class Unit(nn.Module):
    """A Fourier unit, of fast Fourier convolution: a pointwise convolution of the real and imaginary parts of all modes."""

    def __init__(self, channels: int = 4):
        super().__init__()
        self.conv = nn.Conv2d(2 * channels, 2 * channels, 1, bias=False, dtype=torch.float64)
        self.norm = nn.BatchNorm2d(2 * channels, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        found = torch.view_as_real(fft.rfft2(x, norm="ortho")).permute(0, 1, 4, 2, 3).contiguous()
        found = torch.relu(self.norm(self.conv(found.view(b, 2 * c, h, w // 2 + 1))))
        found = found.view(b, c, 2, h, w // 2 + 1).permute(0, 1, 3, 4, 2).contiguous()
        return fft.irfft2(torch.view_as_complex(found), s=(h, w), norm="ortho")


NETWORKS = {"operator": Operator, "filter": Filter, "mixer": Mixer, "unit": Unit}


def train(name: str, mesh: tuple[int, ...], dims: tuple[int, ...], compiled: bool) -> None:
    """Output, gradients and buffers of two layers are one process's, and nothing is gathered."""
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 4, 3, padding=1, dtype=torch.float64)
    model = nn.Sequential(layer, NETWORKS[name](), NETWORKS[name]())
    x = torch.randn(2, 2, 9, 8, dtype=torch.float64)
    plain = x.clone().requires_grad_()
    expected = model(plain)
    expected.square().mean().backward()
    want = {key: p.grad.clone() for key, p in model.named_parameters()}
    torch.manual_seed(0)
    again = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, dtype=torch.float64), NETWORKS[name](), NETWORKS[name]())
    again.load_state_dict(model.state_dict())
    for module in again.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    torchhalo.parallelize(again, mesh_of(mesh))
    run = torch.compile(again, backend="aot_eager", fullgraph=True) if compiled else again
    sharded = distribute_tensor(x, mesh_of(mesh), [Shard(dim) for dim in dims]).requires_grad_()
    with torchhalo.strict():
        found = run(sharded)
        found.square().mean().backward()
    torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad, rtol=0, atol=1e-9)
    for key, p in again.named_parameters():
        torch.testing.assert_close(
            p.grad.full_tensor(), want[key], rtol=0, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}"
        )
    for key, value in torchhalo.plain_state_dict(again).items():
        torch.testing.assert_close(value, model.state_dict()[key], rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, dims", [((2,), (2,)), ((4,), (3,)), ((2, 2), (2, 3))])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(pool, name: str, mesh: tuple[int, ...], dims: tuple[int, ...]) -> None:
    pool(math.prod(mesh)).run(train, name, mesh, dims, False)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_compiled_networks(pool, name: str) -> None:
    pool(2).run(train, name, (2,), (2,), True)


def infer() -> None:
    """On a mesh that leaves rank 0 out, where composites arrive whole; and a number in the exponent, with its gradient."""
    mesh = DeviceMesh(DEVICE, [1, 2])
    x = torch.randn(1, 3, 5, 6, dtype=torch.float64)
    with torch.inference_mode():
        for name in NAMES:
            call = getattr(fft, name)
            found = call(distribute_tensor(x, mesh, [Shard(2)]), dim=2 if name[-1] == "t" else (2, 3))
            if mesh.get_coordinate() is not None:
                expected = call(x, dim=2 if name[-1] == "t" else (2, 3))
                torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=1e-9)
    sharded = distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
    plain = x.clone().requires_grad_()
    for each in (sharded, plain):
        torch.exp(1j * each).real.square().sum().backward()
    if mesh.get_coordinate() is not None:
        torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad, rtol=0, atol=1e-9)


def test_inference_on_a_submesh(pool) -> None:
    pool(3).run(infer)


@pytest.mark.parametrize("dims", [[0], [1], [0, 1], [1, 2], [0, 2], [0, 1, 2]], ids=str)
def test_strides_of_cuda(dims: list[int]) -> None:
    """Those of its kernels or of torch's fake tensors, which know them if the dims ascend; and one where they do not."""
    if DEVICE != "cuda" and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13 fake tensors do not sort the dims as CUDA does, and the tests run without a GPU")
    length = (4, 3, 5)[dims[-1]]
    ops = (aten._fft_c2c.default, (0, True)), (aten._fft_r2c.default, (0, True)), (aten._fft_c2r.default, (0, 2 * length - 2))
    for order, (op, rest) in itertools.product(itertools.permutations(range(3)), ops):
        with nullcontext() if DEVICE == "cuda" else FakeTensorMode():
            dtype = torch.float64 if op is aten._fft_r2c.default else torch.complex128
            x = torch.empty([(4, 3, 5)[dim] for dim in order], dtype=dtype, device="cuda")
            x = x.permute([order.index(dim) for dim in range(3)])
            expected = op(x, dims, *rest)
        assert cuda_strides(op, x.shape, x.stride(), dims, expected.shape) == expected.stride()
    assert cuda_strides(aten._fft_r2c.default, (2, 1, 2), (2, 2, 1), [2, 0], (2, 1, 2)) == (1, 4, 2)
