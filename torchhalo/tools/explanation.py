"""What `explain` found: data classes, and the table that they print."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from torchhalo.exchange.layout import Layout
from torchhalo.tools.text import readable, size_text

#: Seconds per message.
LATENCY = 1e-5


@dataclass
class Layer:
    """What a module itself, without those inside it, does in a step on one rank.

    Attributes:
        path: Of the module; empty for the model itself.
        kind: Its class.
        output: The global shape of what it returned.
        shard: The rank's part of that.
        halo: By dim, how many elements it needs before and after its own, in the forward's exchange with the most.
        source: Shape, mesh and cuts of the tensor that these are elements of.
        sent: Bytes of halos, forward and backward.
        messages: In how many pieces, to how many ranks.
        reduced: Bytes of statistics and sums that it takes part with.
        gathered: Bytes that it receives because an op needs the whole of a sharded activation.
        moved: Bytes, among those sent, by which an activation goes from one sharding to another.
        kept: Bytes of activations that live on when the forward has ended.
        flops: Of convolutions, matrix products and attention, forward and backward.
    """

    path: str
    kind: str = ""
    output: tuple[int, ...] = ()
    shard: tuple[int, ...] = ()
    halo: dict[int, tuple[int, int]] = field(default_factory=dict)
    source: Layout | None = None
    sent: int = 0
    messages: int = 0
    reduced: int = 0
    gathered: int = 0
    moved: int = 0
    kept: int = 0
    flops: int = 0


@dataclass
class Rank:
    """A step on one rank.

    Attributes:
        place: Of the rank in the mesh.
        layers: In the order in which they begin.
        gradients: Bytes of the parameters' gradients that are summed over the mesh.
        peak: The most bytes of tensors at a time: parameters, gradients, activations, buffers for halos; not the optimizer's
            state, nor what kernels take for themselves.
    """

    place: tuple[int, ...]
    layers: list[Layer]
    gradients: int
    peak: int

    def total(self, name: str) -> int:
        """The sum over the layers of one of their numbers."""
        return sum(getattr(layer, name) for layer in self.layers)


@dataclass
class Explanation:
    """What `explain` found.

    Attributes:
        model: Its name.
        inputs: The global shapes.
        mesh: The shape of the mesh.
        dims: Along which dim each axis cuts the inputs.
        dtype: Of weights and inputs.
        train: Whether a step has a backward.
        ranks: Those that were looked at: the corners of the mesh and those between, which have neighbours on both sides.
        alone: The peak of one device that runs it all.
    """

    model: str
    inputs: list[tuple[int, ...]]
    mesh: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: str
    train: bool
    ranks: list[Rank]
    alone: int

    @property
    def busiest(self) -> Rank:
        """The rank that sends the most."""
        return max(self.ranks, key=lambda rank: rank.total("sent"))

    @property
    def peak(self) -> int:
        """Of the rank that needs the most memory."""
        return max(rank.peak for rank in self.ranks)

    def seconds(self, flops: float, bandwidth: float) -> tuple[float, float]:
        """How long a step takes at these operations and bytes per second, if all communication is hidden, and if none is."""
        rank, ranks = self.busiest, math.prod(self.mesh)
        around = 2 * (ranks - 1) / ranks * (rank.total("reduced") + rank.gradients)
        sent = (rank.total("sent") + rank.total("gathered") + around) / bandwidth + LATENCY * rank.total("messages")
        compute = rank.total("flops") / flops
        return max(compute, sent), compute + sent

    def json(self) -> str:
        """All of it, for programs."""
        return json.dumps({**asdict(self), "peak": self.peak}, indent=2)

    def __str__(self) -> str:
        return "\n".join(_table(self))

    def _repr_html_(self) -> str:
        from torchhalo.tools import report  # which imports this module

        return report.frame(self)


def _table(found: Explanation) -> Iterator[str]:
    rank = found.busiest
    head = "layer", "output", "shard", "halo", "sent", "messages", "kept", "GFLOP", ""
    rows = [head]
    for layer in rank.layers:
        halo = " ".join(f"{dim}:{before}+{after}" for dim, (before, after) in sorted(layer.halo.items()))
        rows.append(
            (
                layer.path or "(model)",
                size_text(layer.output),
                size_text(layer.shard),
                halo,
                readable(layer.sent),
                str(layer.messages or ""),
                readable(layer.kept),
                f"{layer.flops / 1e9:.3g}" if layer.flops else "",
                " ".join(
                    f"{what} {readable(size)}" for what, size in (("GATHERS", layer.gathered), ("moves", layer.moved)) if size
                ),
            )
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    step = "a training step" if found.train else "a forward"
    shapes = ", ".join(size_text(shape) or "a number" for shape in found.inputs)
    yield f"{found.model}: {step} on {shapes} {found.dtype}, dims {found.dims} over a mesh of {size_text(found.mesh)}"
    yield f"the rank that sends the most, at {rank.place}:"
    yield ""
    for row in rows:
        cells = [
            cell.ljust(width) if at < 4 else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
    yield ""
    yield f"halos sent per step     {readable(rank.total('sent')) or '0'} in {rank.total('messages')} messages"
    yield f"statistics and sums     {readable(rank.total('reduced')) or '0'}"
    if found.train:
        yield f"gradients summed        {readable(rank.gradients) or '0'}"
    gathered = rank.total("gathered")
    yield f"gathered                {readable(gathered) or 'nothing'}"
    yield f"moved to other shards   {readable(rank.total('moved')) or 'nothing'}"
    yield f"operations              {rank.total('flops') / 1e9:,.1f} GFLOP"
    share = f"{found.peak / found.alone:.2f} of one device's {readable(found.alone)}"
    yield f"peak memory per rank    {readable(found.peak)}, {share}"
