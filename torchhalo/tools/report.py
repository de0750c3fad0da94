"""What `explain` found, to look at: a page, a picture for papers, a picture of pixels."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import torch

from torchhalo.exchange.layout import Layout
from torchhalo.tools import picture
from torchhalo.tools.drawing import CROWD, Area, Cut, Mark, draw, height, in_proportion, square
from torchhalo.tools.explanation import Explanation, Layer, Rank
from torchhalo.tools.text import readable, size_text

PAGE = Path(__file__).with_name("report.html")

COLOURS = {
    "image": "#eef1f5",
    "others": "#f8d9b8",
    "own": "#a9c9f5",
    "sent": "#1f5fbf",
    "halo": "#d9600a",
    "line": "#4a5361",
    "element": "#c3cad4",
    "kept": "#1f5fbf",
    "bytes": "#d9600a",
}

LEGEND = {"own": "owned", "halo": "needed too", "sent": "sent", "others": "needed by others"}

COLUMNS = "Layer", "Kept", "Sent", "GFLOP", "Halo", "Output"


def html(found: Explanation) -> str:
    """One page that needs nothing but itself: totals, the cut input, a chart, and, layer by layer, what each rank does.

    Example:
        >>> page = html(torchhalo.explain(torch.nn.Conv2d(3, 8, 3, padding=1), (1, 3, 256, 256), (2, 2)))
        >>> page[:15]
        '<!doctype html>'
    """
    start = found.ranks.index(found.busiest)
    drawings: list[str] = []
    layers = [_layer(found, layer, drawings) for layer in found.busiest.layers]
    data = {"ranks": [_place(rank) for rank in found.ranks], "start": start, "layers": layers, "drawings": drawings}
    parts = {
        "title": escape(f"{found.model} on a mesh of {size_text(found.mesh)}"),
        "about": escape(_about(found)),
        "totals": "\n".join(
            f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>" for name, value, note in _totals(found)
        ),
        "input": _input(found),
        "scale": "All is to scale."
        if in_proportion(_input_cut(found))
        else "Rows and columns are to scale, each to one of its own.",
        "chart": _chart(found.busiest.layers),
        "busiest": _place(found.busiest),
        "head": "".join(f'<th scope="col">{name}</th>' for name in COLUMNS),
        "rows": "\n".join(_row(at, layer) for at, layer in enumerate(found.busiest.layers)),
        "ranks": "\n".join(_button(found, at) for at in range(len(found.ranks))),
        "sampled": _sampled(found),
        "data": json.dumps(data).replace("<", "\\u003c"),
    }
    page = PAGE.read_text(encoding="utf-8")
    head, *rest = page.split("{{")
    return head + "".join(parts[piece.split("}}", 1)[0]] + piece.split("}}", 1)[1] for piece in rest)


def frame(found: Explanation) -> str:
    """The page within another, for notebooks: its styles stay its own."""
    style = "width:100%;height:48rem;border:1px solid #8884;border-radius:8px"
    return f'<iframe title="torchhalo explain" style="{style}" srcdoc="{escape(html(found))}"></iframe>'


def svg(found: Explanation) -> str:
    """A picture for papers and READMEs: the input cut into shards, a corner of one with its halo, and bars for the layers.

    Everything is to scale; as a halo of a few elements is thinner than a line, the corner shows single elements.

    Example:
        >>> svg(torchhalo.explain(torch.nn.Conv2d(3, 8, 3, padding=1), (1, 3, 256, 256), (2, 2)))[:4]
        '<svg'
    """
    marks, texts, size = _composed(found)
    words = "".join(f'<text x="{x:g}" y="{y:g}">{escape(text)}</text>' for x, y, text in texts)
    style = "".join(f".{kind}{{fill:{colour}}}" for kind, colour in COLOURS.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" height="{size[1]}" '
        f'role="img"><title>{escape(_about(found))}</title>'
        f"<style>{style} text{{font:13px system-ui,sans-serif;fill:#1c2330}}</style>"
        f'<rect width="{size[0]}" height="{size[1]}" fill="#ffffff"/>{_rects(marks)}{words}</svg>\n'
    )


def png(found: Explanation, scale: int = 2) -> bytes:
    """The picture of `svg` in pixels, ``scale`` of them for each of its units, in the capitals that `picture` has.

    Example:
        >>> png(torchhalo.explain(torch.nn.Conv2d(3, 8, 3, padding=1), (1, 3, 256, 256), (2, 2)))[1:4]
        b'PNG'
    """
    marks, texts, (width, tall) = _composed(found)
    pixels = torch.full((3, tall * scale, width * scale), 255, dtype=torch.uint8)
    for mark in marks:
        colour = torch.tensor([int(COLOURS[mark.kind][at : at + 2], 16) for at in (1, 3, 5)], dtype=torch.uint8)
        rows, columns = _pixels(mark.y, mark.height, scale), _pixels(mark.x, mark.width, scale)
        pixels[:, rows, columns] = colour.view(3, 1, 1)
    for x, y, text in texts:
        picture.write(pixels, text, round(x * scale), round((y - 10) * scale), 2 * scale)
    return picture.png(pixels)


def _composed(found: Explanation) -> tuple[list[Mark], list[tuple[float, float, str]], tuple[int, int]]:
    """Marks, texts with their places, and the size of the picture that `svg` and `png` show."""
    cut, place = _input_cut(found), found.busiest.place
    tall, field = height(cut, 460), cut.corner(place)
    marks = draw(cut, place, cut.whole, Area(20, 64, 460, tall)) + draw(cut, place, field, Area(500, 64, *square(field, 240)))
    model, mesh = found.model.rpartition(":")[2], size_text(found.mesh)
    texts: list[tuple[float, float, str]] = [
        (20, 26, f"{model}, {size_text(found.inputs[0])}, over {mesh} ranks"),
        (20, 54, f"input and shard of rank {_place(found.busiest)}"),
        (500, 54, f"its corner, {field.shape[0]} of {cut.whole.shape[0]} rows"),
    ]
    y = 64 + max(tall, 240) + 24
    for x, (kind, text) in zip((20, 150, 280, 410), LEGEND.items(), strict=True):
        marks.append(Mark(kind, x, y - 10, 12, 12))
        texts.append((x + 18, y, text))
    groups = _grouped(found.busiest.layers)
    most = [max(1, *sizes) for sizes in zip(*[(kept, sent) for _, kept, sent in groups], strict=True)]
    y += 38
    texts += [(170, y, "memory kept"), (470, y, "halos sent")]
    for name, *sizes in groups:
        y += 20
        texts.append((20, y, name))
        for x, kind, size, largest in zip((170, 470), ("kept", "bytes"), sizes, most, strict=True):
            marks += [Mark(kind, x, y - 10, 180 * size / largest, 12)] if size else []
            texts.append((x + 8 + 180 * size / largest, y, readable(size) or "0"))
    return marks, texts, (760, round(y) + 20)


def _grouped(layers: Sequence[Layer], most: int = 16) -> list[tuple[str, int, int]]:
    """Name, memory and bytes of the layers that have any; where these are many, of the modules that hold them."""
    chosen = [layer for layer in layers if layer.kept or layer.sent] or list(layers[:1])
    paths = [layer.path.split(".") for layer in chosen]
    for depth in range(max(map(len, paths)), 0, -1):
        groups: dict[str, list[Layer]] = {}
        for path, layer in zip(paths, chosen, strict=True):
            groups.setdefault(".".join(path[:depth]), []).append(layer)
        if len(groups) <= most:
            break
    else:
        step = -(-len(chosen) // most)
        groups = {chosen[at].path + " to": chosen[at : at + step] for at in range(0, len(chosen), step)}
    return [
        (_short(path or "(model)"), sum(layer.kept for layer in group), sum(layer.sent for layer in group))
        for path, group in groups.items()
    ]


def _short(name: str, most: int = 17) -> str:
    return name if len(name) <= most else ".." + name[2 - most :]


def _pixels(start: float, size: float, scale: int) -> slice:
    """Those that a stretch covers; never none."""
    first = round(start * scale)
    return slice(first, max(first + 1, round((start + size) * scale)))


def _rects(marks: Iterable[Mark]) -> str:
    return "".join(
        f'<rect class="{kind}" x="{_short_number(x)}" y="{_short_number(y)}" width="{_short_number(width)}" '
        f'height="{_short_number(tall)}"/>'
        for kind, x, y, width, tall in marks
    )


def _short_number(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")


def _drawing(cut: Cut, place: tuple[int, ...], area: Area, closer: bool) -> str:
    """A picture for the page: of the whole, or closer."""
    field = cut.corner(place) if closer else cut.whole
    owned, needs = cut.owned(place), cut.needs(place)
    what = "A corner of what" if closer else "What"
    (top, bottom), (left, right) = (
        (own.start - need.start, need.stop - own.stop) for own, need in zip(owned.spans, needs.spans, strict=True)
    )
    about = (
        f"{what} rank {', '.join(map(str, place))} owns: rows {owned.spans[0].start} to {owned.spans[0].stop} and columns "
        f"{owned.spans[1].start} to {owned.spans[1].stop} of {cut.whole.shape[0]} by {cut.whole.shape[1]}. It needs {top} more "
        f"above, {bottom} below, {left} left, {right} right."
    )
    return (
        f'<svg viewBox="0 0 {_short_number(area.width)} {_short_number(area.height)}" role="img"><title>{about}</title>'
        f"{_rects(draw(cut, place, field, area))}{'' if closer else _labels(cut, place, area)}</svg>"
    )


def _labels(cut: Cut, place: tuple[int, ...], area: Area) -> str:
    """The ranks' places on their shards, where there is room."""
    peers, (tall, wide) = cut.peers(place), cut.whole.shape
    if len(peers) > CROWD:
        return ""
    found = []
    for peer in peers:
        rows, columns = cut.owned(peer).spans
        if rows.size and columns.size:
            x, y = ((span.start + span.stop) / 2 for span in (columns, rows))
            text = ", ".join(map(str, peer))
            found.append(f'<text x="{x / wide * area.width:.1f}" y="{y / tall * area.height:.1f}">{text}</text>')
    return "".join(found)


