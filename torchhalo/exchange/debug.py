"""With ``TORCHHALO_DEBUG=1``: what each rank is about to send, compared between the ranks before it is sent."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from torchhalo.torch_internals import autograd, calls, handlers, process_groups, simulation, watching

#: Whether this process compares.
ON = False

# Where a rank is: "place", then "facts" about it, the first of which is always told, the others where ranks differ in them; and
# what it "sends" to and "expects" from each rank, by rank. Or, of one that has stopped waiting for others, its "error".
Record = dict[str, Any]


def agree(what: str, values: Mapping[str, object], mesh: DeviceMesh) -> None:
    """Raise the same error on every rank of ``mesh`` unless all of them come here with equal values.

    They meet in the key-value store of the process group, so nothing is sent by a collective and no device waits.

    Args:
        what: What the values belong to, such as "the inputs of UNet".
        values: By name; compared as they print.

    Example:
        >>> agree("the inputs of UNet", {"image": (1, 3, 512, 512)}, mesh)  # doctest: +SKIP

    Raises:
        RuntimeError: Some rank has other values, or is elsewhere, or does not come within the timeout of the mesh's group.
    """
    if process_groups.coordinate(mesh) is None or mesh.size() == 1 or simulation.simulated():
        return
    record = {"place": what, "facts": {name: str(value) for name, value in values.items()}}
    limit = process_groups.timeout(mesh.get_group(0), mesh.device_type)
    _rendezvous().meet(process_groups.submesh_members(mesh, range(mesh.ndim)), record, limit)


class Rendezvous:
    """Where ranks lay down where they are, and are told whether they may go on.

    The first of those who meet reads what all of them wrote, and writes a verdict that the others wait for: nothing, or the
    error that all of them raise. A rank that times out says so in its record, so that a late rank raises that error too.
    """

    def __init__(self, store: dist.Store, rank: int):
        self.world, self._rank = store, rank
        self._store = dist.PrefixStore("torchhalo", store)
        self._meetings: Counter[tuple[int, ...]] = Counter()

    def meet(self, members: tuple[int, ...], record: Record, limit: timedelta) -> None:
        """Return when all ``members`` have come with records that fit; else raise the same error on all of them."""
        number = self._meetings[members]
        self._meetings[members] += 1
        keys, old = ([f"{_label(members)}/{n}/{rank}" for rank in (*members, "verdict")] for n in (number, number - 2))
        own = [members.index(self._rank), *([len(members)] if self._rank == members[0] else [])]
        try:
            self._put(f"last/{self._rank}", record)
            self._put(keys[own[0]], record)
            verdict = (self._judge if len(own) > 1 else self._await)(members, keys, record, limit)
            for at in own:  # whoever is here has read what was written two meetings ago
                self._store.delete_key(old[at])
        except RuntimeError as error:
            raise RuntimeError(
                f"at {_describe(record)}: the key-value store of the process group is gone, and with it the process that held "
                f"it, in most cases rank 0. {error}"
            ) from error
        if verdict:
            raise RuntimeError(verdict)

    def _judge(self, members: tuple[int, ...], keys: list[str], record: Record, limit: timedelta) -> str:
        self._came(keys[:-1], limit)
        records = {rank: self._get(key) for rank, key in zip(members, keys, strict=False) if self._store.check([key])}
        errors = [other["error"] for other in records.values() if "error" in other]
        missing = [rank for rank in members if rank not in records]
        verdict = errors[0] if errors else self._absent(missing, record, limit) if missing else difference(records)
        self._put(keys[-1], verdict)
        return verdict

    def _await(self, members: tuple[int, ...], keys: list[str], record: Record, limit: timedelta) -> str:
        if self._came(keys[-1:], limit):
            return str(self._get(keys[-1]))
        missing = [rank for rank, key in zip(members, keys, strict=False) if not self._store.check([key])]
        error = self._absent(missing or [members[0]], record, limit)
        self._put(keys[members.index(self._rank)], {"error": error})
        return error

    def _absent(self, ranks: list[int], record: Record, limit: timedelta) -> str:
        seen = "; ".join(f"rank {rank} was last seen {self._last(rank)}" for rank in ranks)
        late = f"{_ranks(ranks)} did not come to {_describe(record)} within {limit.total_seconds():g} s"
        return f"{late}: killed, late, or stopped by an error. {seen}"

    def _last(self, rank: int) -> str:
        key = f"last/{rank}"
        return f"at {_describe(self._get(key))}" if self._store.check([key]) else "before it met any other"

    def _came(self, keys: list[str], limit: timedelta) -> bool:
        """Whether all keys are there before the limit. It asks again and again: waiting would lock torch's threads out."""
        end, pause = time.monotonic() + limit.total_seconds(), 1e-4
        while not self._store.check(keys):
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, 0.02)
        return True

    def _put(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key))


def _label(members: tuple[int, ...]) -> str:
    return "-".join(map(str, members))


def difference(records: Mapping[int, Record]) -> str:
    """In what the records of these ranks do not fit together, in words; nothing if they do."""
    facts = [record["facts"] for record in records.values()]
    differing = {name for each in facts for name in each if len({other.get(name) for other in facts}) > 1}
    if len({record["place"] for record in records.values()}) > 1:
        differing.clear()
    descriptions: dict[str, list[int]] = {}
    for rank, record in records.items():
        descriptions.setdefault(_describe(record, differing), []).append(rank)
    if len(descriptions) > 1:
        parts = sorted(descriptions.items(), key=lambda part: (len(part[1]), part[1]))
        return "the ranks are not in step: " + "; ".join(
            f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} at {text}" for text, ranks in parts
        )
    for rank, record in records.items():
        for peer, sent in record.get("sends", {}).items():
            expected = records[int(peer)]["expects"][str(rank)]
            if sent != expected:
                return f"at {_describe(record)} rank {rank} sends {sent} elements to rank {peer}, which expects {expected}"
    return ""


