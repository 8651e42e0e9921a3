"""`python -m kvkeeper.cli` is the command `kvkeeper`."""

import sys

from kvkeeper.cli import main

if __name__ == "__main__":
    sys.exit(main())