def _input_cut(found: Explanation) -> Cut:
    """The first input, with the halos of the first layer that needs any, if it needs them of a tensor of that size."""
    layout = _cut_by_dims(found, found.inputs[0])
    for layer in found.busiest.layers:
        if layer.source is not None:
            same = layer.source.cuts == layout.cuts and all(layer.source.shape[dim] == layout.shape[dim] for dim in found.dims)
            return _cut(found, layer) or Cut(layout, {}) if same else Cut(layout, {})
    return Cut(layout, {})


def _cut_by_dims(found: Explanation, shape: tuple[int, ...]) -> Layout:
    axes = range(len(found.mesh))
    return Layout(
        shape, found.mesh, tuple(tuple(axis for axis in axes if found.dims[axis] == dim) for dim in range(len(shape)))
    )


def _output(found: Explanation, path: str) -> Layout | None:
    """How a layer's output is cut, if as the input is."""
    layers = {rank.place: layer for rank in found.ranks for layer in rank.layers if layer.path == path}
    layout = _cut_by_dims(found, next(iter(layers.values())).output)
    if len(layout.shape) <= max(found.dims):
        return None
    return layout if all(layout.owned(place).shape == layer.shard for place, layer in layers.items()) else None


def _cut(found: Explanation, layer: Layer) -> Cut | None:
    """What the layer needs halos of; or, where it needs none, what it returns; None if that is not cut."""
    layers = {rank.place: other for rank in found.ranks for other in rank.layers if other.path == layer.path}
    source = max(layers.values(), key=lambda other: sum(map(sum, other.halo.values()))).source
    layout = source or _output(found, layer.path)
    if layout is None:
        return None
    return Cut(layout, {place: other.halo for place, other in layers.items() if source and other.source == source})


