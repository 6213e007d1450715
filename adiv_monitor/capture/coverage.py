"""What a report covers of the trained parameters, and why it does not cover the rest."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from math import prod
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.selection import Layer, Selection, elements, listed
from adiv_monitor.report.wording import NO_GRADIENT

_UNSEEN = (
    "it has a gradient, but no rule describes how it is used, and no module that holds it returns "
    "the result as rows; or no function was seen to use it inside the forward pass of a module: it "
    "is used by compiled or scripted code, by a copy of the module (nn.DataParallel?), through "
    "torch.func, under re-entrant checkpointing (`use_reentrant=False` is seen) or outside of "
    "`forward`, or its gradient is zero, set by hand or of an earlier step"
)


class Coverage(NamedTuple):
    """What a report covers.

    Attributes:
        elements: the number of elements of all trained parameters that are due in this step.
        share: the share of these that lie in the measured layers, 0 to 1.
        unmeasured: by name of a requested parameter, its elements that lie in none of them.
        unsupported: by path of a module or layer, or name of a parameter, why it has no result.
    """

    elements: int
    share: float
    unmeasured: dict[str, int]
    unsupported: dict[str, str]


def coverage_of(
    measured: Collection[str],
    selection: Selection,
    capture: Capture,
    told: Mapping[str, str],
    off: Mapping[str, str],
    *,
    is_measured: bool,
) -> Coverage:
    """Return what a report covers.

    Args:
        measured: paths of the measured layers.
        selection: the parameters to measure, as the step left them.
        capture: the capture of the step.
        told: by path, why layers have no result.
        off: by path, why layers, or parameters, are not watched any more.
        is_measured: whether the step was measured.
    """
    seen, due = capture.layers.found, selection.due
    off_now = {p: why for p, why in off.items() if p in seen and selection.is_due(seen[p])}
    known = {**told, **off_now}
    trained = [p for p in selection.trained if due is None or id(p) in due]
    missing = _missing(trained, [seen[path] for path in seen if path in measured])
    told_too = [seen[p] for p in seen if p in measured or p in known]
    lacking = _missing(trained, told_too) if known else missing

    def why(parameter: nn.Parameter) -> str:
        if not is_measured:
            return "the step was not measured, as a note says"
        return off.get(selection.places[id(parameter)][0].path) or _why(parameter, capture)

    names, total = selection.names, sum(map(elements, trained))
    return Coverage(
        elements=total,
        share=(total - sum(missing.values())) / total if total else 0.0,
        unmeasured={names[key]: count for key, count in missing.items() if key in names},
        unsupported={
            **selection.unsupported,
            **_unexplained(selection, lacking, known, why),
            **known,
        },
    )


def _missing(trained: Iterable[Tensor], layers: Iterable[Layer]) -> dict[int, int]:
    """Return by parameter id how many trained elements lie in none of these layers."""
    pieces = [piece for layer in layers for piece in layer.pieces]
    whole = {id(piece.parameter) for piece in pieces if piece.view is None}
    found = {}
    for p in trained:
        if id(p) not in whole:
            views = {piece.view for piece in pieces if piece.parameter is p}
            seen = sum([prod(view.size) for view in views if view is not None])
            count = max(0, elements(p) - seen)
            if count or is_lazy(p):
                found[id(p)] = count
    return found


def _unexplained(
    selection: Selection,
    lacking: Collection[int],
    known: Collection[str],
    why: Callable[[nn.Parameter], str],
) -> dict[str, str]:
    """Return why modules, or parameters of partly measured modules, lack a result.

    Args:
        selection: the parameters that are due.
        lacking: ids of parameters without a result or a known reason.
        known: paths whose reason is known.
        why: returns a parameter's reason.
    """
    by_module: dict[str, dict[str, str | None]] = defaultdict(dict)  # None: it has a result
    for p in selection.due_parameters if lacking else ():
        place = selection.places[id(p)][0]
        by_module[place.path][place.full_name] = why(p) if id(p) in lacking else None
    found = dict[str, str]()
    for path, reasons in by_module.items():
        alike = {*reasons.values()}
        of_all = alike.pop() if path and len(alike) == 1 else None
        several = {name: reason for name, reason in reasons.items() if reason and name not in known}
        if path not in known:
            found |= {path: of_all} if of_all else several
    return found


def _why(parameter: nn.Parameter, capture: Capture) -> str:
    """Return why a parameter, or a part of it, belongs to no layer with a result."""
    key, selection = id(parameter), capture.selection
    place = selection.places[key][0]
    kind = type(place.module)
    if key in (capture.without_gradient or ()):
        return NO_GRADIENT
    if key in capture.watching.refused:
        return capture.watching.refused[key]
    if parts := capture.layers.of_parts(parameter):
        return f"only a part of it was seen to be used, as {listed(parts)}"
    return f"{kind.__module__}.{kind.__qualname__}: {_UNSEEN}"
