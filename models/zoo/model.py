"""A row of the table of models."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn


class Model(NamedTuple):
    """One row.

    Attributes:
        factory: What makes it, as ``package.module:function``; the package is also what must be installed.
        inputs: The shape of each input, or the input itself.
        options: What the factory is given. A class of transformers gets a configuration of them.
    """

    factory: str
    inputs: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def library(self) -> str:
        """The package it comes from."""
        return self.factory.partition(":")[0].partition(".")[0]

    @property
    def missing(self) -> str | None:
        """Why it cannot be tried here, if so."""
        try:
            self.version  # noqa: B018
        except PackageNotFoundError:
            return f"{self.library} is not installed"
        return None

    @property
    def version(self) -> str:
        """That of the package; empty for the models of this one."""
        return "" if self.library == __package__.partition(".")[0] else version(self.library)

    def make(self) -> nn.Module:
        module, _, function = self.factory.partition(":")
        made = attrgetter(function)(importlib.import_module(module))
        if self.library == "transformers":
            return made(made.config_class(**self.options))
        return made(**self.options)