def _layer(found: Explanation, layer: Layer, drawings: list[str]) -> dict[str, object]:
    """What the page tells of a layer, with numbers of drawings; new ones are added to ``drawings``."""
    cut, output = _cut(found, layer), _output(found, layer.path)
    rows, pictures = [], []
    for rank in found.ranks:
        mine = next((other for other in rank.layers if other.path == layer.path), Layer(layer.path))
        owns = _box(output, rank.place) if output else size_text(mine.shard) or "nothing returned"
        sends = f"{readable(mine.sent)} in {mine.messages} messages" if mine.sent else "nothing"
        rows.append([owns, _halo(mine), sends, readable(mine.kept) or "0"])
        pictures.append([_number(drawings, text) for text in _pair(cut, rank.place)] if cut else [])
    facts = [
        ("Kind", layer.kind or "outside of modules"),
        ("Output", size_text(layer.output) or "none"),
        ("Statistics and sums", readable(layer.reduced) or "none"),
        ("Gathered", readable(layer.gathered) or "nothing"),
        ("Moved to other shards", readable(layer.moved) or "nothing"),
    ]
    shown = size_text(cut.layout.shape) if cut else ""
    what = ("input" if cut.halos else "output") + " " + shown if cut else ""
    return {"name": layer.path or "(model)", "facts": facts, "rows": rows, "pictures": pictures, "what": what}


