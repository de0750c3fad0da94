"""Attention of sharded tokens with samples or heads cut instead, where that sends less than keys and values would.

For every rank to have all keys and values, they travel forward and again backward, and then their gradients do. For each rank
to have all tokens of some samples or heads, the shards of queries, keys and values are shared out again and those of the output
brought back, and so are their gradients::

    tokens cut   1 1 2 2   head a      heads cut   1 1 1 1
                 1 1 2 2   head b                  2 2 2 2

These functions stand before autograd, which keeps what has travelled: backward it does not travel again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.ops.attention_formula import dot_product
from torchhalo.ops.attention_inputs import Moved, offer
from torchhalo.torch_internals import overrides
from torchhalo.torch_internals.grid_shard import GridShard, at

#: By how much the largest part may exceed an even one: the ranks wait for the one that computes most.
UNEVEN = 1.1


class _Tensor(NamedTuple):
    """A tensor and a letter for each of its dims, as an einsum has them."""

    tensor: DTensor
    letters: str

    def cuts(self, letters: str) -> dict[int, Placement]:
        """The axes that cut a dim of ``letters``, and how."""
        placements = self.tensor.placements
        return {axis: p for axis, p in enumerate(placements) if isinstance(p, (Shard, GridShard)) and self.letter(p) in letters}

    def letter(self, placement: Any) -> str:
        return self.letters[placement.dim]

    def size(self, letter: str) -> int:
        return int(self.tensor.shape[self.letters.index(letter)])

    def moved(self, cuts: dict[int, Placement]) -> DTensor:
        """The tensor with other cuts along some axes."""
        placements = [cuts.get(axis, p) for axis, p in enumerate(self.tensor.placements)]
        return Moved.apply(self.tensor, tuple(placements))  # type: ignore[no-any-return,no-untyped-call]

    def cut_along(self, letters: dict[int, str]) -> DTensor:
        """The tensor with some axes cutting the dims of these letters."""
        return self.moved({axis: Shard(self.letters.index(letter)) for axis, letter in letters.items()})


def attend(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
    """`F.scaled_dot_product_attention`, with samples or heads cut where that sends less."""
    options = dict(zip(("attn_mask", "dropout_p", "is_causal"), rest, strict=False)) | named
    found = _fused((query, key, value), options.get("attn_mask"), any(options.get(name) for name in ("dropout_p", "is_causal")))
    if found is None:
        return dot_product(query, key, value, *rest, **named)
    tensors, letters = found
    query, key, value = (each.cut_along(letters) for each in tensors)
    out: Any = dot_product(query, key, value, *rest, **named)
    home = tensors[0].cuts("q")
    return _Tensor(out, "bhqd").moved(home)


def _fused(given: tuple[Any, ...], mask: Any, ordered: bool) -> tuple[list[_Tensor], dict[int, str]] | None:
    """The tensors of a fused attention, and what the axes that cut their tokens are to cut; None to leave it as it is.

    Args:
        given: Queries, keys and values.
        ordered: Whether it matters where in the order a token is, also without a mask.
    """
    query, _, value = given
    if any(not isinstance(t, DTensor) or t.ndim != 4 or t.device_mesh != query.device_mesh for t in given):
        return None
    if isinstance(mask, DTensor) and any(p != Replicate() for p in mask.placements):
        return None
    tensors = [_Tensor(t, letters) for t, letters in zip(given, ("bhqd", "bhkd", "bhke"), strict=True)]
    axes = [each.cuts("qk") for each in tensors]
    ranks = query.device_mesh.size()
    heads = {int(t.shape[1]) for t in given}  # groups of heads that share a key stay together
    shared = "bh" if len(heads) == 1 or not any(count % ranks for count in heads) else "b"
    letters = _other_cuts(tensors, axes, shared) if len({tuple(cuts) for cuts in axes}) == 1 else None
    if letters is None:
        return None
    sizes = [prod(map(int, t.shape)) for t in given]
    out = sizes[0] // int(query.shape[3]) * int(value.shape[3]) if query.shape[3] else 0
    in_order = (ordered or mask is not None) and any(isinstance(p, GridShard) for cuts in axes for p in cuts.values())
    # grids would be moved to have their order, and then gathered
    return (tensors, letters) if _less(sum(sizes) + out, sum(sizes[1:]), tensors, letters) or in_order else None


def multiply(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A product of matrices: that of an attention that is written out with samples or heads cut, where that sends less.

    Queries times keys leaves the scores cut so; scores that are cut so, times values, give an output that is cut as the values.
    """
    found = None if kwargs else _product(func, args)
    if found is None:
        return func(*args, **kwargs)
    first, second, result = found
    every = set(first.letters) & set(second.letters)
    shared = "".join(letter for letter in result if letter in every and first.size(letter) == second.size(letter))
    rows, columns = (
        "".join(letter for letter in each.letters if letter in result and letter not in every) for each in (first, second)
    )
    sums = "".join(every - set(result))

    def called(first: DTensor, second: DTensor) -> Any:
        return func(args[0], first, second) if len(args) == 3 else func(first, second)

    queries, keys, values = first.cuts(rows), second.cuts(columns), second.cuts(sums)
    if queries and [(axis, at(p, 0)) for axis, p in queries.items()] == [(axis, at(p, 0)) for axis, p in keys.items()]:
        letters = _other_cuts([first, second], [queries, keys], shared)
        elements = [prod(map(int, each.tensor.shape)) for each in (first, second)]
        # the values will be like the keys, and the output like the queries
        if letters is None or not _less(2 * sum(elements), 2 * elements[1], [first, second], letters):
            return called(first.tensor, second.tensor)
        return called(first.cut_along(letters), second.cut_along(letters))
    scores = {axis: p for axis, p in first.cuts(shared).items() if axis in values}
    square = [row for row in rows if {first.size(row)} == {second.size(letter) for letter in sums}]
    if not values or scores.keys() != values.keys() or not square or first.cuts(sums) or _partial(first, second):
        return called(first.tensor, second.tensor)
    moved = second.moved({axis: at(p, second.letters.index(first.letter(p))) for axis, p in scores.items()})
    out = _Tensor(called(first.tensor, moved), result)
    return out.moved({axis: at(p, result.index(square[-1])) for axis, p in values.items()})


