"""Runs random networks on pools of gloo ranks, and makes those that fail small."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from math import prod

from pools import Pool

from random_networks import network as networks
from random_networks.network import Network, Result

TIMEOUT = 60
FAILURES = ("wrong", "raised", "died", "broken")


class Runner:
    """Compares networks on gloo ranks that it starts when they are asked for."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def run(self, network: Network) -> Result:
        ranks = prod(network.mesh)
        if ranks not in self._pools or self._pools[ranks].broken:
            self._pools[ranks] = Pool(ranks, timeout=TIMEOUT)
        try:
            return joined(self._pools[ranks].run(networks.compare, network))
        except (AssertionError, EOFError, OSError) as error:
            self._pools[ranks].close()
            return Result("died", f"{type(error).__name__}: {error}")

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def shrink(self, network: Network, result: Result, most: int = 40) -> Network:
        """A smaller network that fails in the same way, or the same one."""
        for _ in range(most):
            smaller = next((other for other in simpler(network) if alike(self.run(other), result)), None)
            if smaller is None:
                break
            network = smaller
        return network


def joined(results: list[Result]) -> Result:
    """One result for all ranks: that of the first rank that failed."""
    return next((result for result in results if result.kind in FAILURES), results[0])


def alike(first: Result, second: Result) -> bool:
    """Whether they fail in the same way."""
    return first.kind == second.kind and (
        first.kind != "raised" or first.text.splitlines()[-1:] == second.text.splitlines()[-1:]
    )


def simpler(network: Network) -> list[Network]:
    """Networks with one thing less, the largest steps first."""
    blocks, found = network.blocks, []
    if len(blocks) > 1:
        found += [network._replace(blocks=(each,)) for each in blocks]
        found += [network._replace(blocks=blocks[:i] + blocks[i + 1 :]) for i in range(len(blocks))]
    if network.head:
        found.append(network._replace(head=False))
    if len(network.mesh) > 1:
        found += [network._replace(mesh=(2,), dims=(dim,)) for dim in network.dims]
    elif network.mesh[0] > 2:
        found.append(network._replace(mesh=(2,)))
    if network.memory != "usual":
        found.append(network._replace(memory="usual"))
    for dim, size in enumerate(network.shape):
        for less in {1 if dim < 2 else 4, size // 2, size - 1}:
            if 0 < less < size:
                found.append(network._replace(shape=(*network.shape[:dim], less, *network.shape[dim + 1 :])))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random_networks", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first network")
    parser.add_argument("--processes", type=int, help="ranks: 2, 3 or 4; any, if not given")
    parser.add_argument("--blocks", help="draw only these kinds, separated by commas; those that hold others still hold any")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--program", help="the text of one network, as a failure shows it, to run")
    options = parser.parse_args()
    seen = Counter[str]()
    runner, counts, kinds, gathers, start = Runner(), Counter[str](), Counter[str](), Counter[str](), time.monotonic()
    drawn = [eval(options.program, {"Network": Network})] if options.program else None
    try:
        for number in range(options.seed, options.seed + (1 if drawn else options.count)):
            network = (
                drawn[0] if drawn else networks.draw(number, options.processes, options.blocks and options.blocks.split(","))
            )
            result = runner.run(network)
            counts[result.kind] += 1
            kinds.update(kind for kind, _ in network.blocks)
            gathers.update(result.gathers)
            if result.kind in FAILURES:
                fault = f"{result.kind}: {result.text.splitlines()[-1]}" if result.kind == "raised" else result.kind
                seen[fault] += 1
                print(f"\n--- {fault}, seed {number}\n{network!r}", flush=True)
                if fault == result.kind or seen[fault] <= 2:
                    small = network if options.no_shrink or result.kind == "died" else runner.shrink(network, result)
                    print(
                        f"{small!r}\n{networks.build(small)}\n{runner.run(small).text if small != network else result.text}",
                        flush=True,
                    )
            done = sum(counts.values())
            if done % 50 == 0:
                print(f"{done} networks, {dict(counts)}, {time.monotonic() - start:.0f} s", flush=True)
    finally:
        runner.close()
    for fault, count in seen.most_common():
        print(f"{count} times: {fault}")
    print(f"{sum(counts.values())} networks of {len(kinds)} kinds of blocks: {dict(counts)}, {time.monotonic() - start:.0f} s")
    for text, count in gathers.most_common():
        print(f"{count} times: {text}")
    return sum(counts[kind] for kind in FAILURES)
