"""From a rank's contribution to its report: what the report covers, and why not the rest."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from adiv_monitor.step.armed import Armed
from adiv_monitor.step.failures import Failures
from adiv_monitor.step.rank_contribution import RankContribution
from adiv_monitor.step.transfer import fetch_numbers


def describe(part: RankContribution, armed: Armed, failures: Failures, interval: int) -> None:
    """Fill in which parameters a contribution covers, and why it does not cover others."""
    seen, rates = armed.capture.layers.found, armed.rates
    selection = armed.selection.accountable(seen.values())
    measured = [layer for path, layer in seen.items() if path in part.sums.paths]
    known = dict(part.report.unsupported)
    due = {path for path, layer in seen.items() if armed.selection.is_due(layer)}
    known |= {path: why for path, why in failures.switched_off.items() if path in due}
    told = [layer for path, layer in seen.items() if path in known]
    missing = selection.missing(measured)
    lacking = selection.missing([*measured, *told]) if told else missing
    is_measured = not (part.refused or armed.step.discarded)
    off = failures.switched_off
    why = partial(_why, armed=armed, off=off) if is_measured else _not_measured
    unexplained = selection.unexplained(lacking, known, why)
    learning_rates = tuple(fetch_numbers(rates.of_groups))
    grouped = measured if len(set(learning_rates)) > 1 else ()
    groups = {layer.path: rates.groups.get(id(layer.pieces[0].parameter)) for layer in grouped}
    part.elements = selection.elements
    part.rows_lost = (*part.rows_lost, *off)
    part.report = replace(
        part.report,
        unsupported={**selection.unsupported, **selection.frozen, **unexplained, **known},
        coverage=selection.coverage(missing),
        notes=(*failures.notes, *part.report.notes),
        unmeasured=selection.unmeasured(missing),
        interval=interval,
        alignment=armed.alignment,
        turn=armed.turn,
        learning_rates=learning_rates,
        groups={path: group for path, group in groups.items() if group is not None},
        optimizer=rates.optimizer,
        maximize=rates.maximize,
        other_optimizers=tuple(armed.others.names),
        changed_by=tuple(armed.others.writers),
    )
    failures.notes.clear()


def _why(parameter: nn.Parameter, armed: Armed, off: Mapping[str, str]) -> str:
    """Return why there is no reading for a parameter; `off` has the layers switched off."""
    selection = armed.selection
    module = selection.places[id(parameter)][0].path
    if module in off:
        return off[module]
    for places in selection.places.values() if off else ():
        # A failure before the layer is known is recorded under the module's first parameter.
        if places[0].path == module and places[0].full_name in off:
            return off[places[0].full_name]
    return armed.capture.why_unmeasured(parameter)


def _not_measured(parameter: nn.Parameter) -> str:
    return "the step was not measured, as a note says"
