"""Measure torchhalo: a table on the screen, JSON on disk, progress on stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path

from benchmarks.common import Record

NAMES = ("conv_local", "overhead", "unet", "scale", "models", "attention", "tokens", "one_device")
RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that ``argv``, by default the arguments of this process, names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True, dest="name")
    for name in NAMES:
        module = import_module(f"benchmarks.{name}")
        about = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name, help=about.splitlines()[0], description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument("--quick", action="store_true", help="few and small cases, to see that it runs")
        command.add_argument("--output", type=Path, metavar="FILE", help="where the JSON goes (default: benchmarks/results)")
        module.add_arguments(command)
    arguments = parser.parse_args(argv)
    module = import_module(f"benchmarks.{arguments.name}")
    output = arguments.output or RESULTS / f"{arguments.name}-{datetime.now():%Y%m%d-%H%M%S}.json"
    record = Record(arguments.name, sys.argv[1:] if argv is None else list(argv), output)
    try:
        module.run(arguments, record)
    except KeyboardInterrupt:
        print("interrupted; what was measured so far:", file=sys.stderr)
    print(record.heading())
    print()
    print(module.table(record.rows))
    print(f"\nwritten to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
