"""`python -m stalloc` is the `stalloc` command."""

import sys

from stalloc.cli import main

if __name__ == "__main__":
    sys.exit(main())
