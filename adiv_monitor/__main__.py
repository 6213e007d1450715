"""Runs the command `adiv-audit` for `python -m adiv_monitor`, with or without the word `audit`."""

import sys

from adiv_monitor.audit.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
