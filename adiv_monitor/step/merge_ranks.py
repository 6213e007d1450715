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
from adiv_monitor.maths.sums import Array, StepSums
from adiv_monitor.report import StepReport
from adiv_monitor.step import merge_sums
from adiv_monitor.step.gradient_check import LIKENESS_TOLERANCE, settled
from adiv_monitor.step.rank_contribution import Facts, RankContribution


@np.errstate(all="ignore")  # as in `understand`
def merge_ranks(
    parts: Mapping[int, RankContribution],
    world: int,
    max_rows: int | None,
    generator: np.random.Generator,
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
    notes = [*dict.fromkeys(note for part in several for note in part.report.notes)]
    refused = tuple(dict.fromkeys(why for part in several for why in part.refused))
    misdescribed = {p: why for part in several for p, why in part.misdescribed.items()}
    lost = {path for part in several for path in part.rows_lost}
    sums, unlike = merge_sums.merge([part.sums for part in several], max_rows, generator)
    lost |= unlike
    kept = [i for i, p in enumerate(sums.paths) if not (refused or p in misdescribed)]
    sums, missing = _without_parts(sums.pick(np.array(kept, np.int64)), world), world > len(several)
    sums = settled(sums, world=world, lost=sums.paths if missing else lost)
    if missing and not refused and not _make_up_the_gradient(sums):
        here = ", ".join(map(str, ranks))
        notes.insert(0, f"This report has only the rows of rank {here}, of {world} ranks.")
    no_attention = {path: why for part in several for path, why in part.no_attention.items()}
    whole = replace(
        first,
        report=_report_together(several, sums.paths, lost, notes),
        sums=sums,
        refused=refused,
        misdescribed=misdescribed,
        rows_lost=tuple(lost),
        facts=_facts_together(several, sums),
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
    layers: Collection[str],
    lost: Collection[str],
    notes: Sequence[str],
) -> StepReport:
    """Return the report of several ranks.

    Args:
        several: the contributions, the first rank's first.
        layers: paths of the merged layers.
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


def _without_parts(sums: StepSums, world: int) -> StepSums:
    """Drop measures of parameters of which other ranks' parts are missing; use the rows alone."""
    layers = sums.layers.copy()
    lacks = layers["partial"] & (layers["ranks"] < world)
    layers["reason"] = np.where(lacks & (layers["reason"] == ""), "ranks", layers["reason"])
    about = tuple(
        replace(of, undefined=(*of.undefined, *_OF_PARAMETERS)) if lacks_some else of
        for of, lacks_some in zip(sums.about, lacks, strict=True)
    )
    return replace(sums, about=about, layers=layers)


def _facts_together(several: Sequence[RankContribution], sums: StepSums) -> Facts:
    """Merge the facts: those of one rank hold for all, unless each holds a part of parameters."""
    told = [part.facts for part in several if part.sums.paths] or [several[0].facts]
    if not sums.layers["partial"].any():
        told = told[:1]
    return replace(
        told[0],
        gradient_changed=any(part.facts.gradient_changed for part in several),
        gradient_lost=any(part.facts.gradient_lost for part in several),
        has_applied=all(facts.has_applied for facts in told),
        weights_changed=any(facts.weights_changed for facts in told),
    )


def _trains_with(first: RankContribution, other: RankContribution) -> bool:
    """Whether the optimizers of two ranks get the same gradients of the same layers."""
    if first.report.turn != other.report.turn:
        return False
    place = {path: i for i, path in enumerate(other.sums.paths)}
    layers, rounding = first.sums.layers, first.sums.rounding
    for i, path in enumerate(first.sums.paths):
        if path not in place or layers["partial"][i]:
            continue
        mine, others = layers["gamma_gamma"][i], other.sums.layers["gamma_gamma"][place[path]]
        larger = max(mine, others)
        if abs(mine - others) > LIKENESS_TOLERANCE * larger and larger > rounding[i] ** 2:
            return False
    return True


def _make_up_the_gradient(sums: StepSums) -> bool:
    """Whether the rows of the present ranks make up the gradient.

    The other ranks then train something else, or have no rows in this step.
    """
    return bool(sums.checked.any()) and not (sums.layers["reason"][sums.checked] != "").any()
