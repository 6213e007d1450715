"""From a rank's contribution to its report: what the report covers, and why not the rest."""

from dataclasses import replace

from adiv_monitor.capture.coverage import coverage_of
from adiv_monitor.step.armed import Armed
from adiv_monitor.step.failures import Failures
from adiv_monitor.step.rank_contribution import RankContribution
from adiv_monitor.step.transfer import fetch_numbers


def describe(part: RankContribution, armed: Armed, failures: Failures, interval: int) -> None:
    """Fill in which parameters a contribution covers, and why it does not cover others."""
    seen, rates, off = armed.capture.layers.found, armed.rates, failures.switched_off
    covered = coverage_of(
        part.sums.paths,
        armed.selection,
        armed.capture,
        told=part.report.unsupported,
        off=off,
        is_measured=not (part.refused or armed.step.discarded),
    )
    learning_rates = tuple(fetch_numbers(rates.of_groups))
    grouped = [path for path in seen if path in part.sums.paths and len(set(learning_rates)) > 1]
    groups = {path: rates.groups.get(id(seen[path].pieces[0].parameter)) for path in grouped}
    part.elements = covered.elements
    part.rows_lost = (*part.rows_lost, *off)
    part.report = replace(
        part.report,
        unsupported=covered.unsupported,
        coverage=covered.share,
        notes=(*failures.notes, *part.report.notes),
        unmeasured=covered.unmeasured,
        interval=interval,
        alignment=armed.alignment,
        turn=armed.turn,
        learning_rates=learning_rates,
        groups={path: group for path, group in groups.items() if group is not None},
        optimizer=rates.optimizer,
        maximize=rates.maximize,
        settings=rates.settings,
        new_state=armed.ends_with_state and not rates.has_state,
        gradient_again=armed.gradient_again,
        dropout=armed.dropout,
        other_optimizers=tuple(armed.others.writes),
        changed_by=tuple(+armed.others.writes),
    )
    failures.notes.clear()
