"""Where memory waits that is not on the device: pinned host memory, or, for a CPU, files that are mapped into memory."""

from __future__ import annotations

import tempfile
from collections.abc import Hashable
from pathlib import Path

import torch


class Host:
    """Copies of storages, by a key."""

    def __init__(self, device: torch.device):
        self._device = device
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._copies: dict[Hashable, torch.UntypedStorage] = {}
        self._paths: dict[Hashable, Path] = {}
        self._count = 0

    def save(self, key: Hashable, storage: torch.UntypedStorage) -> None:
        """Keep a copy of ``storage``."""
        if key not in self._copies:
            self._copies[key] = self._new(key, storage.nbytes())
        self._copies[key].copy_(storage)

    def load(self, key: Hashable, storage: torch.UntypedStorage) -> bool:
        """Fill ``storage`` with what was saved; False if nothing was."""
        if key not in self._copies:
            return False
        storage.copy_(self._copies[key])
        return True

    def forget(self, key: Hashable) -> None:
        """Let the copy go, as it is out of date or read for the last time."""
        if self._copies.pop(key, None) is not None and key in self._paths:
            self._paths.pop(key).unlink(missing_ok=True)

    def close(self) -> None:
        """Let all copies go."""
        self._copies.clear()
        self._paths.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _new(self, key: Hashable, size: int) -> torch.UntypedStorage:
        if self._device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).untyped_storage()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="torchhalo-stream-")
        self._count += 1
        path = self._paths[key] = Path(self._folder.name) / str(self._count)
        if not size:
            return torch.UntypedStorage(0)
        found = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=size)
        assert isinstance(found, torch.UntypedStorage)
        return found
