"""What one rank computes in a windowed op."""

from __future__ import annotations

from typing import NamedTuple

from torchhalo.geometry import Box, Grid, Span


class Task(NamedTuple):
    """Where one rank stands in a windowed op.

    Attributes:
        coordinate: Its place in the mesh.
        owned: What it owns of the source, all dims.
        outputs: What it owns of the target, all dims.
        region: What the kernel is given of the source (forward), or must give of its gradient (adjoint), over ``dims``.
        dims: The dims that are sharded and have a window.
        padding: By how much the kernel is to pad the region itself, along ``dims``; if empty, not at all.
    """

    coordinate: tuple[int, ...]
    owned: Box
    outputs: Box
    region: Box | Grid
    dims: tuple[int, ...]
    padding: tuple[int, ...] = ()

    def part(self, target: Box, region: Box, padding: tuple[int, ...] = ()) -> Task:
        """The same for a part of the outputs, given along ``dims``."""
        spans = dict(zip(self.dims, target.spans, strict=True))
        outputs = Box(tuple(spans.get(dim, span) for dim, span in enumerate(self.outputs.spans)))
        return self._replace(outputs=outputs, region=region, padding=padding)

    def held(self, dim: int) -> Span:
        """The span of the source along ``dim`` that the region holds; not for a region that is a grid."""
        assert isinstance(self.region, Box)
        return self.region.spans[self.dims.index(dim)] if dim in self.dims else self.owned.spans[dim]

    def where(self, dim: int, span: Span) -> slice:
        """Where ``span`` of the source, which lies in one run of the region, is along ``dim`` of the region's tensor."""
        if dim not in self.dims:
            return span.within(self.owned.spans[dim].start)
        index = self.dims.index(dim)
        line = Box((self.region.spans[index],)) if isinstance(self.region, Box) else Grid((self.region.runs[index],))
        return Box((span,)).within(line)[0]
