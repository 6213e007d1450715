"""Train a copy of a model for some steps, find faults in its training, and try fixes.

Writes report.html, report.json, report.md, config.yaml and tensorboard/ into a folder. The model,
its weights and its files are never changed.

for example:
  adiv-audit torchvision.models.resnet18
  adiv-audit timm:vit_tiny_patch16_224 --data imagefolder:photos --optimizer-args '{"lr": 0.003}'
  adiv-audit my_project.train:build --data my_project.train:batches --loss my_project.train:loss
  adiv-audit hf:configs/gpt2 --data text:book.txt --fail-if 'scale_cv > 1' --fail-if act
  adiv-audit --config adiv-audit/config.yaml --steps 200
  adiv-audit compare before after --out compare.html
  adiv-audit compare runs/mine.html runs/other.html

exit codes:
  0  audited
  1  a --fail-if rule holds
  2  the audit was not possible: the message says what to do
  130  interrupted with Ctrl-C; the results so far are written
  141  the output was closed before its end, as by `| head`
"""

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path

from adiv_monitor.audit.audit import audit
from adiv_monitor.audit.command import terminal
from adiv_monitor.audit.command.output import check, write, write_page
from adiv_monitor.audit.command.prepare import prepare
from adiv_monitor.audit.options.config import DEFAULTS, Config, Parser, read
from adiv_monitor.audit.options.fail_if import hits, parse
from adiv_monitor.audit.options.usage import UsageError, needed, one_line, place, said
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.audit.sources.imported import OF_FILE
from adiv_monitor.audit.training.target_loss import LossError
from adiv_monitor.pages.running_files import beside
from adiv_monitor.printable import printable

CLOSED_PIPE = 141  # 128 + SIGPIPE
# Options that are arguments of `audit`, except those that name objects.
_PASSED = {*DEFAULTS}.intersection(signature(audit).parameters) - {"model", "loss", "optimizer"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        try:
            return _run(argv[argv[:1] == ["audit"] :])  # `adiv-monitor audit` is `adiv-audit`
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # as by `| head -3`; Python flushes again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def _run(argv: list[str]) -> int:
    try:
        if argv[:1] == ["compare"]:
            return _compare(argv[1:])
        config, of_file = read(argv, __doc__ or "")
        OF_FILE.set(of_file)
        return _audit(config)
    except BrokenPipeError:
        raise
    except (UsageError, LossError, OSError) as error:
        told = str(error)
    except KeyboardInterrupt:
        print("adiv-audit: interrupted before there was anything to write", file=sys.stderr)
        return 130
    except Exception as error:
        traceback.print_exc()
        told = f"the audit itself failed: {said(error)}"
    print(f"adiv-audit: {printable(told)}", file=sys.stderr)
    return 2


def _audit(config: Config) -> int:
    for package in ("yaml", "jinja2", "matplotlib", "tensorboard"):
        needed(package, "adiv-audit")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: the user's own modules lie here
    check(config.out, force=config.force)
    with _users_code(), terminal.progress() as progress:
        arguments, notes = prepare(config)
        passed = {name: getattr(config, name) for name in _PASSED}
        report = audit(**arguments, **passed, progress=progress)
    record = replace(report.record, notes=(*notes, *report.record.notes))
    report = replace(report, record=record)
    write(report, config)
    terminal.show(report, terminal.console(), config.model)
    print(f"\nreport: {printable(str(Path(config.out) / 'report.html'))}")
    failed = [(rule, hit) for rule in config.fail_if for hit in hits(parse(rule), report)]
    for rule, hit in failed:
        print(printable(f"fails {rule!r}: {hit}"))
    if report.record.interrupted:
        print("adiv-audit: interrupted; the report holds the results so far", file=sys.stderr)
        return 130
    return 1 if failed else 0


@contextmanager
def _users_code() -> Iterator[None]:
    """Run the user's code: it finds no arguments on the command line, and does not end the program.

    Raises:
        UsageError: it called `sys.exit`.
    """
    arguments, sys.argv[1:] = sys.argv[1:], []
    try:
        yield
    except SystemExit as error:
        where = place(traceback.extract_tb(error.__traceback__)) or "the code under audit"
        raise UsageError(
            f"{where} ended the program (sys.exit({error.code!r})), expected code that returns"
        ) from error
    finally:
        sys.argv[1:] = arguments


def _compare(argv: list[str]) -> int:
    parser = Parser(
        "adiv-audit compare",
        description="Writes a page that compares two audits or trainings side by side.",
        allow_abbrev=False,
    )
    about = "folder of an audit, page of a training (run.html), or the JSON of either"
    for name in "ab":
        parser.add_argument(name, metavar=name.upper(), help=about)
    parser.add_argument("--out", metavar="FILE", default="compare.html", help="the page")
    parser.add_argument("--force", action="store_true", help="overwrite any file that --out is")
    given = parser.parse_args(argv)
    a, b = _report(given.a), _report(given.b)
    needed("jinja2", "adiv-audit compare")
    from adiv_monitor.pages import compare

    write_page(given.out, compare(a, b, (given.a, given.b)), force=given.force)
    print(printable(f"page: {given.out}"))
    return 0


def _report(name: str) -> AuditReport:
    path = Path(name)
    if path.is_dir():
        path /= "report.json"
    elif path.suffix.lower() == ".html":
        path = beside(path, ".json")
    try:
        return AuditReport.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"compare {name}: {path} is no report: {one_line(error)}") from error
