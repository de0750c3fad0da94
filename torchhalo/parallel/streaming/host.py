"""Where memory waits that is not on the device: pinned host memory, or, for a CPU, files that are mapped into memory."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch


class Host(Protocol):
    """Copies of storages, by a key."""

    def save(self, key: Hashable, storage: torch.UntypedStorage) -> None:
        """Keep a copy of ``storage``."""

    def load(self, key: Hashable, storage: torch.UntypedStorage) -> bool:
        """Fill ``storage``, which is new, with what was saved; False if nothing was."""

    def wait(self, key: Hashable, reading: bool = False) -> None:
        """Let what comes next on the device wait for copies from or to the storage; if it only reads it, for those to it."""

    def forget(self, key: Hashable) -> None:
        """Let the copy go, as it is out of date or read for the last time."""

    def close(self) -> None:
        """Let all copies go."""


class Files:
    """Copies in files that are mapped into memory, made at once."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._copies: dict[Hashable, torch.UntypedStorage] = {}
        self._paths: dict[Hashable, Path] = {}
        self._count = 0

    def save(self, key: Hashable, storage: torch.UntypedStorage) -> None:
        if key not in self._copies:
            self._copies[key] = self._new(key, storage.nbytes())
        self._copies[key].copy_(storage)

    def load(self, key: Hashable, storage: torch.UntypedStorage) -> bool:
        if key not in self._copies:
            return False
        storage.copy_(self._copies[key])
        return True

    def wait(self, key: Hashable, reading: bool = False) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        if self._copies.pop(key, None) is not None and key in self._paths:
            self._paths.pop(key).unlink(missing_ok=True)

    def close(self) -> None:
        self._copies.clear()
        self._paths.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _new(self, key: Hashable, size: int) -> torch.UntypedStorage:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="torchhalo-stream-")
        self._count += 1
        path = self._paths[key] = Path(self._folder.name) / str(self._count)
        if not size:
            return torch.UntypedStorage(0)
        found = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=size)
        assert isinstance(found, torch.UntypedStorage)
        return found


class Block(NamedTuple):
    """A piece of pinned memory, and the last copy that read or wrote it."""

    bytes: torch.Tensor
    copied: torch.cuda.Event | None


class Blocks:
    """Pinned memory that is kept and lent again, as it is slow to get.

    What is stored is cut into large blocks of one size, and the rest into one of a power of two, so that blocks fit again.

    Attributes:
        held: Bytes that were taken from the system.
    """

    LARGE, SMALL, CHUNK = 2**24, 2**9, 2**28

    def __init__(self, pinned: bool = True) -> None:
        self._pinned = pinned
        self._free: dict[int, list[Block]] = defaultdict(list)
        self.held = 0

    def take(self, size: int) -> list[Block]:
        """Blocks that together have room for ``size`` bytes."""
        whole, rest = divmod(size, self.LARGE)
        sizes = [self.LARGE] * whole + ([max(self.SMALL, 1 << (rest - 1).bit_length())] if rest else [])
        return [self._one(each) for each in sizes]

    def give(self, blocks: list[Block]) -> None:
        """Take them back."""
        for block in blocks:
            self._free[len(block.bytes)].append(block)

    def _one(self, size: int) -> Block:
        if not self._free[size]:
            if size < self.LARGE:
                chunk = self._one(self.LARGE)
            else:  # a power of two, to which torch would round it up
                chunk = Block(torch.empty(self.CHUNK, dtype=torch.uint8, device="cpu", pin_memory=self._pinned), None)
                self.held += self.CHUNK
            self._free[size] += [Block(part, chunk.copied) for part in chunk.bytes.split(size)]
        return self._free[size].pop()


class Pinned:
    """Copies in pinned memory, made on streams of their own while the device computes.

    A copy starts when all that was asked of the device before it is done, and `wait` is called before its result is used or its
    source is changed or let go. So memory of the device can be lent and reused in the order in which the host asks for it.
    """

    def __init__(self, device: torch.device, blocks: Blocks):
        self._blocks = blocks
        self._device = device
        self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._copies: dict[Hashable, list[Block]] = {}
        self._loading: dict[Hashable, torch.cuda.Event] = {}
        self._saving: dict[Hashable, torch.cuda.Event] = {}

    def save(self, key: Hashable, storage: torch.UntypedStorage) -> None:
        self.forget(key)
        self._copies[key] = self._blocks.take(storage.nbytes())
        self._saving[key] = self._copy(key, storage, self._outward)

    def load(self, key: Hashable, storage: torch.UntypedStorage) -> bool:
        if key not in self._copies:
            return False
        self._loading[key] = self._copy(key, storage, self._inward)
        return True

    def wait(self, key: Hashable, reading: bool = False) -> None:
        for pending in (self._loading,) if reading else (self._loading, self._saving):
            if (event := pending.pop(key, None)) is not None:
                torch.cuda.current_stream(self._device).wait_event(event)

    def forget(self, key: Hashable) -> None:
        self._blocks.give(self._copies.pop(key, []))

    def close(self) -> None:
        for key in [*self._loading, *self._saving]:
            self.wait(key)
        for key in list(self._copies):
            self.forget(key)

    def _copy(self, key: Hashable, storage: torch.UntypedStorage, stream: torch.cuda.Stream) -> torch.cuda.Event:
        blocks = self._copies[key]
        whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)  # type: ignore[call-overload]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for event in {id(block.copied): block.copied for block in blocks if block.copied is not None}.values():
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            at = 0
            for block in blocks:
                part = whole[at : at + len(block.bytes)]
                ours = block.bytes[: len(part)]
                at += len(part)
                if stream is self._outward:
                    ours.copy_(part, non_blocking=True)
                else:
                    part.copy_(ours, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        self._copies[key] = [block._replace(copied=event) for block in blocks]
        return event


def host_for(device: torch.device, blocks: Blocks) -> Host:
    """Where the memory of ``device`` waits."""
    return Pinned(device, blocks) if device.type == "cuda" else Files()
