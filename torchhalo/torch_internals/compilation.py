"""What torch.compile must know of sharded ops: cache keys of its own, collectives that are sent once, ops kept whole."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dispatch.python import no_python_dispatcher
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from torchhalo.torch_internals.handlers import Op, handled
from torchhalo.torch_internals.process_groups import process_rank

# torch.compile keeps what it compiled on disk, where the ranks of a host find it, under a key that knows neither these
# handlers nor, for a DTensor, more than its global shape. Without both in the key a rank would load what was compiled for
# another rank's shard and halos, or by other code.
_stock_hash: Callable[[DTensor], str] | None = getattr(DTensor, "_stable_hash_for_caching", None)


def _hash_of_this_rank(tensor: DTensor) -> str:
    assert _stock_hash is not None
    return f"{_stock_hash(tensor)}-{process_rank()}"


@lru_cache(maxsize=1)
def _cache_tag() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    tag = f"torchhalo-{digest.hexdigest()[:16]}"
    if _stock_hash is None:  # torch 2.11: DTensor has no say in the key
        tag += f"-{dist.get_rank() if dist.is_initialized() else os.environ.get('RANK', '')}"
    return tag


def tag_compiled_code(on: bool) -> None:
    config = torch.compiler.config
    config.cache_key_tag = config.cache_key_tag.replace(_cache_tag(), "") + (_cache_tag() if on else "")
    if _stock_hash is not None:
        setattr(DTensor, "_stable_hash_for_caching", _hash_of_this_rank if on else _stock_hash)  # noqa: B010


# The partitioner of torch.compile cuts one graph into those of forward and backward by what depends on what, and by size.
# Both differ between shards; so every collective is kept where it was called, or one rank would wait for another forever.
def pin_collectives(on: bool) -> None:
    if on == bool(_stock_partitioner):
        return
    from torch._functorch import partitioners  # takes 0.4 s

    for name, ours in (("classify_nodes", _classify_nodes), ("_extract_fwd_bwd_modules", _extract_modules)):
        if on:
            _stock_partitioner[name] = getattr(partitioners, name)
        setattr(partitioners, name, ours if on else _stock_partitioner.pop(name))


_stock_partitioner: dict[str, Callable[..., Any]] = {}


def _classify_nodes(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Which nodes are of forward and which of backward.

    An empty shard depends on nothing, as the compiler makes a constant of it; so a collective of backward that sends one would
    be taken for one of forward.
    """
    for node in joint.graph.nodes:
        if _is_collective(node) and node.meta.get("partitioner_tag") == "is_backward":
            node.meta["partitioner_tag"] = "must_be_in_backward"
    return _stock_partitioner["classify_nodes"](joint, *args, **kwargs)


def _extract_modules(*args: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The forward and the backward graph, the latter without what is left over in it of the former's collectives.

    Stock keeps a copy of each that it could compute there, also where nothing needs it.
    """
    forward, backward = _stock_partitioner["_extract_fwd_bwd_modules"](*args, **kwargs)
    sent = {node.name for node in forward.graph.nodes if _is_collective(node)}
    for node in reversed(backward.graph.nodes):
        repeated = _is_collective(node) and node.name in sent
        if node.op == "call_function" and not node.users and (repeated or not node.is_impure()):
            backward.graph.erase_node(node)
    backward.recompile()
    return forward, backward


def _is_collective(node: torch.fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "_c10d_functional"


# While torch.compile traces, torch takes some ops apart in Python before autograd sees them, into indices that are plain
# tensors; a DTensor must get past that to its handler.
_decompositions: dict[Op, dict[Any, Callable[..., Any]]] = {}


def bypass_decompositions(on: bool) -> None:
    """Let the handled ops reach DTensor whole, also where torch has a Python decomposition above autograd."""
    keys = torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd
    for op in list(handled) if on else list(_decompositions):
        found = {key: op.py_kernels[key] for key in keys if key in op.py_kernels} if on else _decompositions.pop(op)
        if on and found:
            _decompositions[op] = found
        op.py_kernels.update({key: _bypass(op, kernel) if on else kernel for key, kernel in found.items()})
        if found:
            op._dispatch_cache.clear()


def _bypass(op: Op, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    handing_over = False

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal handing_over
        # a handler that takes the op apart comes back here
        if handing_over or not any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            return decomposition(*args, **kwargs)
        handing_over = True
        try:
            with no_python_dispatcher():
                return op(*args, **kwargs)
        finally:
            handing_over = False

    return kernel
