"""The exchange and its fold against brute force: plans on paper, then the same checks on simulated and on real ranks."""

from __future__ import annotations

import math
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from harness import DEVICE, Pool, simulated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh

from torchhalo.exchange.assembly import assemble, recipe
from torchhalo.exchange.layout import Layout
from torchhalo.exchange.plan import Exchange, Plan, exchange_between
from torchhalo.exchange.transfer import cut_back, cut_own, fold, group_places, received, start
from torchhalo.geometry import Box, Mirror, Span, Window
from torchhalo.torch_internals import process_groups, simulation

Coordinate = tuple[int, ...]
Integer = Callable[[int, int], int]


class Case(NamedTuple):
    """One random exchange.

    Attributes:
        ranks: The mesh, as nested lists.
        shape: Of the source: batch, channels, then one or two spatial sizes.
        homes: For each axis, the dim that it cuts, or -1.
        windows: One for each spatial dim.
        sizes: The target's, one for each spatial dim.
    """

    ranks: list[Any]
    shape: tuple[int, ...]
    homes: tuple[int, ...]
    windows: tuple[Window | Mirror, ...]
    sizes: tuple[int, ...]
    channels_last: bool

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        shape, level = [], self.ranks
        while isinstance(level, list):
            shape.append(len(level))
            level = level[0]
        return tuple(shape)

    @property
    def exchange(self) -> Exchange:
        cuts = tuple(tuple(axis for axis, home in enumerate(self.homes) if home == dim) for dim in range(len(self.shape)))
        source = Layout(self.shape, self.mesh_shape, cuts)
        target = Layout((*self.shape[:2], *self.sizes), self.mesh_shape, cuts)
        return exchange_between(source, target, dict(enumerate(self.windows, start=2)))

    @property
    def coordinates(self) -> list[Coordinate]:
        return list(product(*map(range, self.mesh_shape)))


def mesh_of(*shape: int) -> list[Any]:
    return torch.arange(math.prod(shape)).reshape(shape).tolist()


def random_case(integer: Integer, meshes: list[list[Any]]) -> Case:
    """A case from random integers, which hypothesis or `random` may supply."""
    ranks = meshes[integer(0, len(meshes) - 1)]
    ndim = 2 if integer(0, 2) else 1
    windows: list[Window | Mirror] = []
    sizes, source = [], []
    for _ in range(ndim):
        window = Window(integer(1, 5), integer(1, 3), integer(-2, 6), integer(-2, 6), integer(1, 3))
        enough = max(0, window.extent - window.before - window.after)  # for one output
        size = enough + integer(0, 9) if integer(0, 3) else integer(0, 5)
        if integer(0, 2):
            windows.append(window)
            sizes.append(max(0, window.output_size(size)))
        else:
            windows.append(window.mirror)
            sizes.append(max(0, window.mirror.output_size(size, integer(0, window.stride - 1))))
        source.append(size)
    dims = [*[2, ndim + 1] * 4, 0, -1]
    depth = len(Case(ranks, (), (), (), (), False).mesh_shape)
    homes = tuple(dims[integer(0, len(dims) - 1)] for _ in range(depth))
    shape = (integer(1, 2), integer(1, 2), *source)
    return Case(ranks, shape, homes, tuple(windows), tuple(sizes), bool(integer(0, 1)))


def cases(meshes: list[list[Any]]) -> st.SearchStrategy[Case]:
    @st.composite
    def build(draw: st.DrawFn) -> Case:
        return random_case(lambda low, high: draw(st.integers(low, high)), meshes)

    return build()


def seeded_cases(seed: int, count: int, meshes: list[list[Any]]) -> list[Case]:
    return [random_case(random.Random(seed * 1000 + i).randint, meshes) for i in range(count)]


# What should be, by brute force.