def _product(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[_Tensor, _Tensor, str] | None:
    """The factors and the letters of the result; None for a product of another form."""
    if func is torch.einsum:
        if len(args) != 3 or not isinstance(args[0], str) or "->" not in args[0] or "." in args[0]:
            return None
        inputs, result = args[0].replace(" ", "").split("->")
        letters, factors = inputs.split(","), args[1:]
    else:
        factors = args
        ndim = max((t.ndim for t in factors if isinstance(t, torch.Tensor)), default=0)
        batch = "abcdefghijklm"[: max(0, ndim - 2)]
        letters, result = [batch + "xy", batch + "yz"], batch + "xz"
    if len(letters) != 2 or any(not isinstance(t, DTensor) for t in factors):
        return None
    first, second = map(_Tensor, factors, letters)
    if any(each.tensor.ndim < 3 or each.tensor.ndim != len(each.letters) for each in (first, second)):
        return None
    if any(len(set(text)) < len(text) for text in (*letters, result)) or first.tensor.device_mesh != second.tensor.device_mesh:
        return None
    return first, second, result


def _partial(*tensors: _Tensor) -> bool:
    return any(p.is_partial() for each in tensors for p in each.tensor.placements)


def _other_cuts(tensors: Sequence[_Tensor], cuts: Sequence[dict[int, Placement]], shared: str) -> dict[int, str] | None:
    """For each axis that cuts tokens, a letter of ``shared`` to cut instead; None if there are not enough.

    Ranks get parts of about one size, and an axis that cuts the dim of a letter already stays outside of those that now do.
    """
    mesh, found = tensors[0].tensor.device_mesh, dict[int, str]()
    if not cuts[0] or _partial(*tensors) or prod(mesh.size(axis) for axis in cuts[0]) == 1:
        return None
    for axis in cuts[0]:
        for letter in shared:
            others = [each.cuts(letter) for each in tensors]
            if any(isinstance(p, GridShard) or other > axis for each in others for other, p in each.items()):
                continue
            size, parts = tensors[0].size(letter), mesh.size(axis)
            parts *= prod(mesh.size(other) for other in {*others[0], *(a for a, each in found.items() if each == letter)})
            if -(-size // parts) * parts <= UNEVEN * size:
                found[axis] = letter
                break
        else:
            return None
    return found


def _less(there_and_back: int, keys: int, tensors: Sequence[_Tensor], letters: dict[int, str]) -> bool:
    """Whether to share out so many elements sends less than so many of keys and values to every rank.

    With gradients the former travel twice, and the latter three times.
    """
    query = tensors[0]
    ranks = prod(query.tensor.device_mesh.size(axis) for axis in letters)
    training = torch.is_grad_enabled() and any(each.tensor.requires_grad for each in tensors)
    everywhere = keys * ranks * (1.5 if training else 1)
    dims = {axis: query.letters.index(letter) for axis, letter in letters.items()}
    offer(query.tensor, dims, min(there_and_back, everywhere))
    return there_and_back < everywhere


overrides.replace(F.scaled_dot_product_attention)(attend)
for _func in (torch.einsum, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm):
    overrides.replace(_func)(partial(multiply, _func))