def _pair(cut: Cut, place: tuple[int, ...]) -> list[str]:
    whole = _drawing(cut, place, Area(0, 0, 640, height(cut, 640)), closer=False)
    corner = Area(0, 0, *square(cut.corner(place), 320))
    return [whole, _drawing(cut, place, corner, closer=True)] if cut.halos else [whole]


def _number(drawings: list[str], text: str) -> int:
    if text not in drawings:
        drawings.append(text)
    return drawings.index(text)


def _box(layout: Layout, place: tuple[int, ...]) -> str:
    """Such as ``[:, :, 0:512, 384:768]``."""
    spans = zip(layout.owned(place).spans, layout.cuts, strict=True)
    return "[" + ", ".join(f"{span.start}:{span.stop}" if axes else ":" for span, axes in spans) + "]"


def _halo(layer: Layer) -> str:
    """Such as ``dim 2: 1 before; dim 3: 1 before, 1 after``."""
    named = {
        dim: ", ".join(f"{count} {side}" for count, side in zip(sides, ("before", "after"), strict=True) if count)
        for dim, sides in sorted(layer.halo.items())
    }
    return "; ".join(f"dim {dim}: {text}" for dim, text in named.items() if text) or "nothing more"


def _place(rank: Rank) -> str:
    return ", ".join(map(str, rank.place))


def _about(found: Explanation) -> str:
    step = "a training step" if found.train else "a forward"
    shapes = " and ".join(size_text(shape) or "a number" for shape in found.inputs)
    mesh = size_text(found.mesh)
    return f"{found.model}: {step} on {shapes} {found.dtype}, dims {found.dims} over a mesh of {mesh}"


def _totals(found: Explanation) -> list[tuple[str, str, str]]:
    rank = found.busiest
    gathered = rank.total("gathered")
    totals = [
        (
            "Peak memory per rank",
            readable(found.peak),
            f"{found.peak / found.alone:.1%} of one device's {readable(found.alone)}",
        ),
        ("Halos sent per step", readable(rank.total("sent")) or "0", f"in {rank.total('messages')} messages"),
        ("Statistics and sums", readable(rank.total("reduced")) or "0", "reduced over the mesh"),
        ("Gathered", readable(gathered) or "nothing", "an op needs the whole" if gathered else "no op needs the whole"),
        ("Moved to other shards", readable(rank.total("moved")) or "nothing", "from one sharding to another"),
        ("Operations", f"{rank.total('flops') / 1e9:,.1f} GFLOP", "convolutions, products, attention"),
    ]
    return [*totals, ("Gradients summed", readable(rank.gradients) or "0", "over the mesh")] if found.train else totals


