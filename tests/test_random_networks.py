"""Random networks of all families of ops are exact, sharded over gloo ranks: output, all gradients, all buffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pools import Pool
from random_networks.network import BLOCKS, Network, build, compare, draw
from random_networks.runner import joined

COUNTS = {2: 60, 3: 20, 4: 20}  # of networks, by the number of ranks


def test_kinds_of_blocks() -> None:
    """There are blocks of all families, and the networks of these tests hold nearly all."""
    drawn = {kind for ranks, count in COUNTS.items() for seed in range(count) for kind, _ in draw(seed, ranks).blocks}
    assert len(BLOCKS) >= 60 and len(drawn) >= 60


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), COUNTS.items())
def test_random_networks_are_exact(ranks: int, count: int, pool: Callable[[int], Pool]) -> None:
    ends = {}
    for seed in range(count):
        network = draw(seed, ranks)
        result = joined(pool(ranks).run(compare, network))
        ends[seed] = result.kind
        assert result.kind in ("exact", "unstable", "void"), f"{network}\n{build(network)}\n{result.kind}: {result.text}"
    assert list(ends.values()).count("exact") > 0.8 * count


def test_a_fault_is_found(pool: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs by the number of ranks alone is wrong: here, a block that adds that number."""
    network = Network(1, (1, 2, 4, 4), (2,), (2,), (("convolution", 1),))
    results = pool(2).run(compare_with_fault, network)
    assert {result.kind for result in results} == {"wrong"}
    assert "output" in results[0].text and "gradient of the input" in results[0].text


def compare_with_fault(network: Network) -> object:
    from random_networks.block import Block
    from torch.distributed.tensor import DTensor

    kept = BLOCKS["convolution"]
    BLOCKS["convolution"] = lambda r, n, c, *s: Block(lambda m, x: x * x * 1.001 if isinstance(x, DTensor) else x * x)
    try:
        return compare(network)
    finally:
        BLOCKS["convolution"] = kept
