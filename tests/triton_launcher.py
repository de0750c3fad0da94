"""Launch a kernel in all ways that Triton compiles apart, and compare what was launched with what Triton itself launches.

Run as a script, with TRITON_INTERPRET=0, as Triton decides when it is imported whether it interprets. Nothing is launched: the
driver notes what it is given.
"""

# mypy: ignore-errors

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton_compiler import NoDriver

from torchhalo.kernels.triton.launches import launch


@triton.jit(do_not_specialize=["free"])
def kernel(out, x, free: tl.int64, size, pair, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at * pair[1], mask=at < size, other=0.0) + pair[0] + free
    tl.store(out + at, values, mask=at < size)


class Driver(NoDriver):
    """Notes each launch: the grid, the stream, which binary, and its arguments."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.stream = 0
        self.utils = self

    def get_current_stream(self, device: int = 0) -> int:
        return self.stream

    def load_binary(self, name: str, binary: bytes, *args: Any) -> tuple[Any, ...]:
        return object(), binary, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 20}

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def run(x: int, y: int, z: int, stream: int, function: bytes, packed: Any, about: Any, *rest: Any) -> None:
            for hook in rest[:2]:
                hook(about)
            given = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in rest[2:]]
            self.launched.append(((x, y, z), stream, function, packed, given))

        return run


def check() -> None:
    driver, hooked = Driver(), []
    triton.runtime.driver.set_active(driver)
    triton.knobs.runtime.launch_enter_hook.add(lambda about: hooked.append(about.get()["name"]))
    memory = {dtype: torch.ones(64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    assert not any(each.data_ptr() % 16 for each in memory.values())
    run = triton.JITFunction.run
    with mock.patch.object(triton.JITFunction, "run", autospec=True, side_effect=run) as asked:
        for round in range(3):
            driver.stream = round
            for dtype, offset, size, step, block in product(memory, (0, 1), (1, 2, 16), (1, 3, 32), (16, 32)):
                tensors, rest = (memory[dtype], memory[dtype][offset:]), (size, (7, step), block)
                options, free = {"num_warps": 1 + size % 2}, (round + step,)
                kernel[2,](*tensors, *free, *rest, **options)
                before = asked.call_count
                launch(kernel, (2,), tensors, rest, free, **options)
                assert (asked.call_count > before) == (round == 0)
                expected, found = driver.launched[-2:]
                assert expected == found, (expected, found)
    assert hooked == ["kernel"] * len(driver.launched)


if __name__ == "__main__":
    check()
