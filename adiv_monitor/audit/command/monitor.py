"""The command `adiv-monitor`, whose subcommand `audit` is `adiv-audit`."""

import sys
from collections.abc import Sequence

from adiv_monitor.audit.command import cli
from adiv_monitor.audit.command.terminal import quiet_when_unread

_USAGE = """\
usage: adiv-monitor audit MODEL …  trains a copy of a model, says what is wrong, tries fixes
       adiv-monitor compare A B …  makes one page of two audits or trainings, side by side

Each has its own --help. A training writes its page with HtmlSink("run.html")."""


@quiet_when_unread
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    command, rest = (given or [""])[0], given[1:]
    if command == "audit":
        return cli.main(rest)
    if command == "compare":
        return cli.main(["compare", *rest])
    asked = command in ("-h", "--help")
    print(_USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
