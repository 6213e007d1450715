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
  adiv-audit watch runs

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
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from adiv_monitor import alarms
from adiv_monitor.audit.audit import audit
from adiv_monitor.audit.command import output
from adiv_monitor.audit.command.code import OF_FILE, UsageError, blamed, needed, place, said
from adiv_monitor.audit.command.options import OF_AUDIT, Config, parser, read, rule
from adiv_monitor.audit.command.prepare import prepare
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.audit.training.setup import LossError
from adiv_monitor.diagnosis.finding import STRENGTHS
from adiv_monitor.files import write_whole
from adiv_monitor.pages.running_files import beside
from adiv_monitor.printable import printable
from adiv_monitor.report.wording import listed

CLOSED_PIPE = 141  # 128 + SIGPIPE


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
    except KeyboardInterrupt:
        print("adiv-audit: interrupted before there was anything to write", file=sys.stderr)
        return 130
    except (UsageError, LossError, OSError) as error:
        told = str(error)
    except Exception as error:
        traceback.print_exc()
        told = f"the audit itself failed: {said(error)}"
    print(f"adiv-audit: {printable(told)}", file=sys.stderr)
    return 2


def _run(argv: list[str]) -> int:
    if argv[:1] == ["compare"]:
        return _compare(argv[1:])
    if argv[:1] == ["watch"]:
        from adiv_monitor.sinks.watch import watch

        return watch(argv[1:])
    config, of_file = read(argv, __doc__ or "")
    OF_FILE.set(of_file)
    return _audit(config)


def _audit(config: Config) -> int:
    for package in ("yaml", "jinja2", "matplotlib", "tensorboard"):
        needed(package, "adiv-audit")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: the user's own modules lie here
    output.check(config.out, force=config.force)
    report = _audited(config)
    output.write(report, config)
    output.show(report, sys.stdout, config.model)
    print(f"\nreport: {printable(str(Path(config.out) / 'report.html'))}")
    failed = [(text, hit) for text in config.fail_if for hit in hits(rule(text), report)]
    for text, hit in failed:
        print(printable(f"fails {text!r}: {hit}"))
    if report.record.interrupted:
        print("adiv-audit: interrupted; the report holds the results so far", file=sys.stderr)
        return 130
    return 1 if failed else 0


def _audited(config: Config) -> AuditReport:
    """Run the audit; the user's code finds no arguments in `sys.argv`, and does not exit."""
    arguments, sys.argv[1:] = sys.argv[1:], []
    try:
        with output.progress() as progress:
            given, notes = prepare(config)
            options = {name: x for name, x in vars(config).items() if name in OF_AUDIT}
            report = audit(**{**options, **given}, progress=progress)
    except SystemExit as error:
        where = place(traceback.extract_tb(error.__traceback__)) or "the code under audit"
        raise UsageError(
            f"{where} ended the program (sys.exit({error.code!r})), expected code that returns"
        ) from error
    finally:
        sys.argv[1:] = arguments
    notes = (*notes, *report.record.notes)
    return replace(report, record=replace(report.record, notes=notes))


def hits(rule: alarms.Rule, report: AuditReport) -> list[str]:
    """Return where a rule of --fail-if holds: a text for each layer, or for each finding.

    A value is a hit if it exceeds the limit by more than two of its standard errors, at any
    measured step. A value without direction (NaN), or with an unknown error, is no hit.

    Raises:
        UsageError: No layer that the rule names has the measure, so nothing was compared.
    """
    if not rule.comparison:
        return list(_findings(rule, report))
    found: dict[str, list[str]] = {}
    watching, steps = alarms.Alarms([rule.text]), report.record.reports
    for step in steps:
        for alarm in watching.of(step):
            error = f" ± {alarm.standard_error:.1g}" if alarm.standard_error else ""
            said = f"{alarm.value:.4g}{error} (step {step.step})"
            found.setdefault(alarm.layer, []).append(said)
    if watching.idle or not steps:
        at_any = replace(rule, layers="*")
        known = {at for step in steps for at, *_ in alarms.compared(at_any, step)}
        raise UsageError(
            f"--fail-if {rule.text!r}: nothing could be compared: {rule.measure} was measured at "
            f"{listed(sorted(known)) or 'no layer'}"
        )
    return [f"{layer}: {', '.join(values)}" for layer, values in found.items()]


def _findings(rule: alarms.Rule, report: AuditReport) -> Iterator[str]:
    """Yield the findings of the rule's name or strength at the layers that the rule names."""
    for finding in report.findings:
        as_strong = STRENGTHS[STRENGTHS.index(finding.strength) :]
        at = [layer for layer in finding.layers if fnmatchcase(layer, rule.layers)]
        if rule.measure in (finding.name, *as_strong) and (at or rule.layers == "*"):
            yield f"{finding.name} ({finding.strength}) at {', '.join(at) or 'the model'}"


def _compare(argv: list[str]) -> int:
    asks = parser("adiv-audit compare", "Compares two audits or trainings, side by side on a page.")
    about = "folder of an audit, page of a training (run.html), or the JSON of either"
    asks.add_argument("reports", nargs=2, metavar="REPORT", help=about)
    asks.add_argument("--out", metavar="FILE", default="compare.html", help="the page")
    given = asks.parse_args(argv)
    a, b = map(_report, given.reports)
    needed("jinja2", "adiv-audit compare")
    from adiv_monitor.pages import compare

    write_whole({Path(given.out): compare(a, b, given.reports)})
    print(printable(f"page: {given.out}"))
    return 0


def _report(name: str) -> AuditReport:
    path = Path(name)
    if path.is_dir():
        path /= "report.json"
    elif path.suffix.lower() == ".html":
        path = beside(path, ".json")
    with blamed(f"compare {name}: {path} is no report of an audit or a training"):
        return AuditReport.from_json(path.read_text(encoding="utf-8"))
