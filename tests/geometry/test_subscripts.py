"""Where dims are in what is read by indices, against torch."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchhalo.geometry.subscripts import Subscript


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_dims_of_the_result(data: st.DataObject) -> None:
    shape = [2, 3, 5, 7, 11][: data.draw(st.integers(1, 5))]
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    points = [13, 17][data.draw(st.integers(0, 2)) :]
    shapes = []
    for dim in range(len(shape)):
        own = [n if data.draw(st.booleans()) else 1 for n in points][data.draw(st.integers(0, len(points))) :]
        shapes.append((points if dim == min(dims) else own) if dim in dims else None)
    while shapes[-1] is None:
        shapes.pop()
    found = Subscript.of(shape, shapes)
    place = [None if each is None else torch.zeros(each, dtype=torch.int64) for each in shapes]
    result = torch.ops.aten.index(torch.empty(shape), place).shape  # brackets take an index without dims for a number
    assert found.dims == tuple(sorted(dims)) and found.points == tuple(points) and found.result == tuple(result)
    for dim in found.kept:
        assert result[found.in_result(dim)] == shape[dim] and found.in_input(found.in_result(dim)) == dim
    inside = [dim for dim in range(len(result)) if found.in_input(dim) is None]
    assert [result[dim] for dim in inside] == points
