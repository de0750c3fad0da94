from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from harness import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """Gloo processes by number of ranks, started when first asked for."""
    pools: dict[int, Pool] = {}

    def get(ranks: int) -> Pool:
        if ranks not in pools or pools[ranks].broken:
            pools[ranks] = Pool(ranks)
        return pools[ranks]

    yield get
    for each in pools.values():
        each.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