def related(window: Window | Mirror, output: int, input: int) -> bool:
    """Whether ``output`` reads ``input``."""
    if isinstance(window, Mirror):
        return related(window.window, input, output)
    taps, rest = divmod(input + window.before - output * window.stride, window.dilation)
    return rest == 0 and 0 <= taps < window.kernel


def wanted(exchange: Exchange, coordinate: Coordinate) -> torch.Tensor:
    """Which elements of the source, along the exchange's dims, the target's part at ``coordinate`` reads."""
    grid = torch.ones([exchange.source.shape[dim] for dim in exchange.dims], dtype=torch.bool)
    outputs = exchange.target.owned(coordinate)
    for place, (dim, window) in enumerate(zip(exchange.dims, exchange.windows, strict=True)):
        line = [any(related(window, o, i) for o in range(*outputs.spans[dim])) for i in range(exchange.source.shape[dim])]
        grid &= torch.tensor(line, dtype=torch.bool).reshape([-1 if d == place else 1 for d in range(grid.ndim)])
    return grid


def owned(exchange: Exchange, coordinate: Coordinate) -> torch.Tensor:
    box = exchange.source.owned(coordinate)
    return counted(exchange, [Box(tuple(box.spans[dim] for dim in exchange.dims))]) > 0


def counted(exchange: Exchange, boxes: list[Box] | tuple[Box, ...]) -> torch.Tensor:
    """How many of ``boxes`` hold each element; a box beyond the tensor raises."""
    sizes = [exchange.source.shape[dim] for dim in exchange.dims]
    grid = torch.zeros(sizes, dtype=torch.int64)
    for box in boxes:
        assert all(0 <= span.start <= span.stop <= size for span, size in zip(box.spans, sizes, strict=True))
        grid[tuple(slice(*span) for span in box.spans)] += 1
    return grid


def inside(grid: torch.Tensor) -> torch.Tensor:
    """The elements of the smallest box around those that are set, set too."""
    out = torch.zeros_like(grid)
    if grid.any():
        found = grid.nonzero()
        out[tuple(slice(int(a), int(b) + 1) for a, b in zip(found.amin(0), found.amax(0), strict=True))] = True
    return out


@lru_cache(maxsize=64)
def delivered(exchange: Exchange, coordinate: Coordinate) -> torch.Tensor:
    """Which elements `assemble` over ``plan.needs`` gives: all that are read, and those in between that the rank has anyway."""
    reads = wanted(exchange, coordinate)
    return reads | (inside(reads) & owned(exchange, coordinate))


def fiber(case: Case, coordinate: Coordinate) -> list[Coordinate]:
    """The ranks that take part in one exchange with ``coordinate``, in row-major order of the exchange's axes."""
    axes = case.exchange.axes
    return [c for c in case.coordinates if all(c[a] == coordinate[a] for a in range(len(c)) if a not in axes)]


def messages(boxes: tuple[Box, ...], counts: tuple[int, ...]) -> list[list[Box]]:
    """A plan's boxes by peer: they lie in the order of the group, and the counts say how many elements go to each."""
    queue, by_peer = list(boxes), []
    for count in counts:
        mine: list[Box] = []
        while sum(box.size for box in mine) < count:
            mine.append(queue.pop(0))
        assert sum(box.size for box in mine) == count
        by_peer.append(mine)
    assert not queue
    return by_peer


# Plans, on paper.

