"""Complex numbers of a sharded tensor against one process, forward and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from harness import DEVICE, assert_parity, shard, simulated, whole, wire
from torch import fft, nn
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard


def spectrum(x: torch.Tensor) -> torch.Tensor:
    return fft.rfft2(x, norm="ortho")


AROUND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fftshift": lambda x: fft.fftshift(spectrum(x), dim=(-2, -1)),
    "ifftshift": lambda x: fft.ifftshift(spectrum(x)),
    "abs": lambda x: spectrum(x).abs(),
    "angle": lambda x: spectrum(x).angle(),
    "power": lambda x: spectrum(x).abs().pow(2).mean(),
    "parts": lambda x: spectrum(x).real * spectrum(x).imag,
    "complex": lambda x: torch.complex(x, x * 2),
    "polar": lambda x: torch.polar(x.abs(), x),
    "sgn": lambda x: spectrum(x).sgn(),
    "conj": lambda x: spectrum(x).conj(),
    "conj of a product": lambda x: spectrum(x).conj() * spectrum(x + 1),
    "imag of conj": lambda x: spectrum(x).conj().imag,
    "resolve_conj": lambda x: spectrum(x).conj().resolve_conj(),
    "conj_physical": lambda x: spectrum(x).conj_physical(),
    "transform of conj": lambda x: fft.fft2(fft.fft2(x).conj()),
    "slice of conj": lambda x: spectrum(x).conj()[..., 1:4, 1:],
    "conj transposed": lambda x: spectrum(x) @ spectrum(x).mH,
    "view_as_real": lambda x: torch.view_as_real(spectrum(x)),
    "view_as_complex": lambda x: torch.view_as_complex(torch.stack([x, x + 1], -1)),
    "pairs joined": lambda x: torch.view_as_complex(torch.view_as_real(spectrum(x)).flatten(-2).unflatten(-1, (-1, 2))),
    "number before": lambda x: 1j - spectrum(x),
    "complex power": lambda x: spectrum(x + 3) ** (1 + 2j),
    "sum": lambda x: spectrum(x).sum((2, 3)),
    "mean": lambda x: spectrum(x).mean(2),
    "norm": lambda x: torch.linalg.vector_norm(spectrum(x)),
    "quotient": lambda x: spectrum(x) / (spectrum(x) + 3),
    "modes": lambda x: spectrum(x)[..., :3, :2],
    "joined modes": lambda x: torch.cat([spectrum(x)[:, :, :2], spectrum(x)[:, :, -2:]], 2),
    "pad": lambda x: nn.functional.pad(spectrum(x), (1, 2, 0, 1)),
    "channels_last": lambda x: spectrum(x.contiguous(memory_format=torch.channels_last)),
    "tokens": lambda x: fft.rfft2(x.permute(0, 2, 3, 1), dim=(1, 2)),
}


@pytest.mark.parametrize("mesh, dims", [((4,), (2,)), ((3,), (3,)), ((2, 2), (2, 3))])
@pytest.mark.parametrize("name", AROUND)
def test_complex_numbers(name: str, mesh: tuple[int, ...], dims: tuple[int, ...]) -> None:
    """7 rows over 4 ranks are 2, 2, 2, 1, and 4 modes over 3 ranks 2, 2, 0: some shards are short, and some empty."""
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            x = torch.randn(1, 5, 7, 6, dtype=torch.float64, device=DEVICE)
        assert_parity(AROUND[name], [x], devices, [[Shard(dim) for dim in dims]], atol=1e-9, long_strides=True)


def test_halves_of_numbers_on_different_ranks() -> None:
    with simulated(2):
        x = shard(torch.randn(3, 2), init_device_mesh(DEVICE, (2,)), [Shard(1)])
        with wire() as sent, pytest.raises(NotImplementedError, match="last dim must be whole"):
            torch.view_as_complex(x)
    assert not sent


def test_a_conjugate_is_a_view() -> None:
    """What is written to it reaches the base; one that was taken before the base was written to raises."""
    with simulated(2):
        x = shard(torch.randn(3, 4, dtype=torch.cdouble), init_device_mesh(DEVICE, (2,)), [Shard(1)])
        expected = whole(x).clone()
        x.conj()[:, 1:3].add_(torch.ones_like(x[:, 1:3]))
        expected.conj()[:, 1:3].add_(1)
        torch.testing.assert_close(whole(x), expected, rtol=0, atol=0)
        before = x.conj()
        x.mul_(2)
        with pytest.raises(RuntimeError, match="written to in place since"):
            before.abs()