def _describe(record: Record, names: set[str] | frozenset[str] = frozenset()) -> str:
    if "error" in record:
        return record["error"]
    facts = [f"{name} {value}" for at, (name, value) in enumerate(record["facts"].items()) if at == 0 or name in names]
    return ", ".join([record["place"], *facts])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Modules(threading.local):
    """Which modules run in this thread, the innermost last.

    In backward, the step of the autograd graph that runs bears the path of the module that made it: it is noted there when a
    module begins, at what was computed before it, and when it ends, at what it computed.
    """

    _paths: ClassVar[WeakKeyDictionary[nn.Module, str]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._stack: list[nn.Module] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, `path` and `backward` know."""
        hooks = register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def path(self) -> str:
        """Of the module that runs, forward or backward, in the model to which it belongs; nothing outside of modules."""
        if self._stack:
            module = self._stack[-1]
            return self._paths.get(module) or type(module).__name__
        step = autograd.current_node()
        return "" if step is None else step.metadata.get("torchhalo", "")

    def backward(self) -> bool:
        return not self._stack and autograd.current_node() is not None

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._stack:
            for path, part in module.named_modules():
                self._paths.setdefault(part, path)
        self._mark(args)
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._stack:
            self._mark(output)
            self._stack.pop()

    def _mark(self, tensors: Any) -> None:
        path = self.path()
        steps: list[Any] = [leaf.grad_fn for leaf in autograd.tree_leaves_of(tensors) if isinstance(leaf, torch.Tensor)]
        while steps:
            step = steps.pop()
            if step is not None and "torchhalo" not in step.metadata:
                step.metadata["torchhalo"] = path
                steps += [before for before, _ in step.next_functions]


class _Comparison(watching.Watcher):
    """Compares every collective that an op is about to start."""

    def collective(self, each: watching.Collective) -> None:
        kind, tensor, group, sent, received, _ = each
        if simulation.simulated():
            return
        members = tuple(dist.get_process_group_ranks(group))
        packet = _dtype(tensor.dtype) if sent else f"{tuple(tensor.shape)} {_dtype(tensor.dtype)}"
        record = _own_record(kind, None, {"packet": packet, "collective": kind})
        record["sends"], record["expects"] = dict(zip(members, sent, strict=False)), dict(zip(members, received, strict=False))
        _rendezvous().meet(members, record, process_groups.timeout(group, tensor.device.type))

    def redistribution(self, each: watching.Redistribution) -> None:
        op, shape, dtype, mesh, source, target = each
        pairs = enumerate(zip(source, target, strict=True))
        axes = [axis for axis, (p, q) in pairs if p != q and not p.is_replicate() and mesh.size(axis) > 1]
        if not axes or process_groups.coordinate(mesh) is None or simulation.simulated():
            return
        facts = {"tensor": f"{tuple(shape)} {_dtype(dtype)}", "from": f"{tuple(source)}", "to": f"{tuple(target)}"}
        limit = process_groups.timeout(mesh.get_group(axes[0]), mesh.device_type)
        _rendezvous().meet(process_groups.submesh_members(mesh, axes), _own_record("redistribute", op, facts), limit)


def _own_record(kind: str, op: Any, facts: dict[str, str]) -> Record:
    """Where this rank is, with what its op is called with before ``facts``."""
    call = calls.running_call()
    if call is not None:
        op, facts = call.op, _arguments(call) | facts
    path = modules.path()
    place = kind if op is None else op.overloadpacket.__name__
    place += (f" in `{path}`" if path else "") + (", backward" if modules.backward() else "")
    return {"place": place, "facts": facts}


def _arguments(call: calls.Call) -> dict[str, str]:
    """What must be the same on all ranks: global shapes, dtypes and placements of tensors, numbers and settings."""
    names = [argument.name for argument in call.op._schema.arguments]
    values = handlers.bind(call.op, call.args, call.kwargs)
    descriptions = {name: _value(value) for name, value in zip(names, values, strict=False)}
    return {name: value for name, value in descriptions.items() if value is not None}


def _value(value: Any) -> str | None:
    if isinstance(value, DTensor):
        return f"{tuple(value.shape)} {_dtype(value.dtype)} {', '.join(map(repr, value.placements))}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(str(_value(item)) for item in value)}]"
    return str(value) if isinstance(value, (bool, int, float, str, torch.dtype)) else None


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_rendezvous_of_world: list[Rendezvous] = []


def _rendezvous() -> Rendezvous:
    """That of the present world."""
    store = process_groups.key_value_store()
    if not _rendezvous_of_world or _rendezvous_of_world[0].world is not store:
        _rendezvous_of_world[:] = [Rendezvous(store, dist.get_rank())]
    return _rendezvous_of_world[0]


modules = Modules()
_comparing = ExitStack()


def compare(on: bool) -> None:
    """Compare what ranks are about to send from now on, or no longer; to be called on all ranks alike."""
    global ON
    ON = on
    _comparing.close()
    if on:
        _comparing.enter_context(watching.watched_by(_Comparison()))
        _comparing.enter_context(modules.watched())


if os.environ.get("TORCHHALO_DEBUG") == "1":
    compare(True)