PAPER = [mesh_of(*shape) for shape in [(1,), (2,), (3,), (4,), (5,), (2, 2), (1, 3), (3, 1), (3, 3), (2, 3), (2, 2, 2)]]


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases(PAPER))
def test_plans_of_all_ranks_agree_and_carry_the_lower_bound(case: Case) -> None:
    """Each rank gets what it needs and does not own, each element once, and its peers know the very same messages."""
    exchange = case.exchange
    plans = {coordinate: exchange.plan(coordinate) for coordinate in case.coordinates}
    anything = False
    for coordinate, plan in plans.items():
        reads, has = wanted(exchange, coordinate), owned(exchange, coordinate)
        assert torch.equal(counted(exchange, plan.receives), (reads & ~has).long())
        assert torch.equal(counted(exchange, [plan.owned]) > 0, has)
        if reads.any():
            assert torch.equal(counted(exchange, [plan.needs]) > 0, inside(reads))
        assert sum(plan.received) == int((reads & ~has).sum())
        anything |= bool(plan.receives)

        peers = fiber(case, coordinate)
        here = peers.index(coordinate)
        received = messages(plan.receives, plan.received)
        assert len(plan.sent) == len(plan.received) == len(peers)
        assert not received[here] and not plan.sent[here], "nothing is sent to oneself"
        for there, peer in enumerate(peers):
            sent = messages(plans[peer].sends, plans[peer].sent)
            assert sent[here] == received[there]
            assert all(not (box.size and not _holds(plans[peer].owned, box)) for box in sent[here])
    assert exchange.needed() == anything


def _holds(outer: Box, inner: Box) -> bool:
    return inner & outer == inner


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases(PAPER), st.randoms(use_true_random=False))
def test_plans_follow_the_order_of_the_group(case: Case, shuffler: random.Random) -> None:
    """A group that lists its members in another order gets the same messages in that order."""
    exchange = case.exchange
    for coordinate in case.coordinates:
        plain = exchange.plan(coordinate)
        places = list(range(len(plain.sent)))
        shuffler.shuffle(places)
        moved = exchange.plan(coordinate, tuple(places))
        assert (moved.owned, moved.needs) == (plain.owned, plain.needs)
        for before, after in (
            (messages(plain.sends, plain.sent), messages(moved.sends, moved.sent)),
            (messages(plain.receives, plain.received), messages(moved.receives, moved.received)),
        ):
            assert before == [after[place] for place in places]


def test_corners_come_from_the_rank_that_owns_them() -> None:
    case = Case(mesh_of(3, 3), (1, 1, 9, 9), (2, 3), (Window(3, before=1, after=1),) * 2, (9, 9), False)
    plan = case.exchange.plan((1, 1))
    assert plan.received == (1, 3, 1, 3, 0, 3, 1, 3, 1)
    assert plan.needs == Box((Span(2, 7), Span(2, 7)))
    assert Box((Span(2, 3), Span(2, 3))) in plan.receives and Box((Span(6, 7), Span(6, 7))) in plan.receives


def test_gaps_of_a_dilated_window_are_not_sent() -> None:
    """Outputs 4 and 5 of a 1 x 3 kernel with dilation 4 read 0, 1, 4, 5, 8, 9 and nothing between."""
    case = Case(mesh_of(5), (1, 1, 10), (2,), (Window(3, before=4, after=4, dilation=4),), (10,), False)
    plan = case.exchange.plan((2,))
    assert plan.receives == (Box((Span(0, 2),)), Box((Span(8, 10),)))
    assert plan.received == (2, 0, 0, 0, 2) and plan.needs == Box((Span(0, 10),))


@pytest.mark.parametrize(
    "window, size, halos",
    [
        (Window(1), 8, False),
        (Window(2, stride=2), 8, False),
        (Window(2, stride=2), 6, True),
        (Window(3, before=1, after=1), 8, True),
        (Window(3, before=1, after=1), 1, False),
        (Window(1, before=-1), 6, True),
        (Window(2, stride=2).mirror, 4, False),
        (Window(3, stride=2, before=1, after=1).mirror, 4, True),
        (Window(3), 2, False),
    ],
    ids=str,
)
def test_nothing_is_sent_where_no_rank_lacks_anything(window: Window | Mirror, size: int, halos: bool) -> None:
    target = max(0, window.output_size(size))
    case = Case(mesh_of(2), (1, 1, size), (2,), (window,), (target,), False)
    assert case.exchange.needed() is halos


# The exchange itself. All values are whole numbers in float64, so that every comparison is exact.


