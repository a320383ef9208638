"""`python -m cjax`: the command line, where the folder of its script is not on PATH."""

import sys

from cjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
