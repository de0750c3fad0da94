"""Small models streamed on a device, beside the plain model: the same numbers, within the budget."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torchhalo
from benchmarks.common import Row
from benchmarks.model_cases import CASES

#: How far from the plain model, relative to the largest value; float32 may be computed in TF32.
WITHIN = {torch.float64: 1e-9, torch.float32: 0.01, torch.bfloat16: 0.05}


class Net(nn.Module):
    """Windows of all kinds, norms and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.down, self.group = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32)
        self.up, self.head = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = F.relu(self.norm(self.stem(x)))
        coarse = F.silu(self.group(self.down(F.max_pool2d(fine, 3, 1, 1))))
        return self.head(torch.cat([fine, self.up(coarse)], 1))


class Decoder(nn.Module):
    """With attention in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = CASES["autoencoder"].make(channels=(16, 32), layers=1, groups=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decoder: Any = self.vae
        return decoder.decode(x, return_dict=False)[0]


def step(model: nn.Module, x: torch.Tensor, train: bool) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with torch.set_grad_enabled(train):
        out = model(x)
        if train:
            out.float().square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach().cpu() for name, value in {"out": out, **grads}.items()}


def compare(
    make: Callable[[], nn.Module], shape: tuple[int, ...], device: str, dtype: torch.dtype, train: bool, last: bool, where: str
) -> Row:
    """One model: what differs, relative to the largest value, and peaks with an unlimited and with a tight budget."""
    torch.manual_seed(0)
    plain = make().to(device, dtype).train(train)
    x = torch.randn(shape).to(dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    net = copy.deepcopy(plain)
    expected = step(plain, x.to(device), train)
    del plain
    row: Row = {}
    kept = sum(value.nbytes for name, value in expected.items() if name != "out") + 3 * x.nbytes + 3 * expected["out"].nbytes
    row["on top MiB"] = kept / 2**20 + 64
    budget: int | None = None
    for way in ("free", "tight"):
        streamed = torchhalo.stream(copy.deepcopy(net), shards=4, memory=budget, progress=False)
        for turn in ("first", "again"):
            if device == "cuda":
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            found = step(streamed, x.to(where), train)
            row[f"{way} {turn} s"] = time.perf_counter() - begin
            most = max(
                float(value.abs().max()) for value in expected.values()
            )  # of a bias before a norm there is only rounding
            wrong = {name: float((found[name] - value).abs().max()) / most for name, value in expected.items()}
            worst = max(wrong, key=wrong.__getitem__)
            row["differs"] = max(row.get("differs", 0.0), wrong[worst])
            if not wrong[worst] < WITHIN[dtype]:
                raise AssertionError(f"{way}, {turn} call: {worst} differs by {wrong[worst]:.1e}")
            if device == "cuda":
                row[f"{way} peak MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        (known,) = streamed.forward._prepared.values()  # type: ignore[attr-defined]
        schedule = known.schedule
        row |= {f"{way} planned MiB": schedule.peak / 2**20, f"{way} bus MiB": schedule.moved / 2**20}
        budget = round(1.05 * (known.resident + max(schedule.peak // 3, known.least - known.resident)))
    return row


def cases(device: str) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Names of rows, and what measures them."""
    quick = CASES["segresnet"].quick[0]
    side = 256 if device == "cuda" else 32
    for name, make, shape in (
        ("net", Net, (2, 3, side, side)),
        ("decoder", Decoder, (1, 4, side // 4, side // 4)),
        ("segresnet", partial(CASES["segresnet"].make, **quick), (1, 4, *[side // 4] * 3)),
    ):
        for train in (False, True):
            about = f"smoke-{name}-{'train' if train else 'forward'}"
            yield about, partial(compare, make, shape, device, torch.float64, train, False, "cpu")
        if device == "cuda":
            yield f"smoke-{name}-bf16", partial(compare, make, shape, device, torch.bfloat16, False, False, "cuda")
            yield f"smoke-{name}-fp32-train", partial(compare, make, shape, device, torch.float32, True, False, "cuda")
    if device == "cuda":
        yield "smoke-net-last", partial(compare, Net, (1, 3, side, side), device, torch.bfloat16, False, True, "cpu")
