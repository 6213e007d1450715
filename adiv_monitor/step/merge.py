"""Merging of the contributions of all ranks: rows are concatenated, sums are added.

Every rank has sampled its rows uniformly. Each sampled row gets a random key, as if the key had
selected it, and the rows with the smallest keys of all ranks are a uniform sample of all rows
(`capture/sampling.py`). The measures are then those that one rank with all rows would find.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from adiv_monitor.capture.sampling import draw
from adiv_monitor.features.rows import Index
from adiv_monitor.maths.sums import OF_PARAMETERS, TABLES, Array, StepSums, Table, blank, in_order
from adiv_monitor.report import StepReport
from adiv_monitor.step.gradient_check import LIKENESS_TOLERANCE, settled
from adiv_monitor.step.messages import RankContribution

# Columns of the table of layers that add up; NaN if one rank does not know its part.
_ADDED = "total", "moved", "terms", "active", "G_G", "own_G", "own_own", "scale_sum"
_UNDEFINED = (
    *("parameter_cosine", "projection_cosine", "applied_cosine", "descent", "gradient_norm"),
    *("update_norm", "weight_norm", "weight_update_ratio", "update_rms", "unchanged_share"),
)


def prepared(
    sums: StepSums, max_rows: int | None, world: int, generator: np.random.Generator
) -> StepSums:
    """Return a rank's numbers for sending, with only rows that may be in the merged sample.

    Each sampled row gets a random key, as if the key had selected it.

    Args:
        sums: the numbers.
        max_rows: number of sampled rows, of all ranks together; None: all.
        world: number of ranks.
        generator: random generator.
    """
    layers, rows = sums.layers.copy(), sums.rows.copy()
    pairs = zip(layers["total"].tolist(), sums.seen.tolist(), strict=True)
    drawn = [draw((total,), seen, generator) for total, seen in pairs]
    rows["key"] = np.concatenate([np.empty(0), *(of.keys for of in drawn if of.keys is not None)])
    layers["rows_bound"] = [of.bound for of in drawn]
    sums = replace(sums, layers=layers, rows=rows)
    if max_rows is None:
        return sums
    # One rank has more than this share of the sample only with low probability.
    share = max_rows / world
    likely = (share + 4 * math.sqrt(share)) / np.maximum(layers["total"], 1)
    layers["rows_bound"] = np.minimum(layers["rows_bound"], likely)
    return replace(sums, rows=rows[rows["key"] < layers["rows_bound"][rows["layer"]]])


@np.errstate(all="ignore")  # as in `understand`
def merge_ranks(
    parts: Mapping[int, RankContribution], world: int, max_rows: int | None
) -> tuple[RankContribution, list[int]]:
    """Merge the contributions; return the result and the ranks that it covers.

    Ranks whose gradients differ from the first rank's train something else, and are left out.

    Args:
        parts: contributions by rank, as received.
        world: number of ranks.
        max_rows: number of sampled rows per layer, of all ranks together; None: all.
    """
    first = parts[min(parts)]
    ranks = [r for r in sorted(parts) if parts[r] is first or _trains_with(first, parts[r])]
    several = [parts[rank] for rank in ranks]
    notes = [*dict.fromkeys(note for part in several for note in part.report.notes)]
    refused = tuple(dict.fromkeys(why for part in several for why in part.refused))
    lost = {path for part in several for path in part.rows_lost}
    sums = _merged([part.sums for part in several], max_rows)
    sums = _without_parts(sums.pick(np.arange(0 if refused else len(sums.paths))), world)
    missing = world > len(several)
    sums = settled(sums, world=world, lost=sums.paths if missing else lost)
    # The rows that are here make up the gradient where others train something else, or have none.
    is_whole = bool(sums.checked.any()) and not (sums.layers["reason"][sums.checked] != "").any()
    if missing and not refused and not is_whole:
        here = ", ".join(map(str, ranks))
        notes.insert(0, f"This report has only the rows of rank {here}, of {world} ranks.")
    notes += _first_broken(dict(zip(ranks, several, strict=True)))
    no_attention = {path: why for part in several for path, why in part.no_attention.items()}
    # Their probes together are one.
    attended = dict.fromkeys(p for part in several for p in part.attention if p not in no_attention)
    of_ranks = {p: [x.attention[p] for x in several if p in x.attention] for p in attended}
    whole = replace(
        first,
        report=_report(several, sums.paths, lost, notes),
        sums=sums,
        refused=refused,
        rows_lost=tuple(lost),
        attention={path: np.concatenate(own) for path, own in of_ranks.items()},
        no_attention=no_attention,
    )
    return whole, ranks


def _merged(several: Sequence[StepSums], max_rows: int | None) -> StepSums:
    """Merge the numbers of ranks that train together."""
    abouts = {p: of for s in reversed(several) for p, of in zip(s.paths, s.about, strict=True)}
    paths = tuple(dict.fromkeys(path for sums in several for path in sums.paths))
    number, shape = {path: i for i, path in enumerate(paths)}, (len(several), len(paths))
    lines, there = blank("layers", shape), np.zeros(shape, dtype=bool)
    places = [np.array([number[path] for path in sums.paths], np.int64) for sums in several]
    for rank, (at, sums) in enumerate(zip(places, several, strict=True)):
        lines[rank, at], there[rank, at] = sums.layers, True
    first = there.argmax(0), np.arange(len(paths))
    counts = there & (lines["total"] > 0)
    counts[first] |= ~counts.any(0)  # if no rank has rows, the first one counts
    parts: dict[str, list[Table]] = {name: [] for name in TABLES}
    for rank, (at, sums) in enumerate(zip(places, several, strict=True)):
        for name, table in sums.tables.items():
            own = table.copy()
            own["layer"] = at[own["layer"]]
            parts[name].append(own[counts[rank, own["layer"]]])
    tables = {name: in_order(np.concatenate(of)) for name, of in parts.items()}
    rows, of_rows = tables["rows"], np.where(counts, lines["rows_bound"], np.inf).min(0)
    if max_rows is not None:
        order = np.lexsort((rows["key"], rows["layer"]))
        layer = rows["layer"][order]
        more = order[np.arange(len(order)) - np.searchsorted(layer, layer) == max_rows]
        at = rows["layer"][more]
        of_rows[at] = np.minimum(of_rows[at], rows["key"][more])
    tables["rows"] = rows[rows["key"] < of_rows[rows["layer"]]]
    tables["equations"] = _added(tables["equations"], counts.sum(0))
    layers = _layers(lines, there, counts, first)
    return StepSums(paths, tuple(abouts[path] for path in paths), layers, **tables)


def _layers(
    lines: Table, there: np.ndarray, counts: np.ndarray, first: tuple[Index, Index]
) -> Table:
    """Return the lines of the merged layers.

    Args:
        lines: those of all ranks, (ranks, layers).
        there: which ranks have a layer.
        counts: which of them count.
        first: the first of them.
    """
    found: Table = lines[first]

    def each(column: str, rest: float) -> Array:
        return np.where(counts, lines[column], rest)

    for name in _ADDED:
        found[name] = each(name, 0.0).sum(0)
    for name in ("precision", "scale_max"):
        found[name] = np.nan_to_num(each(name, 0.0)).max(0)
    found["knows_scales"] = each("knows_scales", 1.0).all(0)
    found["has_common"] = False  # rows of one rank are not compared with those of another
    found["moved"] *= each("moved", 1.0).all(0)
    reasons = np.where(counts, lines["reason"], "")
    found["reason"] = reasons[(reasons != "").argmax(0), first[1]]
    found["ranks"] = there.sum(0)
    whole = np.where(found["G_G"] == 0, 1.0, found["G_G"])
    shares = (each("G_G", 0.0) / whole) ** 2
    found["concentration"] = (each("concentration", 0.0) * shares).sum(0)
    count, scales = each("active", 0.0), each("scale_sum", 0.0)
    off = np.where(count > 0, scales / count - scales.sum(0) / count.sum(0), 0.0)
    found["scale_off"] = np.sqrt((each("scale_off", 0.0) ** 2 + count * off**2).sum(0))
    for name in OF_PARAMETERS:  # one rank's, or the sum if each holds a part
        of_all = np.where(there, lines[name], 0.0).sum(0)
        found[name] = np.where(found["partial"], of_all, found[name])
    return found


def _added(lines: Table, ranks: Index) -> Table:
    """Return the equations with h summed over the ranks, where every rank has them.

    Args:
        lines: the equations of all ranks.
        ranks: number of ranks that count, of each layer.
    """
    which = np.stack([lines[name] for name in ("layer", "of_bias", "number")])
    _, first, same, count = np.unique(
        which, axis=1, return_index=True, return_inverse=True, return_counts=True
    )
    found = lines[first]
    found["h"] = np.bincount(same.reshape(-1), lines["h"], len(first))
    kept: Table = found[count == ranks[found["layer"]]]
    return kept


def _without_parts(sums: StepSums, world: int) -> StepSums:
    """Drop measures of parameters of which other ranks' parts are missing; use the rows alone."""
    layers = sums.layers
    lacks = layers["partial"] & (layers["ranks"] < world)
    layers["reason"][lacks & (layers["reason"] == "")] = "ranks"
    pairs = zip(sums.about, lacks.tolist(), strict=True)
    more = (replace(of, undefined=of.undefined + _UNDEFINED * some) for of, some in pairs)
    return replace(sums, about=tuple(more))


