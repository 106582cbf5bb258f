"""`python -m zjournal` is `zj`."""

import sys

from zjournal.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
