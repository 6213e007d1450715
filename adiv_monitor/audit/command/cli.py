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

import argparse
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

from adiv_monitor.audit.audit import audit
from adiv_monitor.audit.command import terminal
from adiv_monitor.audit.command.output import check, write, write_page
from adiv_monitor.audit.command.prepare import Prepared, prepare
from adiv_monitor.audit.options import fail_if
from adiv_monitor.audit.options.config import (
    ARGUMENTS,
    DEFAULTS,
    HELP,
    NAMES,
    NAMING,
    Config,
    load,
    read,
)
from adiv_monitor.audit.options.usage import UsageError, needed, one_line, place, said
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.audit.sources.imported import of_file
from adiv_monitor.audit.sources.own_losses import own_losses
from adiv_monitor.audit.training.target_loss import LossError
from adiv_monitor.diagnosis.hidden import HIDDEN, hidden_keys
from adiv_monitor.pages.running_files import beside
from adiv_monitor.printable import printable
from adiv_monitor.report import ALIGNMENT_MEASURES, ATTENTION_MEASURES, REALISED_MEASURES

# Option → the measures that it adds.
_MEASURED_BY = {
    "realised": REALISED_MEASURES,
    "attention": ATTENTION_MEASURES,
    "alignment": ALIGNMENT_MEASURES,
}

# Options that are arguments of `audit`, except those that name objects.
_PASSED = {*DEFAULTS}.intersection(signature(audit).parameters).difference(NAMING)


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