def _first_broken(parts: Mapping[int, RankContribution]) -> list[str]:
    """Return a note on the ranks whose loss, or whose rows, were not finite before the others'."""
    broken: dict[int, float] = {}  # by rank, its first such step
    for rank, part in parts.items():
        rows, steps = part.sums.rows, {**part.report.losses}
        steps[part.report.step] = steps.get(part.report.step, 0.0) + rows["z_z"].sum()
        steps[part.report.step] += rows["G_G"].sum()
        broken[rank] = min([s for s, x in steps.items() if not math.isfinite(x)], default=math.inf)
    step = min(broken.values())
    first = [str(rank) for rank, its in broken.items() if its == step]
    if step == math.inf or len(first) == len(parts):
        return []
    return [
        f"First not finite, at step {step}: the loss or the rows of rank {', '.join(first)} alone."
    ]


def _report(
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
    counts = [sum(of.values()) for of in (unmeasured, first.unmeasured)]
    still = counts[0] / counts[1] if counts[1] else 1.0
    # A rank's reason counts unless another rank has a reading.
    everywhere = set.intersection(*(set(report.unsupported) for report in reports))
    every = [pair for report in reports for pair in report.unsupported.items()]
    steps = sorted({step for report in reports for step in report.losses})
    losses = {s: [report.losses[s] for report in reports if s in report.losses] for s in steps}
    return replace(
        first,
        notes=tuple(notes),
        losses={step: sum(several) / len(several) for step, several in losses.items()},
        unsupported={p: x for p, x in every if p in everywhere or (p in lost and p not in layers)},
        unmeasured=unmeasured,
        coverage=1 - (1 - first.coverage) * still,
        realised_loss_change=sum(changes) / len(changes) if changes else None,
    )


def _trains_with(first: RankContribution, other: RankContribution) -> bool:
    """Whether the optimizers of two ranks get the same gradients of the same layers."""
    if first.report.turn != other.report.turn:
        return False
    place, layers = {path: i for i, path in enumerate(other.sums.paths)}, first.sums.layers
    both = [i for i, p in enumerate(first.sums.paths) if p in place and not layers["partial"][i]]
    mine = layers["gamma_gamma"][both]
    others = other.sums.layers["gamma_gamma"][[place[first.sums.paths[i]] for i in both]]
    larger = np.maximum(mine, others)
    is_known = larger > first.sums.rounding[both] ** 2
    return not (is_known & (abs(mine - others) > LIKENESS_TOLERANCE * larger)).any()
