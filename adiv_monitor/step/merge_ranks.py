"""Merging of the contributions of all ranks: sums are added, samples become a sample of all rows.

Every rank has sampled its rows uniformly. Each sampled row gets a random key, as if the key had
selected it, and the rows with the smallest keys of all ranks are a uniform sample of all rows
(`capture/sampling.py`). The measures are then those that one rank with all rows would find.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from adiv_monitor.maths.attention_sums import AttentionSums, merge
from adiv_monitor.maths.sums import Array, LayerSums
from adiv_monitor.report import StepReport
from adiv_monitor.step import merge_rows
from adiv_monitor.step.gradient_check import LIKENESS_TOLERANCE, settled
from adiv_monitor.step.rank_contribution import Facts, RankContribution

Generator = np.random.Generator


def prepared(
    part: RankContribution, max_rows: int | None, world: int, generator: Generator
) -> RankContribution:
    """Return a rank's contribution for sending; see `merge_rows.prepared`."""
    layers = {
        path: merge_rows.prepared(layer, max_rows, world, generator)
        for path, layer in part.layers.items()
    }
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
        max_rows: number of sampled rows per layer, of all ranks together; None: all.
        generator: random generator.
    """
    first = parts[min(parts)]
    ranks = [r for r in sorted(parts) if parts[r] is first or _trains_with(first, parts[r])]
    several = [parts[rank] for rank in ranks]
    if any(part.facts.has_applied for part in several):
        several = [_with_applied(part) for part in several]
    notes = [*dict.fromkeys(note for part in several for note in part.report.notes)]
    refused = tuple(dict.fromkeys(why for part in several for why in part.refused))
    misdescribed = {p: why for part in several for p, why in part.misdescribed.items()}
    lost = {path for part in several for path in part.rows_lost}
    layers = {}
    for path in dict.fromkeys(path for part in several for path in part.layers):
        if path in misdescribed or refused:
            continue
        own = [part.layers[path] for part in several if path in part.layers]
        alike = [layer for layer in own if merge_rows.is_alike(own[0], layer)]
        if len(alike) < len(own):
            lost.add(path)
        layer = merge_rows.merge(alike, max_rows, generator)
        if layer.dots.partial and len(alike) < world:
            layer = _without_parameters(layer)
        layers[path] = layer
    missing = world > len(several)
    layers = settled(layers, world=world, lost=layers if missing else lost)
    if missing and not refused and not _make_up_the_gradient(layers):
        here = ", ".join(map(str, ranks))
        notes.insert(0, f"This report has only the rows of rank {here}, of {world} ranks.")
    no_attention = {path: why for part in several for path, why in part.no_attention.items()}
    whole = replace(
        first,
        report=_report_together(several, layers, lost, notes),
        layers=layers,
        refused=refused,
        misdescribed=misdescribed,
        rows_lost=tuple(lost),
        facts=_facts_together(several, layers),
        is_settled=True,
        attention=_attention_together(several, no_attention),
        no_attention=no_attention,
    )
    return whole, ranks


def _attention_together(
    several: Sequence[RankContribution], refused: Mapping[str, str]
) -> dict[str, AttentionSums[Array]]:
    """Return the records of attention of several ranks, whose probes together are one."""
    every: dict[str, list[AttentionSums[Array]]] = defaultdict(list)
    for part in several:
        for path, sums in part.attention.items():
            if path not in refused:
                every[path].append(sums)
    return {path: merge(own) for path, own in every.items()}


def _report_together(
    several: Sequence[RankContribution],
    layers: Mapping[str, LayerSums[Array]],
    lost: Collection[str],
    notes: Sequence[str],
) -> StepReport:
    """Return the report of several ranks.

    Args:
        several: the contributions, the first rank's first.
        layers: the merged layers.
        lost: paths of layers of which some ranks lost rows.
        notes: its notes.
    """
    first, reports = several[0].report, [part.report for part in several]
    changes = [x for report in reports if (x := report.realised_loss_change) is not None]
    unmeasured = {
        name: fewest
        for name in first.unmeasured
        if (fewest := min(report.unmeasured.get(name, 0) for report in reports))
    }
    recovered = sum(first.unmeasured.values()) - sum(unmeasured.values())
    # A rank's reason counts unless another rank has a reading.
    unsupported = {path: why for report in reports for path, why in report.unsupported.items()}
    everywhere = set.intersection(*(set(report.unsupported) for report in reports))
    losses: dict[int, list[float]] = defaultdict(list)
    for report in reports:
        for step, loss in report.losses.items():
            losses[step].append(loss)
    return replace(
        first,
        notes=tuple(notes),
        losses={step: sum(losses[step]) / len(losses[step]) for step in sorted(losses)},
        unsupported={
            path: why
            for path, why in unsupported.items()
            if path in everywhere or (path in lost and path not in layers)
        },
        unmeasured=unmeasured,
        coverage=first.coverage + recovered / max(several[0].elements, 1),
        realised_loss_change=sum(changes) / len(changes) if changes else None,
        realised_loss_changes=tuple(x for report in reports for x in report.realised_loss_changes),
    )


_OF_PARAMETERS = ("parameter_cosine", "projection_cosine", "applied_cosine", "descent")


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
    told = [part.facts for part in several if part.layers] or [several[0].facts]
    if not any(layer.dots.partial for layer in layers.values()):
        told = told[:1]
    return replace(
        told[0],
        gradient_changed=any(part.facts.gradient_changed for part in several),
        gradient_lost=any(part.facts.gradient_lost for part in several),
        has_applied=all(facts.has_applied for facts in told),
        weights_changed=any(facts.weights_changed for facts in told),
    )


def _with_applied(part: RankContribution) -> RankContribution:
    """Set a = u in a contribution whose weights have not changed since the optimizer's step."""
    facts, layers = part.facts, {}
    if not facts.updated or facts.has_applied or facts.weights_changed:
        return part
    for path, layer in part.layers.items():
        of_u = layer.dots.w_w, layer.dots.w_gamma
        dots = replace(layer.dots, a_a=of_u[0], a_w=of_u[0], a_gamma=of_u[1])
        layers[path] = replace(layer, parameters=dots)
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
    for path in common:
        mine, others = (part.layers[path].dots.gamma_gamma for part in (first, other))
        larger, rounding = max(mine, others), first.layers[path].evidence.rounding
        if abs(mine - others) > LIKENESS_TOLERANCE * larger and larger > rounding**2:
            return False
    return True


def _make_up_the_gradient(layers: Mapping[str, LayerSums[Array]]) -> bool:
    """Whether the rows of the present ranks make up the gradient.

    The other ranks then train something else, or have no rows in this step.
    """
    checked = [x.evidence for x in layers.values() if x.evidence.equations is not None]
    return bool(checked) and not any(seen.reason for seen in checked)
