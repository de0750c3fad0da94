"""The command line: ``torchhalo demo``, ``torchhalo check`` and ``torchhalo explain``."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import torchhalo
from torchhalo.parallel.arrays import placements_for
from torchhalo.parallel.streaming.schedule import BudgetError
from torchhalo.tools import demo, report
from torchhalo.tools.check import TOLERANCE, check
from torchhalo.tools.explain import DEVICES, explain, smallest_mesh
from torchhalo.tools.explanation import Explanation
from torchhalo.tools.launch import RankError
from torchhalo.tools.observe import named
from torchhalo.tools.stream_plan import BUS, plan_stream
from torchhalo.tools.text import size_text

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in demo.TOLERANCE}

EXPLAINED = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}

CHECKED = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``, by default the arguments of this process.

    Returns:
        The exit status: 0 if all is well, 1 if not. Wrong arguments raise SystemExit with status 2.
    """
    parser = argparse.ArgumentParser(
        prog="torchhalo", description="Convolution on spatially sharded DTensors, with the numbers of one device."
    )
    version = f"torchhalo {torchhalo.__version__} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_check(commands)
    _add_explain(commands)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "Train a small U-Net on a large image sharded over local processes, beside one process, and compare."
    parser = commands.add_parser("demo", help=about, description=about)
    parser.add_argument("--ranks", type=_positive, metavar="N", help="processes that share the height (default: 2)")
    parser.add_argument("--mesh", type=_mesh, metavar="HxW", help="processes along height and width, such as 2x2")
    parser.add_argument(
        "--size", type=_size, default="768x1024", metavar="S", help="of the image, 512 or 512x768 (default: %(default)s)"
    )
    parser.add_argument("--steps", type=_positive, default=8, metavar="N", help="of training (default: %(default)s)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of weights and image (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and image (default: %(default)s)")
    parser.add_argument(
        "--picture", type=Path, default="torchhalo-demo.png", metavar="PATH", help="to write (default: %(default)s)"
    )
    parser.add_argument("--no-picture", action="store_const", const=None, dest="picture", help="write none")
    parser.set_defaults(run=lambda arguments: _demo(parser, arguments))


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    mesh = _agreed_mesh(parser, arguments)
    settings = demo.Settings(arguments.size, mesh, arguments.steps, arguments.seed, DTYPES[arguments.dtype])
    try:
        comparison = demo.compare(settings, arguments.picture)
    except RankError as error:
        print(f"torchhalo demo: rank {error.rank} failed, the others were ended. {error.reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("torchhalo demo: interrupted", file=sys.stderr)
        return 130
    print(comparison.table())
    if arguments.picture is not None:
        print(f"\npicture: {arguments.picture}")
    if not comparison.equal:
        print("FAILED: the ranks and one process differ by more than the tolerance")
        return 1
    print("passed: the ranks give the numbers of one process")
    return 0


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "Run a model on random input, sharded over local processes and in one process, and compare."
    after = (
        "Of a model that differs, it names the first module whose output does and the first gradient that does; of one that "
        "raises, the op, the module and what to do. Exit status: 0 if the sharded model gives one process's numbers and "
        "gathers next to nothing, else 1."
    )
    parser = commands.add_parser("check", help=about, description=about, epilog=after)
    _add_model(parser)
    parser.add_argument("--ranks", type=_positive, metavar="N", help="processes that share the input (default: 2)")
    parser.add_argument("--mesh", type=_mesh, metavar="NxM", help="processes along two dims of the input, such as 2x2")
    parser.add_argument("--backward", action="store_true", help="compare the gradients of inputs and parameters too")
    parser.add_argument("--method", default="forward", metavar="NAME", help="what of the model to call, such as decode")
    parser.add_argument(
        "--loss",
        metavar="module:function",
        help="of what the model returns, a scalar; compared, and its gradients with --backward",
    )
    parser.add_argument("--eval", action="store_true", help="in evaluation mode (default: training mode)")
    parser.add_argument("--dtype", choices=CHECKED, default="float64", help="of weights and input (default: %(default)s)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of weights and input (default: %(default)s)")
    parser.set_defaults(run=lambda arguments: _check(parser, arguments))


def _add_model(parser: argparse.ArgumentParser) -> None:
    """What names a model, its inputs and how they are cut."""
    parser.add_argument(
        "model", metavar="module:factory", help="a function that makes the model, also of a file in this folder"
    )
    parser.add_argument(
        "--input",
        type=_shape,
        action="append",
        required=True,
        metavar="SHAPE",
        help="such as 1,3,512,512; again for a second input",
    )
    parser.add_argument(
        "--dims",
        type=_dims,
        metavar="D",
        help="dims to cut, one for each axis of the mesh, such as 3 or 2,3 or -1 (default: chosen)",
    )


def _must_fit(parser: argparse.ArgumentParser, arguments: argparse.Namespace, mesh: tuple[int, ...]) -> None:
    """End with what is wrong about the model, its input or the dims, if anything is."""
    if arguments.dims is not None and len(arguments.dims) != len(mesh):
        parser.error(f"--dims names {len(arguments.dims)} dims, the mesh has {len(mesh)} axes: give one dim for each")
    try:
        named(arguments.model)
        if getattr(arguments, "loss", None) is not None:
            named(arguments.loss)
        placements_for(arguments.input[0], len(mesh), arguments.dims)
    except ValueError as error:
        parser.error(str(error))


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    mesh = _agreed_mesh(parser, arguments)
    _must_fit(parser, arguments, mesh)
    try:
        report = check(
            arguments.model,
            tuple(arguments.input),
            mesh=mesh,
            dims=arguments.dims,
            backward=arguments.backward,
            train=not arguments.eval,
            dtype=CHECKED[arguments.dtype],
            seed=arguments.seed,
            method=arguments.method,
            loss=arguments.loss,
            progress=lambda text: print(f"torchhalo check: {text}", file=sys.stderr, flush=True),
        )
    except KeyboardInterrupt:
        print("torchhalo check: interrupted", file=sys.stderr)
        return 130
    print(report)
    return 0 if report.ok else 1


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "Tell what each layer of a model keeps, sends and needs on a mesh, without running it: no processes, no memory."
    parser = commands.add_parser("explain", help=about, description=about)
    _add_model(parser)
    parser.add_argument("--mesh", type=_any_mesh, default=(2,), metavar="N[xM]", help="such as 8 or 2x4 (default: 2)")
    parser.add_argument("--dtype", choices=EXPLAINED, default="float32", help="of weights and input (default: %(default)s)")
    parser.add_argument("--train", action="store_true", help="a training step (default: a forward in evaluation mode)")
    parser.add_argument(
        "--memory", type=_amount, metavar="BYTES", help="find the smallest mesh on which a rank needs no more, such as 80GB"
    )
    parser.add_argument("--device", choices=sorted(DEVICES), help="predict the time of a step on such devices")
    parser.add_argument("--flops", type=_amount, metavar="N", help="predict it for so many operations per second, such as 400T")
    parser.add_argument("--bandwidth", type=_amount, metavar="BYTES", help="and so many bytes per second, such as 50GB")
    parser.add_argument(
        "--stream", action="store_true", help="tell what torchhalo.stream would do, on one device with --memory"
    )
    parser.add_argument("--shards", type=_any_mesh, metavar="N[xM]", help="of --stream (default: as few as --memory allows)")
    parser.add_argument("--json", action="store_true", help="for programs")
    for kind, about in (("html", "a page to look at, layer by layer"), ("svg", "a picture"), ("png", "a picture of pixels")):
        parser.add_argument(f"--{kind}", type=_new_file, metavar="PATH", help=f"write {about}")
    parser.set_defaults(run=lambda arguments: _explain(parser, arguments))


def _explain_stream(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.memory is None and arguments.shards is None:
        parser.error("--stream wants --memory, --shards or both")
    try:
        found = plan_stream(
            arguments.model,
            arguments.input,
            memory=arguments.memory or math.inf,
            shards=arguments.shards,
            dims=arguments.dims,
            dtype=EXPLAINED[arguments.dtype],
            train=arguments.train,
            progress=lambda text: print(f"torchhalo explain: {text}", file=sys.stderr, flush=True),
        )
    except BudgetError as error:
        parser.error(f"no number of shards does: {error}")
    print(found.json() if arguments.json else found)
    flops = arguments.flops or (DEVICES[arguments.device][0] if arguments.device else None)
    if flops is not None and not arguments.json:
        print(f"{'predicted time':<24}at least {found.seconds(flops, arguments.bandwidth or BUS):.2g} s")
    return 0


def _explain(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.stream:
        return _explain_stream(parser, arguments)
    _must_fit(parser, arguments, arguments.mesh)
    if (arguments.flops is None) != (arguments.bandwidth is None):
        parser.error("--flops and --bandwidth go together")
    speed = (arguments.flops, arguments.bandwidth) if arguments.flops else DEVICES.get(arguments.device)

    def progress(text: str) -> None:
        print(f"torchhalo explain: {text}", file=sys.stderr, flush=True)

    case = {"dims": arguments.dims, "dtype": EXPLAINED[arguments.dtype], "train": arguments.train, "progress": progress}
    try:
        found = explain(arguments.model, arguments.input, arguments.mesh, **case)
        print(found.json() if arguments.json else found)
        _write_report(found, arguments)
        if speed is not None and not arguments.json:
            hidden, exposed = found.seconds(*speed)
            print(f"predicted step          {hidden:.2g} s if communication is hidden, {exposed:.2g} s if not")
        if arguments.memory is not None and not arguments.json:
            mesh = smallest_mesh(arguments.model, arguments.input, arguments.memory, len(arguments.mesh), **case)
            size = f"{arguments.memory:,} bytes"
            fits = f"{size} suffice on a mesh of {size_text(mesh)}" if mesh else f"no mesh of up to 4096 ranks fits {size}"
            print(f"smallest mesh           {fits}")
    except KeyboardInterrupt:
        print("torchhalo explain: interrupted", file=sys.stderr)
        return 130
    return 0


def _write_report(found: Explanation, arguments: argparse.Namespace) -> None:
    """Write the files that were asked for, and tell where they are, aside from what programs read."""
    for path, make in ((arguments.html, report.html), (arguments.svg, report.svg), (arguments.png, report.png)):
        if path is not None:
            content = make(found)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            print(f"torchhalo explain: wrote {path}", file=sys.stderr)


def _agreed_mesh(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[int, ...]:
    """The shape of the mesh that --mesh and --ranks ask for."""
    mesh: tuple[int, ...] = arguments.mesh or (arguments.ranks or 2,)
    if arguments.ranks and arguments.ranks != math.prod(mesh):
        shape = size_text(mesh)
        parser.error(f"--mesh {shape} has {math.prod(mesh)} ranks, but --ranks is {arguments.ranks}: give one of them")
    return mesh


def _new_file(text: str) -> Path:
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"wants a path in a folder that exists, got {text!r}")
    return Path(text)


def _positive(text: str) -> int:
    return _integer(text, 1, 2**20)


def _seed(text: str) -> int:
    return _integer(text, 0, 2**31 - 1)


def _integer(text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"wants a whole number from {low} to {high}, got {text!r}")
    return int(text)


def _size(text: str) -> tuple[int, int]:
    height, *width = _sizes(text, "N or HxW, such as 512 or 512x768", 1, 2)
    return height, width[0] if width else height


def _mesh(text: str) -> tuple[int, ...]:
    return _sizes(text, "HxW, such as 2x2", 2, 2)


def _any_mesh(text: str) -> tuple[int, ...]:
    return _sizes(text, "N or NxM, such as 8 or 2x4", 1, 3)


def _amount(text: str) -> int:
    """A number with a unit, such as 80GB, 400T or 1.5GiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(i?)B?", text, re.IGNORECASE)
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"wants a number with a unit, such as 80GB or 400T, got {text!r}")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGTP".index(found[2].upper() or " "))


def _shape(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"wants sizes with commas between, such as 1,3,512,512, got {text!r}")
    return tuple(map(_positive, parts))


def _dims(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.removeprefix("-").isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"wants dims with commas between, such as 2,3, got {text!r}")
    return tuple(map(int, parts))


def _sizes(text: str, form: str, fewest: int, most: int) -> tuple[int, ...]:
    parts = text.split("x")
    if not fewest <= len(parts) <= most or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"wants {form}, got {text!r}")
    return tuple(map(_positive, parts))
