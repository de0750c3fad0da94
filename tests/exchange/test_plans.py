"""Plans of exchanges, against sets of elements: they agree on all ranks and carry no byte too many."""

from __future__ import annotations

import random

import pytest
import torch
from exchange_cases import Case, cases, counted, fiber, holds, inside, mesh_of, messages, owned, wanted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchhalo.geometry import Box, Mirror, Span, Window

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
            assert all(not (box.size and not holds(plans[peer].owned, box)) for box in sent[here])
    assert exchange.needed() == anything


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
