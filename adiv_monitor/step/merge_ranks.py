"""Merging of the contributions of all ranks: sums are added, samples become a sample of all rows.

Every rank has sampled its rows uniformly. Each sampled row gets a random key, as if the key had
selected it, and the rows with the smallest keys of all ranks are a uniform sample of all rows
(`capture/sampling.py`). The measures are then those that one rank with all rows would find.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from adiv_monitor.capture.sampling import draw, winners
from adiv_monitor.maths.attention_sums import merge
from adiv_monitor.maths.sums import Array, LayerSums
from adiv_monitor.report import StepReport
from adiv_monitor.step import merge_rows
from adiv_monitor.step.gradient_check import LIKENESS_TOLERANCE, settled
from adiv_monitor.step.rank_contribution import Facts, RankContribution

Generator = np.random.Generator


def prepared(
    part: RankContribution, max_rows: int | None, world: int, generator: Generator
) -> RankContribution:
    """Prepare a rank's contribution for sending, with only rows that may be in the merged sample.

    Args:
        part: the rank's contribution.
        max_rows: number of sampled rows per layer, of all ranks together; None: all.
        world: number of ranks.
        generator: random generator.
    """
    layers = {}
    for path, layer in part.layers.items():
        seen, total = layer.sampled.seen, layer.sampled.total
        drawn = draw((total,), None if max_rows is None else seen, np.inf, generator)
        keys, bound = drawn.keys, drawn.bound
        layer = merge_rows.counted(layer)
        if max_rows is not None and total:
            # One rank has more than this share of the sample only with low probability.
            share = max_rows / world
            bound = min(bound, (share + 4 * math.sqrt(share)) / total)
        layer = replace(layer, sampled=replace(layer.sampled, keys=keys, bound=bound))
        kept = None if max_rows is None else winners([layer.sampled], None)[0]
        layers[path] = layer if kept is None else merge_rows.pick(layer, kept)
    return replace(part, layers=layers)


@np.errstate(all="ignore")  # as in `understand`
def merge_ranks(
    parts: Mapping[int, RankContribution],
    world: int,
    max_rows: int | None,
    generator: Generator,
) -> tuple[RankContribution, list[int]]:
    """Merge the contributions; return the result and the ranks that it covers.

    Ranks whose gradients differ from the first rank's train something else, and are left out.

    Args:
        parts: contributions by rank, as received.
        world: number of ranks.
        max_rows: see `prepared`.
        generator: random generator.
    """
    ranks = sorted(parts)
    first = parts[ranks[0]]
    ranks = [rank for rank in ranks if rank == ranks[0] or _trains_with(first, parts[rank])]
    several = [parts[rank] for rank in ranks]
    if any(part.facts.has_applied for part in several):
        several = [_with_applied(part) for part in several]
    refused = list(dict.fromkeys(why for part in several for why in part.refused))
    reports = [part.report for part in several]
    notes = list(dict.fromkeys(note for report in reports for note in report.notes))
    losses = _losses_together([report.losses for report in reports])
    if refused:
        report = replace(first.report, notes=tuple(notes), losses=losses)
        return replace(first, report=report, layers={}, refused=refused), ranks
    misdescribed = {p: why for part in several for p, why in part.misdescribed.items()}
    rows_lost = {path for part in several for path in part.rows_lost}
    layers = {}
    for path in dict.fromkeys(path for part in several for path in part.layers):
        if path in misdescribed:
            continue
        layer, is_whole = _layer_together(several, path, world, max_rows, generator)
        if not is_whole:
            rows_lost.add(path)
        layers[path] = layer
    missing = world > len(several)
    layers = settled(layers, world=world, lost=layers if missing else rows_lost)
    if missing and not _make_up_the_gradient(layers):
        here = ", ".join(map(str, ranks))
        notes.insert(0, f"This report has only the rows of rank {here}, of {world} ranks.")
    report = _report_together(several, layers, rows_lost)
    report = replace(report, notes=tuple(notes), losses=losses)
    whole = replace(
        first,
        report=report,
        layers=layers,
        misdescribed=misdescribed,
        rows_lost=rows_lost,
        facts=_facts_together(several, layers),
        is_settled=True,
    )
    return _with_attention(whole, several), ranks


def _with_attention(
    whole: RankContribution, several: Sequence[RankContribution]
) -> RankContribution:
    """Add the records of attention of several ranks, whose probes together are one."""
    refused = {path: why for part in several for path, why in part.no_attention.items()}
    attention = {}
    for path in dict.fromkeys(path for part in several for path in part.attention):
        own = [part.attention[path] for part in several if path in part.attention]
        alike = [sums for sums in own if sums.shape[1] == own[0].shape[1]]
        if path not in refused:
            attention[path] = merge(alike)
    return replace(whole, attention=attention, no_attention=refused)


def _report_together(
    several: Sequence[RankContribution],
    layers: Mapping[str, LayerSums[Array]],
    rows_lost: set[str],
) -> StepReport:
    """Return the report of several ranks, without notes and losses.

    Args:
        several: the contributions, the first rank's first.
        layers: the merged layers.
        rows_lost: paths of layers of which some ranks lost rows.
    """
    first, reports = several[0], [part.report for part in several]
    changes = [x for report in reports if (x := report.realised_loss_change) is not None]
    unmeasured = _fewest([report.unmeasured for report in reports])
    recovered = sum(first.report.unmeasured.values()) - sum(unmeasured.values())
    return replace(
        first.report,
        unsupported=_unsupported(reports, layers, rows_lost),
        unmeasured=unmeasured,
        coverage=first.report.coverage + recovered / max(first.elements, 1),
        realised_loss_change=sum(changes) / len(changes) if changes else None,
        realised_loss_changes=tuple(x for report in reports for x in report.realised_loss_changes),
    )


_OF_PARAMETERS = ("parameter_cosine", "projection_cosine", "applied_cosine", "descent")


def _layer_together(
    several: Sequence[RankContribution],
    path: str,
    world: int,
    max_rows: int | None,
    generator: Generator,
) -> tuple[LayerSums[Array], bool]:
    """Merge a layer of all ranks; also return whether no rows are lost."""
    own = [part.layers[path] for part in several if path in part.layers]
    alike = [layer for layer in own if merge_rows.is_alike(own[0], layer)]
    is_whole = len(alike) == len(own)
    layer = merge_rows.merge(alike, max_rows, generator)
    if layer.dots.partial and len(alike) < world:
        layer = _without_parameters(layer)
    return layer, is_whole


def _without_parameters(layer: LayerSums[Array]) -> LayerSums[Array]:
    """Drop the measures of the parameters, of which parts are missing; use the rows alone."""
    seen, about = layer.evidence, layer.about
    undefined = (*about.undefined, *_OF_PARAMETERS)
    return replace(
        layer,
        about=replace(about, undefined=undefined),
        evidence=replace(seen, reason=seen.reason or "ranks"),
    )


def _facts_together(
    several: Sequence[RankContribution], layers: Mapping[str, LayerSums[Array]]
) -> Facts:
    """Merge the facts: those of one rank hold for all, unless each holds a part of parameters."""
    told = [part for part in several if part.layers] or [several[0]]
    if not any(layer.dots.partial for layer in layers.values()):
        told = told[:1]
    return replace(
        told[0].facts,
        gradient_changed=any(part.facts.gradient_changed for part in several),
        gradient_lost=any(part.facts.gradient_lost for part in several),
        has_applied=all(part.facts.has_applied for part in told),
        weights_changed=any(part.facts.weights_changed for part in told),
    )


def _with_applied(part: RankContribution) -> RankContribution:
    """Set a = u in a contribution whose weights have not changed since the optimizer's step."""
    facts = part.facts
    if not facts.updated or facts.has_applied or facts.weights_changed:
        return part
    layers = {}
    for path, layer in part.layers.items():
        dots = layer.dots
        applied = replace(dots, a_a=dots.w_w, a_w=dots.w_w, a_gamma=dots.w_gamma)
        layers[path] = replace(layer, parameters=applied)
    return replace(part, layers=layers, facts=replace(facts, has_applied=True))