def _input(found: Explanation) -> str:
    return "".join(_pair(_input_cut(found), found.busiest.place))


def _chart(layers: Sequence[Layer]) -> str:
    """Bars of memory above, of bytes below, a pair for each layer, and over each pair an area to click at."""
    wide = 10 * max(12, len(layers))
    kept, sent = (max([1, *(getattr(layer, name) for layer in layers)]) for name in ("kept", "sent"))
    found = []
    for at, layer in enumerate(layers):
        up, down = 100 * layer.kept / kept, 100 * layer.sent / sent
        marks = [Mark("kept", 10 * at + 1, 100 - up, 8, up), Mark("bytes", 10 * at + 1, 102, 8, down)]
        name = escape(f"{layer.path or '(model)'}: keeps {readable(layer.kept) or '0'}, sends {readable(layer.sent) or '0'}")
        hit = f'<rect class="hit" x="{10 * at}" y="0" width="10" height="202"/>'
        found.append(f'<g data-layer="{at}"><title>{name}</title>{hit}{_rects(marks)}</g>')
    about = f"Memory kept and bytes sent by each of {len(layers)} layers. The table has the numbers."
    return (
        f'<p class="axis"><span class="key kept"></span>memory kept, up to {readable(kept)}</p>'
        f'<svg class="chart" viewBox="0 0 {wide} 202" preserveAspectRatio="none" role="img" aria-label="{about}">'
        f'{"".join(found)}<rect class="line" x="0" y="100.5" width="{wide}" height="1"/></svg>'
        f'<p class="axis"><span class="key bytes"></span>halos sent, up to {readable(sent)}</p>'
    )


def _row(at: int, layer: Layer) -> str:
    halo = " ".join(f"{dim}:{before}+{after}" for dim, (before, after) in sorted(layer.halo.items()))
    name = escape(layer.path or "(model)")
    kind = _small(escape(layer.kind))
    sent = readable(layer.sent) + _small(f"{layer.messages} messages" if layer.messages else "")
    gathered = _small(f"gathers {readable(layer.gathered)}" if layer.gathered else "")
    flops = f"{layer.flops / 1e9:.3g}" if layer.flops else ""
    output = size_text(layer.output) + _small(f"shard {size_text(layer.shard)}" if layer.shard else "")
    numbers, texts = [readable(layer.kept), sent + gathered, flops], [halo, output]
    kinds = [' class="number"'] * len(numbers) + [""] * len(texts)
    cells = "".join(
        f'<td{kind} data-label="{name}">{text}</td>'
        for kind, name, text in zip(kinds, COLUMNS[1:], numbers + texts, strict=True)
    )
    button = f'<button type="button" data-layer="{at}" tabindex="-1">{name}</button>'
    return f'<tr data-layer="{at}"><th scope="row">{button}{kind}</th>{cells}</tr>'


def _small(text: str) -> str:
    return f"<small>{text}</small>" if text else ""


def _button(found: Explanation, at: int) -> str:
    """Of a rank, where it lies in the mesh; the places between those that were looked at are left out."""
    columns = sorted({rank.place[-1] for rank in found.ranks})
    style = f"grid-column:{columns.index(found.ranks[at].place[-1]) + 1}"
    label = _place(found.ranks[at])
    state = f'data-rank="{at}" aria-pressed="false" aria-label="rank {label}"'
    return f'<button type="button" {state} style="{style}">{label}</button>'


def _sampled(found: Explanation) -> str:
    some = len(found.ranks) < math.prod(found.mesh)
    return (
        "Of the ranks between the ends of an axis one is shown. The others do the same, up to the rounding of shard sizes."
        if some
        else ""
    )
