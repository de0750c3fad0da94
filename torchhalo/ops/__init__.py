"""One file per family of ops: what is its window, what is its local kernel. Importing a file registers its handlers."""

from torchhalo.ops import convolution, padding

__all__ = ["convolution", "padding"]
