"""Spans, boxes, windows and relations: the integer arithmetic under every sharded op.

Knows nothing of torch: no import of it, no tensors, no ranks.
"""

from torchhalo.geometry.relations import Intervals, Piece, Pieces, Relation
from torchhalo.geometry.spans import (
    Box,
    Grid,
    Span,
    boxes,
    cached_chunks,
    cached_window_chunks,
    chunks,
    hull,
    merge,
    shell,
    window_chunks,
)
from torchhalo.geometry.windows import Mirror, Window, crop, overhang

__all__ = [
    "Box",
    "Grid",
    "Intervals",
    "Mirror",
    "Piece",
    "Pieces",
    "Relation",
    "Span",
    "Window",
    "boxes",
    "cached_chunks",
    "cached_window_chunks",
    "chunks",
    "crop",
    "hull",
    "merge",
    "overhang",
    "shell",
    "window_chunks",
]
