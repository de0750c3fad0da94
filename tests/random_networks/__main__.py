import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
    from random_networks.runner import main

    sys.exit(min(main(), 1))
