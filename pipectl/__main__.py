"""``python -m pipectl``."""

import sys

from pipectl.cli import main

if __name__ == "__main__":
    sys.exit(main())
