"""What is released: an sdist with all sources, and a wheel built from it, whose `torchhalo demo` runs beside torch alone."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import tomllib

import torchhalo

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = re.findall(r"^graft (\S+)", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE)
#: What a checkout holds besides sources.
PRODUCTS = [".git", ".venv*", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "build", "dist", "site", "results"]


def run(*command: str, cwd: Path) -> str:
    """What ``command`` prints. It sees neither this checkout nor, by pip's settings, any index."""
    hidden = {name for name in os.environ if name.startswith(("PIP_", "PYTHON"))}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from it.

    The sdist is made of a copy: setuptools writes into the source tree, and packs what an earlier build left there.
    """
    folder = tmp_path_factory.mktemp("release")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*PRODUCTS))
    hook = f"import setuptools.build_meta; setuptools.build_meta.build_sdist({str(folder / 'dist')!r})"
    run(sys.executable, "-c", hook, cwd=folder / "source")
    (sdist,) = (folder / "dist").iterdir()
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(folder / "dist"),
        str(sdist),
        cwd=folder,
    )
    return folder / "dist"


def sources(*folders: str) -> set[str]:
    paths = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {path.as_posix() for path in paths if not any(Path(part).match(p) for part in path.parts for p in PRODUCTS)}


def test_sdist_has_all_sources(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not sources("torchhalo", *FOLDERS) - names
    assert not {"Makefile", "CHANGELOG.md", "CITATION.cff", "LICENSE", "requirements-dev.txt"} - names


def test_wheel_has_the_package_and_nothing_else(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(next(name for name in names if name.endswith("/METADATA"))))
    assert {name for name in names if ".dist-info/" not in name} == sources("torchhalo")
    assert "torchhalo/py.typed" in names
    needed = [name for name in metadata.get_all("Requires-Dist", []) if "extra ==" not in name]
    assert (metadata["Version"], needed) == (torchhalo.__version__, ["torch<2.16,>=2.11"])
    assert metadata.get_all("Project-URL") and "Typing :: Typed" in metadata.get_all("Classifier", [])


@pytest.mark.slow
def test_demo_runs_from_the_wheel(dist: Path, tmp_path: Path) -> None:
    """In an environment that holds the wheel alone, and finds torch in this one's packages, though not our editable install:
    the .pth files of a folder on the path are not read.
    """
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        str(next(dist.glob("*.whl"))),
        cwd=tmp_path,
    )
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    place = run(str(python), "-c", "import torchhalo; print(torchhalo.__file__)", cwd=tmp_path)
    assert Path(place.strip()) == packages / "torchhalo" / "__init__.py"
    arguments = ["demo", "--size", "48", "--steps", "1", "--picture", "demo.png"]
    printed = run(str(python.with_name("torchhalo")), *arguments, cwd=tmp_path)
    assert "largest difference of predictions" in printed and (tmp_path / "demo.png").stat().st_size > 1000


def test_citation_is_of_this_project() -> None:
    citation = dict(re.findall(r"^([\w-]+): (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert (citation["version"], citation["license"]) == (torchhalo.__version__, PROJECT["license"])
    assert citation["repository-code"] == PROJECT["urls"]["Source"]


def test_automation_calls_the_makefile() -> None:
    """The workflow and the hooks hold no commands of their own; the former runs the oldest, the pinned and the newest torch."""
    makefile, workflow = (ROOT / "Makefile").read_text(), (ROOT / ".github/workflows/ci.yml").read_text()
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    commands = re.findall(r"^ +(?:- run|entry): (.*)$", workflow + hooks, re.MULTILINE)
    targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
    assert ".ci/run" in commands and {*commands} - {".ci/run"} <= {f"make {target}" for target in targets}
    releases = re.findall(r'"(\d+\.\d+)\.0"', workflow)
    oldest, after = re.search(r"torch>=2\.(\d+),<2\.(\d+)", str(PROJECT["dependencies"])).groups()
    pinned = re.search(r"^PINNED := (\d+\.\d+)", makefile, re.MULTILINE)[1]
    assert releases == [f"2.{oldest}", pinned, f"2.{int(after) - 1}"]