def numbered(case: Case) -> torch.Tensor:
    """The source: a plain tensor whose elements differ and are never zero."""
    return torch.arange(1.0, math.prod(case.shape) + 1, dtype=torch.float64).reshape(case.shape)


def cotangent(case: Case, coordinate: Coordinate) -> torch.Tensor:
    """A random value for each element of the source, other on each rank."""
    generator = torch.Generator().manual_seed(case.coordinates.index(coordinate))
    return torch.randint(-99, 100, case.shape, generator=generator).double()


def spread(exchange: Exchange, grid: torch.Tensor) -> torch.Tensor:
    """A grid over the exchange's dims as one that multiplies the source."""
    shape = [exchange.source.shape[dim] if dim in exchange.dims else 1 for dim in range(len(exchange.source.shape))]
    return grid.reshape(shape)


def cut(case: Case, tensor: torch.Tensor, coordinate: Coordinate, region: Box | None = None) -> torch.Tensor:
    """What the rank holds of a tensor of the source's shape, or what ``region`` holds, in the memory format of the case."""
    spans = list(case.exchange.source.owned(coordinate).spans)
    for dim, span in zip(case.exchange.dims, region.spans if region else (), strict=False):
        spans[dim] = span
    part = tensor[tuple(slice(*span) for span in spans)]
    return part.contiguous(memory_format=memory_format(case)).clone()


def memory_format(case: Case) -> torch.memory_format:
    return torch.channels_last if case.channels_last and len(case.shape) == 4 else torch.contiguous_format


def assert_laid_out(case: Case, tensor: torch.Tensor, like: torch.Tensor) -> None:
    """``tensor`` lies in memory as ``like``, wherever the strides of that one leave no choice."""
    if tensor.numel() and like.numel() and like.shape[1] > 1 and math.prod(like.shape[2:]) > 1:
        assert tensor.is_contiguous(memory_format=memory_format(case)), (tensor.shape, tensor.stride(), like.stride())


def check(case: Case, mesh: DeviceMesh) -> list[tuple[float, float]]:
    """Run an exchange and its fold on the ranks of this process, then compare every element.

    Returns:
        For each rank, its terms of ``<A x, y>`` and of ``<x, A* y>``, whose sums over all ranks must be equal.
    """
    coordinate = process_groups.coordinate(mesh)
    if coordinate is None:
        return []
    exchange = case.exchange
    with maybe_disable_local_tensor_mode():
        source = numbered(case)
    terms: list[tuple[float, float]] = []

    def given(*coordinate: int) -> tuple[torch.Tensor, torch.Tensor]:
        needs = exchange.plan(coordinate).needs
        return cut(case, source, coordinate), cut(case, cotangent(case, coordinate), coordinate, needs)

    shard, pulled = simulation.per_rank(given, *coordinate)
    order = (0, *range(2, len(case.shape)), 1) if case.channels_last else None
    halo = start(shard, exchange, mesh, order)
    places = group_places(exchange, mesh)
    folded = fold(
        lambda plan, _, region: (cut_back(region, exchange, plan, exact=False), region),
        lambda plan, _, region, __: cut_own(region, exchange, plan, exact=False),
        exchange,
        mesh,
        pulled,
        order=order,
    )

    def compare(
        shard: torch.Tensor, halo: torch.Tensor | None, pulled: torch.Tensor, folded: torch.Tensor, *coordinate: int
    ) -> torch.Tensor:
        plan = exchange.plan(coordinate, places)
        pieces = received(halo, shard, exchange, plan, order)
        region = assemble(shard, pieces, exchange.dims, recipe(exchange, plan, plan.needs))
        known = source * spread(exchange, delivered(exchange, coordinate))
        assert torch.equal(region, cut(case, known, coordinate, plan.needs)), coordinate
        assert_laid_out(case, region, shard)
        assert_filled(case, shard, pieces, plan, coordinate)
        assert_part(case, shard, pieces, plan, coordinate)

        total = torch.zeros_like(source)
        for peer in fiber(case, coordinate):
            total += cotangent(case, peer) * spread(exchange, delivered(exchange, peer))
        assert torch.equal(folded, cut(case, total, coordinate)), coordinate
        assert_laid_out(case, folded, pulled)
        terms.append((float((region * pulled).sum()), float((shard * folded).sum())))
        return folded

    # Only now, when nothing is left to send: a rank on which an assertion fails must not leave the others waiting.
    assert (halo is None) == (not exchange.needed())
    simulation.per_rank(compare, shard, halo, pulled, folded, *coordinate)
    return terms


