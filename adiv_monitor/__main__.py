"""Runs the command `adiv-audit` for `python -m adiv_monitor`."""

import sys

from adiv_monitor.audit.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
