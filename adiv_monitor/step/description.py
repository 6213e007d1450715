"""From a rank's contribution to its report: what the report covers, and why not the rest."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from adiv_monitor.capture.updates import RunHistory
from adiv_monitor.report import StepReport
from adiv_monitor.step.failures import Failures
from adiv_monitor.step.outcome import understand
from adiv_monitor.step.phases import Pending
from adiv_monitor.step.rank_contribution import RankContribution
from adiv_monitor.step.transfer import fetch_numbers


def describe(part: RankContribution, pending: Pending, failures: Failures, interval: int) -> None:
    """Fill in which parameters a contribution covers, and why it does not cover others."""
    armed = pending.armed
    seen, rates = armed.capture.layers.found, armed.rates
    selection = pending.selection.accountable(seen.values())
    measured = [layer for path, layer in seen.items() if path in part.layers]
    known = dict(part.unsupported)
    due = {path for path, layer in seen.items() if pending.selection.is_due(layer)}
    known |= {path: why for path, why in failures.switched_off.items() if path in due}
    told = [layer for path, layer in seen.items() if path in known]
    missing = selection.missing(measured)
    lacking = selection.missing([*measured, *told]) if told else missing
    is_measured = not (part.refused or armed.step.discarded)
    off = failures.switched_off
    why = partial(_why, pending=pending, off=off) if is_measured else _not_measured
    unexplained = selection.unexplained(lacking, known, why)
    part.unsupported = {**selection.unsupported, **unexplained, **known}
    part.unmeasured = selection.unmeasured(missing)
    part.coverage, part.elements = selection.coverage(missing), selection.elements
    part.interval, part.turn = interval, armed.turn
    part.rows_lost |= set(off)
    part.alignment = pending.alignment
    part.optimizer, part.learning_rates = rates.optimizer, tuple(fetch_numbers(rates.of_groups))
    if len(set(part.learning_rates)) > 1:
        groups = {layer.path: rates.groups.get(id(layer.pieces[0].parameter)) for layer in measured}
        part.groups = {path: group for path, group in groups.items() if group is not None}
    part.notes[:0] = failures.notes
    failures.notes.clear()


def _why(parameter: nn.Parameter, pending: Pending, off: Mapping[str, str]) -> str:
    """Return why there is no reading for a parameter; `off` has the layers switched off."""
    selection = pending.selection
    module = selection.places[id(parameter)][0].path
    for places in selection.places.values() if off else ():
        # A failure before the layer is known is recorded under the module's first parameter.
        if places[0].path == module and places[0].full_name in off:
            return off[places[0].full_name]
    return pending.armed.capture.why_unmeasured(parameter)


def _not_measured(parameter: nn.Parameter) -> str:
    return "the step was not measured, as a note says"


def report_of(
    number: int, part: RankContribution, history: RunHistory, failures: Failures
) -> StepReport:
    """Return the report of a step.

    Args:
        number: number of the step.
        part: contribution of one rank, or merged contribution of all.
        history: history of the run so far.
        failures: handler of exceptions.
    """

    def fail(path: str, error: Exception) -> None:
        failures.switch_off(path, error)
        part.unsupported[path] = failures.switched_off[path]

    outcome = understand(part, history, fail)
    return StepReport(
        step=number,
        layers=outcome.layers,
        unsupported=part.unsupported,
        coverage=part.coverage,
        interval=part.interval,
        notes=tuple(outcome.notes),
        realised_loss_change=part.loss_change,
        realised_loss_changes=part.loss_changes,
        unmeasured=part.unmeasured,
        attention=outcome.attention,
        alignment=part.alignment,
        turn=None if part.turn is None else replace(part.turn, elements=part.elements),
        losses=part.losses,
        learning_rates=part.learning_rates,
        groups=part.groups,
        optimizer=part.optimizer,
    )
