"""``python -m torchhalo`` is the command ``torchhalo``."""

import sys

from torchhalo.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
