"""One call of a streamed model: its executor, where its results go, and its place in the autograd graph."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from torchhalo.parallel.streaming.execute import Executor
from torchhalo.parallel.streaming.host import Blocks
from torchhalo.parallel.streaming.prepare import Prepared
from torchhalo.parallel.streaming.steps import Step
from torchhalo.parallel.streaming.trace import Piece


def part_of(source: Any, piece: Piece | None) -> torch.Tensor:
    """The box of a tensor or an array; nothing of it, if there is none, to know its dtype."""
    cuts = tuple(slice(0, 0) for _ in source.shape) if piece is None else tuple(span.within(0) for span in piece.box.spans)
    part = source[cuts]
    return part.detach() if isinstance(part, torch.Tensor) else torch.tensor(part)


class Run:
    """One call: its executor, and where its results go."""

    def __init__(
        self,
        prepared: Prepared,
        held: dict[str, torch.Tensor],
        device: torch.device,
        home: torch.device,
        sources: list[Any],
        out: Any,
        wanted: list[int],
        learned: list[str],
        progress: bool,
        blocks: Blocks,
    ):
        self._prepared, self._held, self._progress = prepared, held, progress
        self.wanted, self.learned = wanted, learned
        returned = prepared.returned
        if out is not None and len(returned.tensors) != 1:
            raise ValueError(f"stream: `out` takes one output, the model returns {len(returned.tensors)}")
        if out is not None and tuple(out.shape) != returned.tensors[0].shape:
            raise ValueError(f"stream: `out` must have the shape {returned.tensors[0].shape}, it has {tuple(out.shape)}")
        self.outputs = [
            torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=home) if out is None else out
            for meta in returned.tensors
        ]
        self._sources = sources
        self._gradients: dict[object, torch.Tensor] = {}
        inputs = {number: partial(part_of, source) for number, source in enumerate(sources)}
        steps = [each.steps for each in prepared.steps]
        self._executor = Executor(prepared.programs, steps, prepared.schedule, held, device, inputs, self._result, blocks)

    @property
    def peak(self) -> int:
        """The most bytes on the device so far, without what is resident."""
        return self._executor.peak

    @property
    def differentiable(self) -> list[bool]:
        return self._prepared.returned.differentiable

    def forward(self) -> list[Any]:
        schedule = self._prepared.schedule
        try:
            self._executor.run(schedule.forward, self._shown(0, schedule.forward))
        except BaseException:
            self._executor.close()
            raise
        if schedule.forward == len(schedule.actions):
            self._executor.close()
        return self.outputs

    def backward(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        schedule = self._prepared.schedule
        seeds = {number: partial(part_of, grad) for number, grad in enumerate(grads)}
        self._executor.give(seeds, [program.seeds for program in self._prepared.programs])
        try:
            self._executor.run(len(schedule.actions), self._shown(schedule.forward, len(schedule.actions)))
        finally:
            self._executor.close()
        return [self._gradients.get(key) for key in [*self.wanted, *self.learned]]

    def _result(self, step: Step, part: torch.Tensor) -> None:
        assert step.piece is not None
        cuts = tuple(span.within(0) for span in step.piece.box.spans)
        if step.kind == "output":
            target = self.outputs[int(step.key)]  # type: ignore[call-overload]
            if isinstance(target, torch.Tensor):
                target.detach()[cuts] = part.to(target.device)
            else:
                target[cuts] = part.cpu().numpy()
        elif step.kind == "update":
            self._held[str(step.key)].detach().copy_(part)
        else:
            like = self._sources[step.key] if isinstance(step.key, int) else self._held[str(step.key)]
            if step.key not in self._gradients:
                self._gradients[step.key] = torch.zeros_like(like)
            self._gradients[step.key][cuts] += part.to(like.device)

    def _shown(self, start: int, stop: int) -> Callable[[int], None]:
        """Shows progress, from the third second on."""
        began = last = time.monotonic()
        if not self._progress or not sys.stderr.isatty():
            return lambda done: None

        def show(done: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done + 1 == stop and last > began:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            elif now - last > (0.2 if last > began else 3):
                last, share = now, (done - start) / max(1, stop - start)
                print(f"\rstreamed {share:.0%}, {now - began:.0f} s", end="", file=sys.stderr, flush=True)

        return show


class Streamed(torch.autograd.Function):
    """The call as one step of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, run: Run, *leaves: torch.Tensor) -> tuple[Any, ...]:
        outputs = run.forward()
        ctx.run = run
        ctx.mark_non_differentiable(
            *(x for x, d in zip(outputs, run.differentiable, strict=True) if not d and isinstance(x, torch.Tensor))
        )
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        run = ctx.run
        if run is None:
            raise RuntimeError("stream: backward ran already; what it needs is freed. Call the model again")
        ctx.run = None
        return None, *run.backward(grads)
