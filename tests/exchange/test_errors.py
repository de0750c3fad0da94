"""Wrong calls raise what plain torch raises, in its words, the same on every rank and before anything is sent."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import DEVICE, shard, simulated
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torchhalo.torch_internals import collectives

Call = tuple[Callable[..., torch.Tensor], list[tuple[int, ...]], dict[str, object]]

WRONG: dict[str, Call] = {
    "kernel larger than the input": (F.conv2d, [(1, 3, 4, 8), (2, 3, 7, 7)], {}),
    "dilated kernel larger than the input": (F.conv1d, [(1, 3, 8), (2, 3, 5)], {"dilation": 3}),
    "channel mismatch": (F.conv2d, [(1, 3, 8, 8), (2, 4, 3, 3)], {}),
    "channel mismatch, transposed": (F.conv_transpose2d, [(1, 3, 8, 8), (4, 2, 3, 3)], {}),
    "groups": (F.conv2d, [(1, 3, 8, 8), (4, 3, 3, 3)], {"groups": 2}),
    "too many dims": (F.conv2d, [(1, 1, 3, 8, 8), (2, 3, 3, 3)], {}),
    "too few dims": (F.conv3d, [(3, 8, 8), (2, 3, 3, 3, 3)], {}),
    "no stride": (F.conv2d, [(1, 3, 8, 8), (2, 3, 3, 3)], {"stride": 0}),
    "negative padding": (F.conv2d, [(1, 3, 8, 8), (2, 3, 3, 3)], {"padding": -1}),
    "output padding": (F.conv_transpose2d, [(1, 3, 8, 8), (3, 2, 3, 3)], {"stride": 2, "output_padding": 2}),
    "bias": (F.conv2d, [(1, 3, 8, 8), (2, 3, 3, 3), (5,)], {}),
    "same with stride": (F.conv2d, [(1, 3, 8, 8), (2, 3, 3, 3)], {"padding": "same", "stride": 2}),
}


def message(function: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:
        function()
    return f"{caught.type.__name__}: {caught.value}"


def check_words() -> dict[str, tuple[str, str]]:
    """What plain torch says and what the sharded call says, for each wrong call; nothing may be sent."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))

    def refuse(*args: object) -> torch.Tensor:
        raise AssertionError("a wrong call sent something")

    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_to_all", refuse)
        for name, (op, shapes, kwargs) in WRONG.items():
            plain = [torch.ones(shape) for shape in shapes]
            sharded = [distribute_tensor(t, mesh, [Shard(t.ndim - 1) if i == 0 else Replicate()]) for i, t in enumerate(plain)]
            said[name] = message(partial(op, *plain, **kwargs)), message(partial(op, *sharded, **kwargs))
    return said


@pytest.mark.slow
def test_words_of_plain_torch(pool) -> None:
    ranks = pool(3).run(check_words)
    for said in ranks:
        assert said == ranks[0]
    for name, (plain, sharded) in ranks[0].items():
        assert sharded == plain, name


def check_mixed() -> list[str]:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    x, w, b = torch.ones(1, 3, 8, 8), torch.ones(2, 3, 3, 3), torch.ones(2)
    dx, dw, db = (distribute_tensor(t, mesh, [Shard(2) if t is x else Replicate()]) for t in (x, w, b))
    other = DeviceMesh(DEVICE, [0])
    strange = DTensor.from_local(w, other, [Replicate()], run_check=False)
    calls = [lambda: F.conv2d(dx, w), lambda: F.conv2d(dx, dw, b), lambda: F.conv2d(x, dw, db), lambda: F.conv2d(dx, strange)]
    return [message(call) for call in calls]


def test_plain_tensors_and_other_meshes_say_how_to_mend_it(pool) -> None:
    ranks = pool(2).run(check_mixed)
    assert ranks[0] == ranks[1]
    weight, bias, input, mesh = ranks[0]
    for text, name in ((weight, "weight"), (bias, "bias"), (input, "input")):
        assert f"`{name}`" in text and "plain tensor" in text and "distribute_module" in text
    assert "one device mesh" in mesh


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.pad(x, (8, 8, 0, 0), mode="reflect"),
        lambda x: F.pad(x, (-9, -9)),
        lambda x: F.max_pool2d(x, 3, padding=2),
        lambda x: F.avg_pool2d(x, 3, padding=2),
        lambda x: torch.cat([x, x[:, :, 1:]]),
        lambda x: x + x[..., 1:],
        lambda x: x @ x,
    ],
)
def test_nothing_but_the_error_is_seen(call: Callable[[torch.Tensor], object]) -> None:
    """Also where DTensor itself finds it out."""
    log, seen = logging.getLogger("torch._subclasses.fake_tensor"), []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with simulated(2):
            x = shard(torch.ones(1, 3, 4, 8), init_device_mesh(DEVICE, (2,)), [Shard(3)])
            assert message(partial(call, x))
        assert not seen
        with FakeTensorMode():
            message(lambda: F.max_pool2d(torch.ones(1, 3, 4, 8), 3, padding=2))
        assert seen, "what others do with fake tensors is logged as ever"
    finally:
        log.removeHandler(handler)


def check_still_alive() -> None:
    """After a wrong call the ranks still agree: the next right one works."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    x = distribute_tensor(torch.ones(1, 1, 8, 8), mesh, [Shard(3)])
    message(lambda: F.conv2d(x, distribute_tensor(torch.ones(1, 2, 3, 3), mesh, [Replicate()])))
    y = F.conv2d(x, distribute_tensor(torch.ones(1, 1, 3, 3), mesh, [Replicate()]))
    assert torch.equal(y.full_tensor(), torch.full((1, 1, 6, 6), 9.0))


def test_a_wrong_call_leaves_the_ranks_in_step(pool) -> None:
    pool(3).run(check_still_alive)
