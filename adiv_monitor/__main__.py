"""`python -m adiv_monitor`: the command `adiv-audit`."""

import sys

from adiv_monitor.audit.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
