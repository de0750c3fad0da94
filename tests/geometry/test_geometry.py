"""The integer arithmetic against brute force: every claim about spans and windows is checked on sets of integers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchhalo.geometry import Box, Grid, Intervals, Mirror, Piece, Pieces, Span, Window, boxes, chunks, hull, merge

many = settings(max_examples=2000, derandomize=True, deadline=None)
some = settings(max_examples=400, derandomize=True, deadline=None)

#: Any two coordinates, also the wrong way round: such a span is empty.
any_spans = st.builds(Span, st.integers(-12, 12), st.integers(-12, 12), st.just(1))
spans = st.builds(lambda start, size: Span(start, start + size), st.integers(-12, 12), st.integers(0, 9))
windows = st.builds(
    Window,
    kernel=st.integers(1, 6),
    stride=st.integers(1, 5),
    before=st.integers(-6, 8),
    after=st.integers(-6, 8),
    dilation=st.integers(1, 4),
)


def points(span: Span) -> set[int]:
    return set(range(*span))


def union(runs: tuple[Span, ...]) -> set[int]:
    return set().union(*map(points, runs))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*map(points, box.spans)))


def pairs(window: Window, outputs: Span) -> set[tuple[int, int]]:
    """Every (output, input) that the window relates, for these outputs."""
    return {(o, o * window.stride - window.before + k * window.dilation) for o in points(outputs) for k in range(window.kernel)}


def assert_runs(runs: tuple[Span, ...], expected: set[int]) -> None:
    """``runs`` hold the expected coordinates, in ascending order, none empty, and no two that could be one."""
    assert union(runs) == expected
    assert all(run.start < run.stop for run in runs)
    assert all(a.stop < b.start for a, b in pairwise(runs))


# Spans and boxes.


@settings(many, max_examples=600)
@given(any_spans, any_spans)
def test_spans_as_sets(a: Span, b: Span) -> None:
    assert a.size == len(points(a))
    assert points(a & b) == points(a) & points(b)
    assert (a & b).start <= (a & b).stop, "an intersection can be cut from a tensor, also an empty one"
    assert a.contains(b) == (points(b) <= points(a))


combs = st.builds(
    lambda start, size, step: Span(start, start + size, step), *[st.integers(-12, 12), st.integers(0, 20)], st.integers(1, 5)
)


@settings(many, max_examples=600)
@given(combs, any_spans)
def test_spans_with_a_step_as_sets(comb: Span, span: Span) -> None:
    assert comb.size == len(points(comb))
    assert points(comb & span) == points(comb) & points(span)
    assert (comb & span).size == len(points(comb) & points(span))
    both = points(comb & span)
    if both:
        assert hull([comb & span]) == Span(min(both), max(both) + 1)
    held = list(range(-12, 40))
    assert held[comb.within(-12)] == sorted(points(comb))


def test_span_within_a_tensor() -> None:
    held = list(range(3, 9))
    for start, stop in product(range(3, 10), range(3, 10)):
        assert held[Span(start, stop).within(3)] == sorted(points(Span(start, stop)))


box_pairs = st.integers(1, 3).flatmap(
    lambda ndim: st.tuples(*[st.lists(spans, min_size=ndim, max_size=ndim).map(lambda s: Box(tuple(s))) for _ in range(2)])
)


@some
@given(box_pairs)
def test_boxes_as_sets(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert a.size == len(elements(a))
    assert a.shape == tuple(len(points(span)) for span in a.spans)
    assert elements(a & b) == elements(a) & elements(b)


@some
@given(box_pairs)
def test_box_within_a_tensor(pair: tuple[Box, Box]) -> None:
    part, held = pair[0] & pair[1], pair[1]
    coordinates = [torch.tensor(list(range(*span)), dtype=torch.int64) for span in held.spans]
    grid = torch.stack(torch.meshgrid(*coordinates, indexing="ij"), dim=-1)
    cut = grid[part.within(held)]
    assert cut.shape[:-1] == part.shape
    assert {tuple(element) for element in cut.flatten(0, -2).tolist()} == elements(part)


def test_boxes_of_different_rank_do_not_mix() -> None:
    with pytest.raises(ValueError):
        Box((Span(0, 1),)) & Box((Span(0, 1), Span(0, 1)))


@some
@given(st.lists(st.lists(spans, max_size=3), min_size=1, max_size=3))
def test_boxes_of_a_product(runs: list[list[Span]]) -> None:
    assert [box.spans for box in boxes(runs)] == list(product(*runs))


@settings(many, max_examples=600)
@given(st.lists(any_spans, max_size=8))
def test_merge(given: list[Span]) -> None:
    merged = merge(given)
    assert_runs(merged, union(tuple(given)))
    covered = union(merged)
    least, most = min(covered, default=0), max(covered, default=-1)
    assert hull(merged) == Span(least, most + 1)


# Chunks.


def torch_chunks(whole: torch.Tensor, counts: tuple[int, ...]) -> list[list[int]]:
    """What `torch.chunk` gives, part by part, with the parts that it leaves out as empty ones."""
    if not counts:
        return [whole.tolist()]
    parts = list(whole.chunk(counts[0])) if len(whole) else []
    parts += [whole[len(whole) :]] * (counts[0] - len(parts))
    return [piece for part in parts for piece in torch_chunks(part, counts[1:])]


@settings(many, max_examples=600)
@given(st.integers(0, 40), st.lists(st.integers(1, 7), max_size=3).map(tuple))
def test_chunks_are_those_of_torch(size: int, counts: tuple[int, ...]) -> None:
    parts = chunks(size, counts)
    assert [list(range(*part)) for part in parts] == torch_chunks(torch.arange(size), counts)
    assert all(a.stop == b.start for a, b in pairwise(parts)), "without gaps, empty ones too, or no bisection finds them"
    assert (parts[0].start, parts[-1].stop) == (0, size)


def test_more_parts_than_elements() -> None:
    assert [part.size for part in chunks(3, (5,))] == [1, 1, 1, 0, 0]
    assert [part.size for part in chunks(2, (2, 2))] == [1, 0, 1, 0]
    assert [part.size for part in chunks(0, (3,))] == [0, 0, 0]


# Windows.


@some
@given(windows)
def test_output_size(window: Window) -> None:
    """An output counts if all that it reads lies inside the padded input, which starts with the first read of output 0."""
    for size in range(30):
        first, stop, fitting = -window.before, size + window.after, 0
        while all(first <= i < stop for _, i in pairs(window, Span(fitting, fitting + 1))):
            fitting += 1
        assert max(0, window.output_size(size)) == fitting


@some
@given(windows, st.integers(1, 30))
def test_output_size_is_that_of_convolution_and_pooling(window: Window, size: int) -> None:
    window = window._replace(before=abs(window.before), after=abs(window.before))
    assume(window.output_size(size) > 0)
    x = torch.empty(1, 1, size, device="meta")
    weight = torch.empty(1, 1, window.kernel, device="meta")
    out = F.conv1d(x, weight, stride=window.stride, padding=window.before, dilation=window.dilation)
    assert out.shape[2] == window.output_size(size)
    if window.before <= window.kernel // 2:
        pooled = F.max_pool1d(x, window.kernel, window.stride, window.before, window.dilation)
        assert pooled.shape[2] == window.output_size(size)


@many
@given(windows, spans)
def test_reads_are_exactly_what_is_read(window: Window, outputs: Span) -> None:
    read = {i for _, i in pairs(window, outputs)}
    runs = window.reads(outputs)
    assert union(runs) == read
    assert sum(run.size for run in runs) == len(read), "no input twice"
    assert len(runs) <= window.kernel, "however many the outputs"
    assert window.reach(outputs) == hull(runs)
    assert points(window.reach(outputs)) == set(range(min(read, default=0), max(read, default=-1) + 1))


@many
@given(windows, spans)
def test_touches_are_exactly_the_outputs_that_read(window: Window, inputs: Span) -> None:
    # Any output that reads these inputs lies in here: |o * stride| <= |i| + |before| + extent.
    touched = {o for o, i in pairs(window, Span(-55, 55)) if inputs.start <= i < inputs.stop}
    assert_runs(window.touches(inputs), touched)
    assert window.mirror.reads(inputs) == window.touches(inputs)
    assert window.mirror.touches(inputs) == window.reads(inputs)


@settings(many, max_examples=120)
@given(windows)
def test_mirror_is_the_reverse_relation(window: Window) -> None:
    assert window.mirror == Mirror(window) and window.mirror.mirror == window
    related = pairs(window, Span(-6, 7))
    for o, i in product(range(-6, 7), range(-9, 10)):
        output, input = Span(o, o + 1), Span(i, i + 1)
        found = [
            i in union(window.reads(output)),
            o in union(window.touches(input)),
            o in union(window.mirror.reads(input)),
            i in union(window.mirror.touches(output)),
        ]
        assert found == [(o, i) in related] * 4


@some
@given(windows, st.integers(1, 20), st.integers(0, 4))
def test_mirror_output_size_is_that_of_transposed_convolution(window: Window, size: int, output_padding: int) -> None:
    window = window._replace(before=abs(window.before), after=abs(window.before))
    assume(output_padding < max(window.stride, window.dilation))
    expected = window.mirror.output_size(size, output_padding)
    assume(expected > 0)
    out = F.conv_transpose1d(
        torch.empty(1, 1, size, device="meta"),
        torch.empty(1, 1, window.kernel, device="meta"),
        stride=window.stride,
        padding=window.before,
        output_padding=output_padding,
        dilation=window.dilation,
    )
    assert out.shape[2] == expected


@some
@given(windows, st.integers(1, 30))
def test_mirror_undoes_the_size(window: Window, size: int) -> None:
    """Some output padding below the stride brings a transposed window back to the size that the window started from."""
    sparse = window.output_size(size)
    assume(sparse > 0)
    assert size in {window.mirror.output_size(sparse, extra) for extra in range(window.stride)}


# The file.


# Grids, pieces and intervals.


@some
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=4), st.data())
def test_a_box_within_a_grid(parts: list[tuple[int, int, int]], data: st.DataObject) -> None:
    runs, start = [], data.draw(st.integers(-5, 5))
    for gap, count, step in parts:
        runs.append(Span(start + gap, start + gap + (count - 1) * step + 1, step))
        start = runs[-1].stop
    held = [point for run in runs for point in range(*run)]
    grid = Grid((tuple(runs), (Span(7, 9),)))
    assert grid.shape == (len(held), 2) and grid.size == 2 * len(held)
    run = data.draw(st.sampled_from(runs))
    cut = run & Span(*sorted((data.draw(st.integers(run.start, run.stop)), data.draw(st.integers(run.start, run.stop)))))
    first, second = Box((cut, Span(8, 9))).within(grid)
    assert held[first] == list(range(*cut)) and [7, 8][second] == [8]


def test_what_no_run_of_a_grid_holds_is_refused() -> None:
    grid = Grid(((Span(0, 2), Span(4, 9, 2)),))
    for span in (Span(1, 5), Span(2, 3), Span(5, 6), Span(9, 10)):
        with pytest.raises(ValueError, match="none of"):
            Box((span,)).within(grid)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Pieces, list[int]]:
    """Pieces, and for each output the input that it reads."""
    pieces, table = [], []
    for _ in range(draw(st.integers(1, 4))):
        count, first, sign = draw(st.integers(1, 5)), draw(st.integers(4, 9)), draw(st.sampled_from([-1, 0, 1]))
        pieces.append(Piece(Span(len(table), len(table) + count), first, sign))
        table += [first + sign * i for i in range(count)]
    return Pieces(tuple(pieces)), table


@some
@given(tables(), spans)
def test_pieces_read_what_their_table_says(given: tuple[Pieces, list[int]], span: Span) -> None:
    pieces, table = given
    reads = {table[o] for o in points(span) if 0 <= o < len(table)}
    assert_runs(pieces.reads(span), reads)
    assert pieces.reach(span) == hull(pieces.reads(span))
    assert_runs(pieces.touches(span), {o for o, i in enumerate(table) if i in points(span)})


@dataclass(frozen=True)
class Listed(Intervals):
    """Intervals from a list."""

    listed: tuple[tuple[int, int], ...]

    def interval(self, output: int) -> Span:
        return Span(*self.listed[output])


@some
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9), st.data())
def test_intervals_read_what_their_list_says(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    start, stop, listed = 0, 1, []
    for more, further in steps:
        start, stop = start + more, max(stop + further, start + more + 1)
        listed.append((start, stop))
    relation = Listed(inputs=stop, outputs=len(listed), listed=tuple(listed))
    a, b = sorted((data.draw(st.integers(0, len(listed))), data.draw(st.integers(0, len(listed)))))
    expected = set().union(*(range(*listed[o]) for o in range(a, b)))
    assert_runs(relation.reads(Span(a, b)), expected)
    assert relation.reach(Span(a, b)) == hull(relation.reads(Span(a, b)))
    c, d = sorted((data.draw(st.integers(0, stop)), data.draw(st.integers(0, stop))))
    touching = {o for o, interval in enumerate(listed) if set(range(*interval)) & set(range(c, d))}
    assert touching <= union(relation.touches(Span(c, d)))
    assert hull(relation.touches(Span(c, d))) == (Span(min(touching), max(touching) + 1) if touching else Span(0, 0))