def assert_filled(case: Case, shard: torch.Tensor, pieces: list[torch.Tensor], plan: Plan, coordinate: Coordinate) -> None:
    """A region that reaches beyond the needs, and beyond the tensor, has what the rank owns or needs, and else the fill."""
    exchange, margin = case.exchange, 3
    if not plan.needs.size:
        return
    wider = Box(tuple(Span(span.start - 2, span.stop + margin) for span in plan.needs.spans))
    region = assemble(shard, pieces, exchange.dims, recipe(exchange, plan, wider), fill=-0.5)
    has = spread(exchange, wanted(exchange, coordinate) | owned(exchange, coordinate))
    pads = [n for dim in reversed(range(len(case.shape))) for n in [margin * (dim in exchange.dims)] * 2]
    known = torch.nn.functional.pad(torch.where(has, numbered(case), -0.5), pads, value=-0.5)
    moved = Box(tuple(Span(span.start + margin, span.stop + margin) for span in wider.spans))
    assert torch.equal(region, cut(case, known, coordinate, moved)), coordinate
    assert_laid_out(case, region, shard)


def assert_part(case: Case, shard: torch.Tensor, pieces: list[torch.Tensor], plan: Plan, coordinate: Coordinate) -> None:
    """A region within the needs, as strips want it, also where it cuts what was received."""
    exchange = case.exchange
    for first, last in ((1, 0), (0, 1), (1, 1)):
        part = Box(tuple(Span(span.start + first, span.stop - last) for span in plan.needs.spans))
        if part.size:
            region = assemble(shard, pieces, exchange.dims, recipe(exchange, plan, part))
            known = numbered(case) * spread(exchange, delivered(exchange, coordinate))
            assert torch.equal(region, cut(case, known, coordinate, part)), coordinate


def assert_adjoint(terms: list[tuple[float, float]], ranks: int) -> None:
    """``<A x, y> == <x, A* y>``, with the terms of every rank in it."""
    assert len(terms) == ranks
    assert math.fsum(left for left, _ in terms) == math.fsum(right for _, right in terms)


def kinds(case: Case) -> Iterator[str]:
    """What a case has in it that an exchange may stumble over."""
    exchange = case.exchange
    plans = {coordinate: exchange.plan(coordinate) for coordinate in case.coordinates}
    if not exchange.needed():
        yield "no halo"
    if len(exchange.dims) == 2 and any(plan.receives for plan in plans.values()):
        yield "two dims"
    if any(len(exchange.source.cuts[dim]) > 1 for dim in exchange.dims) and exchange.needed():
        yield "one dim over two axes"
    if any(not plan.owned.size and plan.receives for plan in plans.values()):
        yield "an empty shard with a halo"
    if len({plan.owned.size for plan in plans.values()}) > 1:
        yield "uneven shards"
    parts = {plan.owned for plan in plans.values() if plan.owned.size}
    if any(plan.receives and any(_holds(plan.needs, part) for part in parts - {plan.owned}) for plan in plans.values()):
        yield "a halo that swallows a shard"
    if any(plan.receives and int(delivered(exchange, c).sum()) < plan.needs.size for c, plan in plans.items()):
        yield "gaps"
    if any(isinstance(window, Mirror) for window in exchange.windows) and exchange.needed():
        yield "a mirror"
    if case.channels_last and len(case.shape) == 4 and case.shape[1] > 1:
        yield "channels last"
    if 0 in case.homes and exchange.needed():
        yield "a batch axis"
    if -1 in case.homes and exchange.needed():
        yield "a replicated axis"


