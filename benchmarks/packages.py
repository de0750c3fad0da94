"""Fill `.gpu-packages/` with the model libraries that `benchmarks.models` wants, for a machine that can install nothing.

Run `python -m benchmarks.packages` where pip works, copy the folder along with the repository, and put it on `PYTHONPATH`
there. It holds pure Python alone, without what these libraries need of others (torch, numpy, huggingface_hub, ...).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".gpu-packages"
#: Those of requirements-dev.txt with the versions that it pins.
PACKAGES = ("diffusers", "einops", "monai", "importlib_metadata", "zipp")


def main() -> int:
    """Install anew, and say how large it is."""
    pins = dict(re.findall(r"^([\w-]+)(==\S+)", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE))
    wanted = [name + pins.get(name, "") for name in PACKAGES]
    shutil.rmtree(FOLDER, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(FOLDER), *wanted]
    subprocess.run(pip, check=True)
    sizes = [path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()]
    print(f"{FOLDER.name}: {', '.join(wanted)}; {len(sizes)} files, {sum(sizes) / 2**20:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
