"""The page and the pictures of `explain` show its numbers, to scale, in a real browser too."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import CHROMIUM, Browser
from torch import nn

from torchhalo.exchange.layout import Layout
from torchhalo.tools import cli, report
from torchhalo.tools.drawing import Area, Cut, draw
from torchhalo.tools.explain import explain
from torchhalo.tools.explanation import Explanation, Layer, Rank
from torchhalo.tools.text import readable

HOSTILE = '</script><img src=x onerror="alert(1)">&'


def small() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 5, stride=2, padding=2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


@pytest.fixture(scope="module")
def found() -> Explanation:
    return explain(small, (1, 3, 64, 96), (2, 3), train=True)


class Page(HTMLParser):
    """Checks that elements are closed in the order in which they are opened, and collects them."""

    EMPTY = frozenset({"meta", "br", "img"})

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_page(found: Explanation) -> None:
    text = report.html(found)
    page = Page(text)
    assert "://" not in text and not any({"src", "href"} & set(attrs) for _, attrs in page.elements), "it needs no network"
    rank = found.busiest
    for shown in (found.peak, found.alone, rank.total("sent"), rank.gradients):
        assert readable(shown) in text
    names = [layer.path or "(model)" for layer in rank.layers]
    assert all(name in page.texts for name in names)
    data = data_of(text)
    assert [layer["name"] for layer in data["layers"]] == names
    assert data["ranks"] == [", ".join(map(str, each.place)) for each in found.ranks]
    for at, layer in enumerate(data["layers"]):
        for row, each in zip(layer["rows"], found.ranks, strict=True):
            mine = each.layers[at]
            assert row[2:] == [
                f"{readable(mine.sent)} in {mine.messages} messages" if mine.sent else "nothing",
                readable(mine.kept) or "0",
            ]
    first = data["layers"][0]
    assert first["rows"][0][:2] == ["[:, :, 0:32, 0:32]", "dim 2: 1 after; dim 3: 1 after"]
    assert [len(layer["pictures"][0]) for layer in data["layers"]][:4] == [2, 1, 1, 2], "a corner where there is a halo"
    for drawing in data["drawings"]:
        ElementTree.fromstring(drawing)
    assert found._repr_html_().startswith("<iframe ") and "<script" not in found._repr_html_()


def test_hostile_names(found: Explanation) -> None:
    layers = [Layer(HOSTILE, HOSTILE, (1, 3, 64, 96), (1, 3, 64, 96))]
    hostile = replace(found, model=HOSTILE, ranks=[Rank((0, 0), layers, 0, 1)])
    page = Page(report.html(hostile))
    assert "img" not in {tag for tag, _ in page.elements}
    assert sum(tag == "script" for tag, _ in page.elements) == 2
    assert data_of(report.html(hostile))["layers"][0]["name"] == HOSTILE
    ElementTree.fromstring(report.svg(hostile))
    report.png(hostile)


def test_to_scale() -> None:
    layout = Layout((1, 3, 80, 60), (2, 2), ((), (), (0,), (1,)))
    halos = {(row, column): {2: (4 * row, 2 - 2 * row), 3: (3 * column, 3 - 3 * column)} for row in (0, 1) for column in (0, 1)}
    cut = Cut(layout, halos)
    marks = draw(cut, (1, 0), cut.whole, Area(10, 20, 600, 800))
    boxes = {kind: {mark[1:] for mark in marks if mark.kind == kind} for kind in ("image", "own", "halo", "sent")}
    assert boxes["image"] == {(10, 20, 600, 800)}
    assert boxes["own"] == {(10, 420, 300, 400)}
    assert boxes["halo"] == {(10, 380, 330, 40), (310, 420, 30, 400)}
    # To the rank above two rows, to that at the right three columns, to that above at the right the corner.
    assert boxes["sent"] == {(10, 420, 300, 20), (280, 420, 30, 400), (280, 420, 30, 20)}


def test_volume_and_signal() -> None:
    """Of three dims that are cut the last two are drawn, through the chosen rank; ranks between stand in for each other."""
    volume = Cut(Layout((1, 1, 8, 16, 32), (2, 4, 8), ((), (), (0,), (1,), (2,))), {(0, 2, 4): {3: (1, 1)}})
    assert volume.dims == (3, 4) and len(volume.peers((1, 0, 0))) == 32
    assert volume.needs((0, 1, 3)).shape == (6, 4) and volume.needs((0, 0, 3)).shape == (4, 4)
    found = explain(nn.Conv1d(1, 2, 5, padding=2), (1, 1, 50), (4,))
    assert len(data_of(report.html(found))["drawings"]) == 6
    ElementTree.fromstring(report.svg(found))


def test_svg(found: Explanation) -> None:
    root = ElementTree.fromstring(report.svg(found))
    space = "{http://www.w3.org/2000/svg}"
    rects = [rect.attrib for rect in root.iter(f"{space}rect")]
    own = next(rect for rect in rects if rect.get("class") == "own")
    halos = [rect for rect in rects if rect.get("class") == "halo"]
    assert found.busiest.place[1] == 1, "with neighbours on both sides, a third of the width"
    assert float(own["width"]) == pytest.approx(460 / 3, abs=1e-3)
    assert min(float(rect["width"]) for rect in halos) == pytest.approx(460 / 96, abs=1e-3)
    bars = [float(rect["width"]) for rect in rects if rect.get("class") == "bytes"]
    sent = [layer.sent for layer in found.busiest.layers if layer.sent]
    assert bars == [pytest.approx(180 * size / max(sent), abs=1e-3) for size in sent]
    texts = [text.text for text in root.iter(f"{space}text")]
    assert all(readable(size) in texts for size in sent)


def test_png(found: Explanation) -> None:
    root = ElementTree.fromstring(report.svg(found))
    data = report.png(found, scale=2)
    width, height = struct.unpack(">II", data[16:24])
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and (width, height) == (2 * int(root.get("width")), 2 * int(root.get("height")))
    length = struct.unpack(">I", data[33:37])[0]
    lines = zlib.decompress(data[41 : 41 + length])
    assert len(lines) == height * (1 + 3 * width)
    own = next(rect.attrib for rect in root.iter() if rect.get("class") == "own")
    x, y = (int(2 * (float(own[at]) + float(own[size]) / 2)) for at, size in (("x", "width"), ("y", "height")))
    at = y * (1 + 3 * width) + 1 + 3 * x
    assert "#" + lines[at : at + 3].hex() == report.COLOURS["own"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("html", "svg", "png")}
    asked = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert cli.main(["explain", "test_report:small", "--input", "1,3,32,32", "--json", *asked]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["mesh"] == [2]
    assert all(f"wrote {path}" in err and path.stat().st_size > 1000 for path in files.values())
    with pytest.raises(SystemExit):
        cli.main(["explain", "test_report:small", "--input", "1,3,32,32", "--svg", str(tmp_path / "none" / "a.svg")])
    assert "wants a path in a folder that exists" in capsys.readouterr().err


@pytest.fixture
def browser(found: Explanation, tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    page = tmp_path / "report.html"
    page.write_text(report.html(found), encoding="utf-8")
    with Browser(tmp_path / "profile", page) as opened:
        yield opened


def contrast(one: str, other: str) -> float:
    """The ratio of luminances of two colours such as ``rgb(1, 2, 3)``, as the Web's guidelines for accessibility have it."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_in_a_browser(browser: Browser, found: Explanation) -> None:
    """By keyboard, by mouse, on a phone, in the dark, and as a screen reader hears it."""
    name = "document.getElementById('detail-name').textContent"
    caption = "document.getElementById('caption').textContent"
    names = [layer.path or "(model)" for layer in found.busiest.layers]
    browser.screen(1280, 900)
    assert browser.value(name) == "0" and "needs dim 2: 1" in browser.value(caption)

    browser.value("document.querySelector('.layers button[aria-current]').focus()")
    browser.press("ArrowDown", 40)
    assert browser.value(name) == names[1] and "needs nothing more, sends nothing" in browser.value(caption)
    assert browser.value("document.activeElement.textContent") == names[1]
    assert browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is visible"
    browser.press("End", 35)
    assert browser.value(name) == names[-1]
    browser.press("Home", 36)
    browser.press("Tab", 9)
    assert browser.value("document.activeElement.closest('.layers')") is None, "the table is one stop of the tabulator"

    browser.click('tr[data-layer="3"] button')
    assert browser.value(name) == "3"
    before = browser.value("document.getElementById('drawings').innerHTML")
    browser.click('#mesh button[data-rank="0"]')
    assert browser.value(caption).startswith("Rank 0, 0 owns [:, :, 0:16, 0:16]")
    assert browser.value("document.getElementById('drawings').innerHTML") != before
    browser.click('.chart g[data-layer="0"]')
    assert browser.value(name) == "0"

    for width, height in ((360, 740), (1600, 1000), (1280, 900)):
        browser.screen(width, height)
        assert browser.value("document.documentElement.scrollWidth") <= width, "nothing is wider than the screen"
        wide = "[...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth).length"
        assert browser.value(wide) == 0, "no table is cut off at its right"
    pages = set()
    for scheme in ("light", "dark"):
        browser.scheme(scheme)
        pages.add(browser.value("getComputedStyle(document.body).backgroundColor"))
        for text, ground in (
            ("h1", "body"),
            (".totals dt", "section"),
            (".layers tbody small", "tr.chosen > th"),
            (".axis", "section"),
        ):
            ink, paper = (
                browser.value(f"getComputedStyle(document.querySelector('{selector}')).{what}")
                for selector, what in ((text, "color"), (ground, "backgroundColor"))
            )
            assert contrast(ink, paper) >= 4.5, (scheme, text)
    assert len(pages) == 2

    tree = browser.ask("Accessibility.getFullAXTree")["nodes"]
    heard = {(node["role"]["value"], node["name"]["value"]) for node in tree if "name" in node and "role" in node}
    assert {("button", "next layer"), ("button", "rank 0, 0"), ("heading", "Layers"), ("columnheader", "Sent")} <= heard
    assert all(text for role, text in heard if role in {"button", "image"})
    assert any(role == "image" and text.startswith("Memory kept and bytes sent") for role, text in heard)
