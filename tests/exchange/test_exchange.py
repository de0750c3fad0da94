"""The exchange and its fold against brute force: plans on paper, then the same checks on simulated and on real ranks."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from exchange_cases import Case, Coordinate, cases, delivered, fiber, holds, mesh_of, owned, seeded_cases, wanted
from harness import DEVICE, simulated
from hypothesis import HealthCheck, given, settings
from pools import Pool
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh

from torchhalo.exchange.assembly import assemble, recipe
from torchhalo.exchange.plan import Exchange, Plan
from torchhalo.exchange.transfer import cut_back, cut_own, fold, group_places, received, start
from torchhalo.geometry import Box, Mirror, Span
from torchhalo.torch_internals import process_groups, simulation


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
    if any(plan.receives and any(holds(plan.needs, part) for part in parts - {plan.owned}) for plan in plans.values()):
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