def _trains_with(first: RankContribution, other: RankContribution) -> bool:
    """Whether the optimizers of two ranks get the same gradients of the same layers."""
    if first.report.turn != other.report.turn:
        return False
    common = [
        path
        for path, layer in first.layers.items()
        if path in other.layers and not layer.dots.partial
    ]
    pairs = [[part.layers[p].dots.gamma_gamma for p in common] for part in (first, other)]
    mine, others = (np.array(pair) for pair in pairs)
    rounding = np.array([first.layers[p].evidence.rounding for p in common])
    larger = np.maximum(mine, others)
    with np.errstate(invalid="ignore"):
        differ = np.abs(mine - others) > LIKENESS_TOLERANCE * larger
    return not bool((differ & (larger > rounding**2)).any())


def _make_up_the_gradient(layers: Mapping[str, LayerSums[Array]]) -> bool:
    """Whether the rows of the present ranks make up the gradient.

    The other ranks then train something else, or have no rows in this step.
    """
    checked = [x.evidence for x in layers.values() if x.evidence.equations is not None]
    return bool(checked) and not any(seen.reason for seen in checked)


def _losses_together(several: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the loss of each step, as the mean over the ranks that have it."""
    found: dict[int, list[float]] = defaultdict(list)
    for losses in several:
        for step, loss in losses.items():
            found[step].append(loss)
    return {step: sum(found[step]) / len(found[step]) for step in sorted(found)}


def _fewest(several: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the smallest number of unmeasured elements over ranks, by parameter; without zeros."""
    return {
        name: fewest
        for name in several[0]
        if (fewest := min(unmeasured.get(name, 0) for unmeasured in several))
    }


def _unsupported(
    reports: Sequence[StepReport], layers: Mapping[str, LayerSums[Array]], rows_lost: set[str]
) -> dict[str, str]:
    """Return why layers have no reading: a rank's reason, unless another rank has a reading."""
    found = {path: why for report in reports for path, why in report.unsupported.items()}
    everywhere = set.intersection(*(set(report.unsupported) for report in reports))
    return {
        path: why
        for path, why in found.items()
        if path in everywhere or (path in rows_lost and path not in layers)
    }