@terminal.quiet_when_unread
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    argv = argv[argv[:1] == ["audit"] :]  # `adiv-monitor audit` is `adiv-audit`
    try:
        if argv[:1] == ["compare"]:
            return _compare(argv[1:])
        config, force, importing = _config(argv)
        with importing:
            return _audit(config, force)
    except (UsageError, LossError) as error:
        told = str(error)
    except RecursionError:
        told = (
            "the model's modules are nested too deeply for Python's recursion limit: put them side "
            "by side, or raise sys.setrecursionlimit where the model is built"
        )
    except KeyboardInterrupt:
        print("adiv-audit: interrupted before there was anything to write", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        traceback.print_exc()
        told = f"the audit itself failed: {said(error)}"
    print(f"adiv-audit: {printable(told)}", file=sys.stderr)
    return 2


def _config(argv: list[str]) -> tuple[Config, bool, AbstractContextManager[None]]:
    """Return the options of the command line over those of its --config file, and --force.

    The last value is the context in which what the options name may be imported.
    """
    given = vars(_parser().parse_args(argv))
    force = given.pop("force", False)
    from_file = load(given.pop("config")) if "config" in given else {}
    from_line = read(given, _shown)
    if from_file.get("trust_checkpoint") and not from_line.get("trust_checkpoint"):
        raise UsageError(
            "--config: trust_checkpoint: got true, which only the command line can say; if you "
            "trust whoever made the checkpoint: --trust-checkpoint"
        )
    config = Config(**{**from_file, **from_line})
    if not config.model:
        raise UsageError(
            "which model? Give one, such as torchvision.models.resnet18; see adiv-audit --help"
        )
    for name in ARGUMENTS:
        if hidden := hidden_keys(getattr(config, name)):
            raise UsageError(
                f"{_shown(name)}: {', '.join(hidden)}: {HIDDEN} stands for a secret that was not "
                f"written down; give {_shown(name)} with its value, and with all other arguments"
            )
    for rule in map(fail_if.parse, config.fail_if):
        for option, measures in _MEASURED_BY.items():
            if rule.measure in measures and not getattr(config, option):
                raise UsageError(f"--fail-if {rule.text!r}: {rule.measure} needs --{option}")
    packages = {x.partition(":")[0].partition(".")[0] for x in map(from_line.get, NAMING) if x}
    of_others = map(_shown, from_file.keys() - from_line.keys())
    return config, force, of_file([*of_others], packages)


def _shown(name: str) -> str:
    return "MODEL" if name == "model" else f"--{name.replace('_', '-')}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "adiv-audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these options")
    parser.add_argument(
        "--force",
        action="store_true",
        help="overwrite files with the names of the report's files even if no audit wrote them; "
        "not an option of --config",
    )
    for name, option in NAMES.items():
        usual = DEFAULTS[option]
        shown = f" (default: {usual})" if usual and usual is not True else ""
        about: dict[str, Any] = {"help": (HELP.get(option, "") + shown).replace("%", "%%")}
        if name == "model":
            about |= {"nargs": "?", "metavar": "MODEL"}
        elif isinstance(usual, bool):
            about["action"] = argparse.BooleanOptionalAction if usual else "store_true"
        elif usual == ():
            about["action"] = "append"
        parser.add_argument(name if name == "model" else _shown(name), **about)
    return parser


def _audit(config: Config, force: bool) -> int:
    for package in ("yaml", "jinja2", "matplotlib", "tensorboard"):
        needed(package, "adiv-audit")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does: the user's own modules lie here
    check(config.out, force=force)
    with _users_code():
        prepared = prepare(config)
        report = _report(prepared)
    write(report, prepared.config)
    terminal.show(report, terminal.console(), config.model)
    print(f"\nreport: {printable(str(Path(config.out) / 'report.html'))}")
    failed = _failed(config, report)
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
    arguments = sys.argv[1:]
    sys.argv[1:] = []
    try:
        yield
    except SystemExit as error:
        where = place(traceback.extract_tb(error.__traceback__)) or "the code under audit"
        raise UsageError(
            f"{where} ended the program (sys.exit({error.code!r})), expected code that "
            "returns: keep what parses arguments or exits out of the functions that are given here"
        ) from error
    finally:
        sys.argv[1:] = arguments


def _report(prepared: Prepared) -> AuditReport:
    from rich.console import Console
    from rich.progress import Progress

    config = prepared.config
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bars:
        report = audit(
            prepared.model,
            prepared.batches,
            loss=prepared.loss,
            optimizer=prepared.optimizer,
            **{name: getattr(config, name) for name in _PASSED},
            own_losses=None if config.losses is None else own_losses(config.losses),
            progress=terminal.ProgressBars(bars),
            _facts=prepared.facts,
        )
    notes = (*prepared.notes, *report.record.notes)
    return replace(report, record=replace(report.record, notes=notes))


def _failed(config: Config, report: AuditReport) -> bool:
    """Return whether a rule holds, and print every hit."""
    failed = False
    for rule in map(fail_if.parse, config.fail_if):
        for hit in fail_if.hits(rule, report):
            print(printable(f"fails {rule.text!r}: {hit}"))
            failed = True
    return failed


def _compare(argv: list[str]) -> int:
    parser = _Parser(
        "adiv-audit compare",
        description="Writes a page that compares two audits or trainings side by side.",
        allow_abbrev=False,
    )
    about = "folder of an audit, page of a training (run.html), or the JSON of either"
    parser.add_argument("a", metavar="A", help=about)
    parser.add_argument("b", metavar="B", help="the other one, in any of these forms")
    parser.add_argument("--out", metavar="FILE", default="compare.html", help="the page")
    parser.add_argument(
        "--force", action="store_true", help="overwrite --out, whatever file that is"
    )
    given = parser.parse_args(argv)
    a, b = _read(given.a), _read(given.b)
    needed("jinja2", "adiv-audit compare")
    from adiv_monitor.pages import compare

    write_page(given.out, compare(a, b, (given.a, given.b)), force=given.force)
    print(printable(f"page: {given.out}"))
    return 0


def _read(name: str) -> AuditReport:
    path = Path(name)
    if path.is_dir():
        path /= "report.json"
    elif path.suffix.lower() in (".html", ".htm"):
        path = beside(path, ".json")
    try:
        return AuditReport.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"compare {name}: can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"compare {name}: {path} is no report: {one_line(error)}") from error
