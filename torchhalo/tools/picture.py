"""Pictures of tensors, as PNG files, with nothing but the standard library and torch."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

GAP = 8
INK = 0.75
# Five rows of three dots each, the top row in the highest bits.
FONT = {
    " ": 0o00000, ".": 0o00002, ",": 0o00024, "-": 0o00700, "+": 0o02720, ":": 0o02020,
    "0": 0o75557, "1": 0o26227, "2": 0o71747, "3": 0o71317, "4": 0o55711, "5": 0o74717, "6": 0o74757, "7": 0o71244,
    "8": 0o75757, "9": 0o75717, "A": 0o25755, "B": 0o65656, "C": 0o34443, "D": 0o65556, "E": 0o74647, "F": 0o74644,
    "G": 0o34553, "H": 0o55755, "I": 0o72227, "J": 0o11152, "K": 0o55655, "L": 0o44447, "M": 0o57755, "N": 0o65555,
    "O": 0o25552, "P": 0o65644, "Q": 0o25573, "R": 0o65655, "S": 0o34216, "T": 0o72222, "U": 0o55557, "V": 0o55552,
    "W": 0o55775, "X": 0o55255, "Y": 0o55222, "Z": 0o71247,
}  # fmt: skip


def save(path: Path, panels: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Write panels, two in a row, each under its caption.

    Args:
        panels: Captions and pictures: values from 0 to 1, of shape (3, height, width), all the same.
    """
    longest = max(len(caption) for caption, _ in panels)
    scale = max(1, min(2, panels[0][1].shape[2] // (4 * longest)))
    framed = [_framed(_text(caption, scale), picture.float().clamp(0, 1)) for caption, picture in panels]
    rows = [torch.cat(framed[at : at + 2], dim=2) for at in range(0, len(framed), 2)]
    path.write_bytes(png((torch.cat(rows, dim=1) * 255).round().to(torch.uint8)))


def heat(values: torch.Tensor) -> torch.Tensor:
    """(height, width) of values from 0 to 1 as colours: black, red, yellow, white."""
    return torch.stack([values * 3, values * 3 - 1, values * 3 - 2]).clamp(0, 1)


def blend(values: torch.Tensor, low: Sequence[float], high: Sequence[float]) -> torch.Tensor:
    """(height, width) of values from 0 to 1 as colours from ``low`` to ``high``."""
    first, last = (torch.tensor(colour).view(3, 1, 1) for colour in (low, high))
    return first + values * (last - first)


def png(pixels: torch.Tensor) -> bytes:
    """The file that shows ``pixels``: bytes of shape (3, height, width)."""
    _, height, width = pixels.shape
    # A byte at the start of each line says that it stands as it is, without a filter.
    lines = torch.nn.functional.pad(pixels.permute(1, 2, 0).reshape(height, width * 3), (1, 0))
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(lines.flatten().tolist()))),
        (b"IEND", b""),
    ]
    chunks = [struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def write(pixels: torch.Tensor, text: str, x: int, y: int, scale: int) -> None:
    """Put dark text into ``pixels``, bytes of shape (3, height, width), from (x, y) on; what has no letter is a space."""
    known = "".join(letter if letter in FONT else " " for letter in text.upper())
    dots = _text(known, scale).bool()
    part = pixels[:, y : y + dots.shape[0], x : x + dots.shape[1]]
    part[:, dots[: part.shape[1], : part.shape[2]]] = 32


def _framed(text: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
    _, height, width = picture.shape
    text = text[:, :width]
    head = text.shape[0] + GAP
    framed = torch.zeros(3, head + height + GAP, width + 2 * GAP)
    framed[:, GAP // 2 : GAP // 2 + text.shape[0], GAP : GAP + text.shape[1]] = text * INK
    framed[:, head : head + height, GAP : GAP + width] = picture
    return framed


def _text(caption: str, scale: int) -> torch.Tensor:
    """Dots of 0 and 1, five rows of them, each ``scale`` pixels wide and high."""
    glyphs = torch.tensor([FONT[letter] for letter in caption.upper()])
    bits = glyphs.view(-1, 1) >> torch.arange(14, -1, -1) & 1
    letters = torch.nn.functional.pad(bits.view(-1, 5, 3), (0, 1))
    return letters.transpose(0, 1).reshape(5, -1).float().repeat_interleave(scale, 0).repeat_interleave(scale, 1)
