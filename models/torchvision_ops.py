"""Make torchvision importable beside a torch for CPUs: run ``python models/torchvision_ops.py`` once after installing it.

The C++ ops in PyPI's wheel of torchvision link against CUDA. Beside a torch for CPUs they do not load. Then torchvision, and
every library that imports it, raises on import: it registers kernels for ops that do not exist. This script appends the
schemas of these ops to the installed ``torchvision/extension.py``; they are defined only where the C++ ops do not load. No
model of the page calls them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

ADDED = """

if not _has_ops():
    # Added by torchhalo's models/torchvision_ops.py
    _schemas = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _schemas.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    found = find_spec("torchvision")
    assert found is not None and found.origin is not None, "torchvision is not installed"
    extension = Path(found.origin).with_name("extension.py")
    source = extension.read_text()
    if ADDED not in source:
        extension.write_text(source + ADDED)


if __name__ == "__main__":
    main()