KINDS = 11
EXAMPLES = {1: 15, 2: 60, 3: 60, 4: 80, 8: 20}
SIMULATED = [[(1,)], [(2,), (1, 2), (2, 1)], [(3,), (1, 3), (3, 1)], [(4,), (2, 2), (2, 1, 2)], [(2, 2, 2)]]


@pytest.mark.parametrize("shapes", SIMULATED, ids=str)
def test_random_exchanges_on_simulated_ranks(shapes: list[tuple[int, ...]]) -> None:
    meshes = [mesh_of(*shape) for shape in shapes]
    ranks = math.prod(shapes[0])
    with simulated(ranks):
        made = {shape: DeviceMesh(DEVICE, mesh) for shape, mesh in zip(shapes, meshes, strict=True)}

        @settings(max_examples=EXAMPLES[ranks], deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(cases(meshes))
        def run(case: Case) -> None:
            assert_adjoint(check(case, made[case.mesh_shape]), ranks)

        run()


# Real ranks.


def _check_all(cases: list[Case]) -> list[list[tuple[float, float]] | str]:
    """What `check` finds on this rank, or the failure, case by case."""
    meshes: dict[str, DeviceMesh] = {}
    found: list[list[tuple[float, float]] | str] = []
    for case in cases:  # every rank of the world makes every mesh, but only its members do anything with it
        if str(case.ranks) not in meshes:
            meshes[str(case.ranks)] = DeviceMesh(DEVICE, case.ranks)
    for case in cases:
        try:
            found.append(check(case, meshes[str(case.ranks)]))
        except AssertionError:
            found.append(traceback.format_exc())
    return found


def run_on(pool: Pool, cases: list[Case]) -> None:
    by_rank = pool.run(_check_all, cases)
    for case, found in zip(cases, zip(*by_rank, strict=True), strict=True):
        failures = [each for each in found if isinstance(each, str)]
        assert not failures, f"{case}\n" + "\n".join(failures)
        assert_adjoint([term for terms in found for term in terms], math.prod(case.mesh_shape))


#: Meshes in a world of 4: all of it, in order and not, with a group of its own for two axes of three, and parts of it, so
#: that the ranks belong to different numbers of groups, which must not keep them from finding each other.
REAL: list[list[Any]] = [
    mesh_of(4),
    mesh_of(2, 2),
    mesh_of(2, 1, 2),
    [[3, 1], [0, 2]],
    [[[2], [0]], [[3], [1]]],
    [1, 3],
    [3, 0, 2],
    [[0, 2, 3]],
    [[3], [1]],
]


def real_cases() -> list[Case]:
    """Four that need a halo and one that needs none, on each mesh."""
    chosen = []
    for seed, mesh in enumerate(REAL):
        drawn = seeded_cases(seed, 20, [mesh])
        chosen += [case for case in drawn if case.exchange.needed()][:4]
        chosen += [case for case in drawn if not case.exchange.needed()][:1]
    return chosen


def test_random_exchanges_on_real_ranks(pool: Callable[[int], Pool]) -> None:
    run_on(pool(4), real_cases())


def test_real_cases_hold_every_kind() -> None:
    """The cases are few, so they are chosen: none of the kinds may be missing."""
    found = Counter(kind for case in real_cases() for kind in kinds(case))
    assert len(found) == KINDS and min(found.values()) >= 2, found
    assert len(real_cases()) == 5 * len(REAL)


def test_mesh_of_three_real_ranks_out_of_order(pool: Callable[[int], Pool]) -> None:
    """One axis over the whole world, for which torch takes the world's own group."""
    chosen = [case for case in seeded_cases(7, 12, [[2, 0, 1]]) if case.exchange.needed()]
    assert len(chosen) >= 4
    run_on(pool(3), chosen)
