"""The docs say what the code does, their blocks run, and their links lead somewhere."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import pkgutil
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from test_readme import printed

import torchhalo
from torchhalo.tools import cli, demo

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.stem: path.read_text() for path in sorted(DOCS.glob("*.md"))}
FENCE = re.compile(r"^```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    file: str
    text: str


def blocks(text: str) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(text)]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page lists the ops that torch 2.13 has")
def test_the_page_of_ops_is_that_of_the_registry() -> None:
    ops = script("ops")
    assert ops.PAGE.read_text() == ops.page(), "run `python docs/ops.py`"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty folder to work in, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == tmp_path:
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", [name for name in PAGES if name != "training" and blocks(PAGES[name])])
def test_blocks_run(page: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From top to bottom, as a reader would: a file is saved, a command is run, and a block of text is what was printed."""
    in_readme = {block.text for block in blocks((ROOT / "README.md").read_text())}
    names: dict[str, object] = {}
    shown = ""
    for number, block in enumerate(blocks(PAGES[page])):
        if block.language == "python" and block.file:
            (folder / block.file).write_text(block.text)
        elif block.language == "python" and "init_device_mesh" not in block.text:
            exec(compile(block.text, f"<{page}.md>", "exec"), names)
            shown = capsys.readouterr().out
        elif block.language == "python" and block.text not in in_readme:  # those are run by test_readme
            (shown, *_) = printed(block.text, folder / str(number))
        elif block.language == "text":
            assert block.text == shown
        elif block.language == "console" and "torchhalo explain" in block.text:  # what others print differs from run to run
            command, expected = block.text.removeprefix("$ torchhalo ").split("\n", 1)
            assert cli.main(shlex.split(command)) == 0
            assert capsys.readouterr().out == expected


def test_examples_in_the_docstrings() -> None:
    names = [module.name for module in pkgutil.walk_packages(torchhalo.__path__, "torchhalo.") if "__main__" not in module.name]
    known = {"torch": torch, "torchhalo": torchhalo}
    found = {name: doctest.testmod(importlib.import_module(name), extraglobs=known) for name in names}
    assert not [name for name, result in found.items() if result.failed]
    assert sum(result.attempted for result in found.values()) > 50


def test_blocks_of_training_are_run_by_other_tests() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    heading, unknown = "", []
    for line in PAGES["training"].splitlines():
        heading = line.lstrip("# ") if line.startswith("#") else heading
        if line == "```python" and f'"{heading}"' not in tests:
            unknown.append(heading)
    assert not unknown


class Parsed(Exception):
    pass


def test_commands_exist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page tells the reader to run is a target of the Makefile, a benchmark, or a command that parses."""

    def stop(*args: object, **kwargs: object) -> None:
        raise Parsed

    monkeypatch.setattr(cli, "check", stop)
    monkeypatch.setattr(cli, "explain", stop)
    monkeypatch.setattr(demo, "compare", stop)
    found = [block for text in PAGES.values() for block in blocks(text)]
    for block in found:
        if block.file:
            (folder / block.file).write_text(block.text)
    lines = [line for block in found for line in block.text.splitlines()]
    commands = [shlex.split(line.removeprefix("$ ")) for line in lines if re.match(r"(\$ )?(torchhalo|make|python -m) ", line)]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for program, *rest in commands:
        if program == "torchhalo":
            with pytest.raises(Parsed):
                cli.main(rest)
        elif program == "make":
            assert rest[0] in targets
        else:
            assert rest[1] == "benchmarks" and (ROOT / "benchmarks" / f"{rest[2]}.py").exists()
    assert len(commands) > 5


def test_the_page_of_explain_has_all_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["explain", "--help"])
    options = set(re.findall(r"--[a-z]+", capsys.readouterr().out)) - {"--help"}
    assert not options - set(re.findall(r"--[a-z]+", PAGES["explain"]))


def anchors(text: str) -> set[str]:
    """The ids that the headings of a page get: lower case, no punctuation, hyphens for spaces; and names of the API."""
    plain = FENCE.sub("", text)
    headings = re.findall(r"^#+ (.*)$", plain, re.MULTILINE)
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
    return slugs | set(re.findall(r"^::: (\S+)", plain, re.MULTILINE))


def test_links_lead_somewhere() -> None:
    for name, text in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
            if target.startswith("https://"):
                continue
            file, _, anchor = target.partition("#")
            path = DOCS / (file or f"{name}.md")
            assert path.exists() and DOCS in path.resolve().parents, f"{name}.md: {target}"
            assert not anchor or anchor in anchors(path.read_text()), f"{name}.md: {target}"


def test_the_page_of_a_convolution_quotes_the_code() -> None:
    """Each line of a block stands in the file that was linked last before it, and each file exists."""
    linked, quoted = "", 0
    for path, code in re.findall(r"/blob/main/([\w/.]+)|^```py\n(.*?)^```$", PAGES["convolution"], re.MULTILINE | re.DOTALL):
        linked = path or linked
        lines = (ROOT / linked).read_text().splitlines()
        assert not [line for line in code.splitlines() if line not in lines], linked
        quoted += len(code.splitlines())
    assert quoted > 10


def test_the_site_has_all_pages() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    assert sorted(re.findall(r"^  - [\w ]+: (\w+)\.md$", settings, re.MULTILINE)) == sorted(PAGES)


def test_the_api_page_has_all_public_names() -> None:
    told = re.findall(r"^::: torchhalo\.(\w+)$|heading: torchhalo\.(\w+)", PAGES["api"], re.MULTILINE)
    assert sorted(a or b for a, b in told) == sorted(torchhalo.__all__)


def test_figures_of_the_performance_page_are_measured() -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    figures = re.findall(r"(?<![\w.])\d+\.\d+x?", PAGES["performance"])
    cells = [cell.strip() for row in re.findall(r"^\|(.*)\|$", PAGES["performance"], re.MULTILINE) for cell in row.split("|")]
    figures += [cell for cell in cells if re.fullmatch(r"[\d.]+x?", cell)]
    known = set(re.findall(r"(?<![\w.])[\d.]+x?(?![\w])", results)) | {"2.11"}
    assert len(figures) > 50 and not set(figures) - known


def test_errors_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    sources = [ast.parse(path.read_text()) for path in (ROOT / "torchhalo").rglob("*.py")]
    texts = [text for source in sources for node in ast.walk(source) for text in _texts(node)]
    ours, _, torchs = PAGES["troubleshooting"].partition("## Gathers")[2].partition("## Messages of torch")
    headings = re.findall(r"^### (.*)$", ours, re.MULTILINE)
    assert len(headings) > 25 and torchs
    for heading in headings:
        assert any(heading.rstrip("…") in text for text in texts), heading


def _texts(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)]
    return []
