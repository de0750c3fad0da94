"""The folders of the package: each knows only those below it, and torch's private API is touched in one of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import torchhalo

PACKAGE = Path(torchhalo.__file__).parent

#: What each room may import, besides itself.
KNOWS = {
    "geometry": set(),
    "torch_internals": set(),
    "exchange": {"geometry", "torch_internals"},
    "kernels": {"geometry", "torch_internals"},
    "ops": {"exchange", "geometry", "kernels", "torch_internals"},
    "parallel": {"exchange", "geometry", "ops", "torch_internals"},
    "tools": {"exchange", "geometry", "ops", "parallel", "torch_internals", ""},
}

PRIVATE = re.compile(
    r"torch\.distributed\._|torch\.distributed\.tensor\._|torch\._[a-z]|torch\.utils\._|\._op_dispatcher|\._local_tensor\b|\._spec\b"
)


def imported(source: str) -> set[str]:
    """The modules that a file imports, at its top or in a function.

    >>> sorted(imported("import torch\\nfrom torchhalo.geometry import Box"))
    ['torch', 'torchhalo.geometry.Box']
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def rooms_of(source: str) -> set[str]:
    """The rooms that a file knows; "" for the package itself."""
    names = [name.split(".") for name in imported(source)]
    return {name[1] if len(name) > 1 and name[1] in KNOWS else "" for name in names if name[0] == "torchhalo"}


def files(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


def test_every_folder_is_a_room() -> None:
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE}
    assert folders == set(KNOWS)
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}
    for room in KNOWS:
        assert ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())), f"{room} does not say what it knows"


@pytest.mark.parametrize("room", KNOWS)
def test_a_room_knows_only_those_below_it(room: str) -> None:
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {other or 'torchhalo'}"
        for path in files(room)
        for other in rooms_of(path.read_text()) - KNOWS[room] - {room}
    }
    assert not wrong, wrong


def test_geometry_imports_no_torch() -> None:
    found = {name.split(".")[0] for path in files("geometry") for name in imported(path.read_text())}
    assert "torch" not in found and "torchhalo" in found


def test_private_api_is_touched_in_one_room() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if "torch_internals" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if PRIVATE.search(line)
    ]
    assert not found, found


def test_files_are_short() -> None:
    rooms = "torchhalo", "tests", "benchmarks", "models", "examples", "docs"
    files = [path for room in rooms for path in (PACKAGE.parent / room).rglob("*.py")]
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    assert len(files) > 300 and not {str(path): lines for path, lines in lengths.items() if lines > 400}


def test_triton_is_imported_in_its_own_folder() -> None:
    found = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if "triton.language" in imported(path.read_text())}
    assert found and {path.parent for path in found} == {Path("kernels/triton")}


def test_the_check_sees_what_it_forbids() -> None:
    assert rooms_of("def f():\n    from torchhalo.tools import check") == {"tools"}
    assert rooms_of("import torchhalo\nfrom torchhalo.ops.padding import pad") == {"", "ops"}
    assert PRIVATE.search("from torch.distributed.tensor._utils import x") and PRIVATE.search("tensor._local_tensor.shape")
