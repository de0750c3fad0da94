"""Two hosts with their own addresses and names, joined by a cable: network namespaces and a pair of virtual devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pages import execute, snippet
from torch import nn
from torchrun import finish, start

import torchhalo

ADDRESSES = "10.83.0.1", "10.83.0.2"
DEVICE = "halo0"  # on each host, its end of the cable


@contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """What to put before a command for it to run on the one or the other host; they are gone when their last process is.

    The name of each is its address, which needs no name service.
    """
    # Who is not root may be so in a user namespace of his own, where the machine allows that.
    user, enter = ([], []) if os.geteuid() == 0 else (["--map-root-user"], ["--user", "--preserve-credentials"])
    hosts: list[list[str]] = []
    with ExitStack() as stack:
        for address in ADDRESSES:
            # The second inside the first's user namespace, which must own both ends of the cable.
            outer = hosts[0] if hosts and user else []
            process = stack.enter_context(holder([*outer, "unshare", *([] if outer else user), "--net", "--uts"]))
            hosts.append(["nsenter", "--target", str(process.pid), "--net", "--uts", *enter])
            command(*hosts[-1], sys.executable, "-c", f"import socket; socket.sethostname({address!r})")
        other = hosts[1][2]
        command(*hosts[0], "ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", other)
        for host, address in zip(hosts, ADDRESSES, strict=True):
            command(*host, "ip", "address", "add", f"{address}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                command(*host, "ip", "link", "set", device, "up")
        yield hosts


@contextmanager
def holder(unshare: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process in namespaces of its own, which it keeps alive."""
    with or_skip(unshare):
        process = subprocess.Popen(
            [*unshare, "sh", "-c", "echo in; exec sleep 600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    try:
        assert process.stdout is not None and process.stderr is not None
        with or_skip(unshare):
            if process.stdout.readline() != "in\n":
                raise OSError(process.stderr.read().strip())
        yield process
    finally:
        process.kill()
        process.communicate()


def command(*words: str) -> None:
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])  # `ip` may be there alone
    with or_skip(words):
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PATH": path})
        if done.returncode:
            raise OSError(done.stderr.strip())


@contextmanager
def or_skip(words: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        pytest.skip(f"no network namespaces on this machine: `{' '.join(words)}` says: {error}")


@pytest.mark.slow
def test_two_hosts_train_as_one_process(tmp_path: Path) -> None:
    code = snippet("training", "Many hosts")
    (tmp_path / "train.py").write_text(code.replace('"cuda"', '"cpu"'))
    line = snippet("training", "Many hosts", "bash")
    with two_hosts() as hosts:
        swaps = {"8": "2", "first-host:29500": f"{ADDRESSES[0]}:29500"}
        runs = [start(line, tmp_path, swaps, inside=host, GLOO_SOCKET_IFNAME=DEVICE) for host in hosts]
        finish(*runs, seconds=200)
        sent = [int(counter) for counter in traffic(hosts)]
    assert min(sent) > 10_000, f"halos and gradients went over the cable, {sent} bytes"

    model, expected = (execute(model_of(code), {"torch": torch, "nn": nn})["model"] for _ in range(2))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        image = torch.linspace(step, step + 1, 23 * 18, dtype=torch.float64).sin().view(1, 1, 23, 18)
        optimizer.zero_grad()
        F.mse_loss(expected(image), image.cos()).backward()
        optimizer.step()
    assert torchhalo.Checkpoints(tmp_path / "checkpoints").load(model) == {"step": 3}
    for (name, value), got in zip(expected.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(got, value, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def model_of(code: str) -> str:
    """The lines that seed and make the model."""
    return "\n".join(line for line in code.splitlines() if line.startswith(("torch.manual_seed", "model = ")))


def traffic(hosts: list[list[str]]) -> Iterator[str]:
    """How many bytes each host has sent over the cable."""
    for host in hosts:
        read = [*host, "cat", "/proc/net/dev"]
        lines = subprocess.run(read, capture_output=True, text=True, check=True).stdout.splitlines()
        yield next(line for line in lines if DEVICE in line).split(":")[1].split()[8]
