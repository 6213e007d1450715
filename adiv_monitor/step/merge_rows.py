"""Merging of one layer's records of several ranks: rows are concatenated, sums are added."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool

from adiv_monitor.capture.sampling import draw, winners
from adiv_monitor.features.rows import Index
from adiv_monitor.maths.ceiling import attainable_cosine
from adiv_monitor.maths.records import R, joined
from adiv_monitor.maths.sums import (
    Array,
    Blocks,
    CeilingSums,
    Common,
    Counted,
    Dots,
    Evidence,
    LayerSums,
    Moved,
    Pairs,
    Sampled,
    ScaleTotals,
    Totals,
    Vector,
    column_of,
    of_rows,
    pairs_of,
)

S = TypeVar("S")
RankSums = LayerSums[Array]


def prepared(
    layer: RankSums, max_rows: int | None, world: int, generator: np.random.Generator
) -> RankSums:
    """Return the record for sending, with only rows that may be in the merged sample.

    Each sampled row gets a random key, as if the key had selected it. The gradient's entries are
    replaced by their factor; see `Multiple`.

    Args:
        layer: the record.
        max_rows: number of sampled rows, of all ranks together; None: all.
        world: number of ranks.
        generator: random generator.
    """
    seen, total, common = layer.sampled.seen, layer.sampled.total, layer.common
    drawn = draw((total,), seen, np.inf, generator)
    assert drawn.keys is not None
    sampled = replace(layer.sampled, keys=drawn.keys, bound=drawn.bound)
    if common is not None:
        active = of_rows(layer, Vector.G, Vector.G) != 0
        squares = float((common.norms[active] ** 2).sum())
        common = replace(common, counted=Counted(int(active.sum()), len(active), squares))
    layer = replace(layer, sampled=sampled, common=common)
    if max_rows is None or not total:
        return layer
    # One rank has more than this share of the sample only with low probability.
    share = max_rows / world
    bound = min(drawn.bound, (share + 4 * math.sqrt(share)) / total)
    layer = replace(layer, sampled=replace(sampled, bound=bound))
    return pick(layer, np.flatnonzero(drawn.keys < bound))


def pick(layer: RankSums, kept: Index) -> RankSums:
    """Return the record with some of its rows."""
    rows, blocks, common = layer.sampled, layer.blocks, layer.common
    assert rows.keys is not None
    if blocks is not None:
        entry_rows = blocks.rows_of_entries(rows.seen)
        among = np.isin(entry_rows, kept)
        blocks = replace(
            blocks,
            sums=blocks.sums[kept],
            norms=blocks.norms[kept],
            largest=blocks.largest[kept],
            entries=blocks.entries[among],
            entry_rows=np.searchsorted(kept, entry_rows[among]).astype(np.float64),
        )
    if common is not None:
        common = replace(common, products=common.products[kept], norms=common.norms[kept])
    return replace(
        layer,
        sampled=replace(rows, seen=len(kept), keys=rows.keys[kept]),
        products=layer.products[kept],
        scale=None if layer.scale is None else layer.scale[kept],
        blocks=blocks,
        common=common,
    )


def is_alike(part: RankSums, other: RankSums) -> bool:
    """Whether two records have the same kind, vectors and groups."""
    mine, others = ((x.about.kind, x.blocks and x.blocks.groups, x.vectors) for x in (part, other))
    return mine == others


def merge(
    parts: Sequence[RankSums], max_rows: int | None, generator: np.random.Generator
) -> RankSums:
    """Merge the records of one layer.

    Args:
        parts: records from ranks that train together, all with the same structure.
        max_rows: largest number of rows to keep; None: all.
        generator: random generator.
    """
    filled = [part for part in parts if part.sampled.total] or list(parts[:1])
    kept = winners([part.sampled for part in filled], max_rows)
    some = [p if k is None else pick(p, k) for p, k in zip(filled, kept, strict=True)]
    first, products = some[0], np.concatenate([part.products for part in some])
    is_active = products[:, column_of(pairs_of(first.vectors), Vector.G, Vector.G)] != 0
    seen = [part.sampled for part in some]
    return LayerSums(
        first.about,
        Sampled(sum(rows.seen for rows in seen), sum(rows.total for rows in seen)),
        first.vectors,
        products,
        _evidence([part.evidence for part in some]),
        _dots(parts),
        scale=_of_every((x.scale for x in some), np.concatenate),
        totals=_of_every((x.totals for x in some), lambda of: _totals(of, seen, generator)),
        blocks=_of_every((x.blocks for x in some), lambda of: _blocks(of, seen, generator)),
        common=_of_every((x.common for x in some), lambda of: _common(of, seen, is_active)),
        realised=_of_every((x.realised for x in some), _moved),
        attainable=_of_every((x.ceiling for x in some), _attainable),
    )


def _of_every(several: Iterable[R | None], of: Callable[[list[R]], S]) -> S | None:
    """Return the result of a function of all of them; None if one is None."""
    every = list(several)
    known = [one for one in every if one is not None]
    return of(known) if len(known) == len(every) else None


def _moved(several: Sequence[Moved[Array]]) -> Moved[Array]:
    """Join the rows of the ranks' probes."""
    return Moved(sum(x.total for x in several), np.concatenate([x.products for x in several]))


def _dots(parts: Sequence[RankSums]) -> Dots[float]:
    """Merge the parameters' dot products: one rank's, or the sum if each holds a part."""
    dots = parts[0].dots
    if not dots.partial:
        return dots
    added: dict[str, Any] = {
        name: _of_every((getattr(part.dots, name) for part in parts), sum)
        for name in ("gamma_gamma", "w_w", "w_gamma", "a_a", "a_w", "a_gamma")
    }
    return replace(dots, **added)


def _attainable(several: Sequence[CeilingSums[Array]]) -> Array:
    added = joined(several, sum)
    gram, cross, square = map(torch.as_tensor, (added.gram, added.cross, added.square))
    found: Array = attainable_cosine(gram, cross, square.sqrt()).numpy()
    return found


def _evidence(several: Sequence[Evidence[Array]]) -> Evidence[Array]:
    """Merge the evidence on a gradient, which is the same in all ranks; the sums h add up."""
    every = [e.equations for e in several if e.equations is not None]
    equations = None
    if len(every) == len(several) and len({of.shape for of in every}) == 1:
        equations = every[0].copy()
        equations[1] = sum(of[1] for of in every)
    return Evidence(
        precision=max(e.precision for e in several),
        reason=next((e.reason for e in several if e.reason), ""),
        terms=sum(e.terms for e in several),
        equations=equations,
        of_weight=several[0].of_weight,
    )


def _totals(
    several: Sequence[Totals[Array]], seen: Sequence[Sampled[Array]], generator: np.random.Generator
) -> Totals[Array]:
    """Merge the totals of the ranks' passes over all rows."""
    G_G = np.sum([x.G_G for x in several], axis=0)
    whole = np.where(G_G == 0, 1.0, G_G)
    return Totals(
        active=np.sum([x.active for x in several], axis=0),
        G_G=G_G,
        concentration=np.sum([x.concentration * (x.G_G / whole) ** 2 for x in several], axis=0),
        own_G=_of_every((x.own_G for x in several), sum),
        own_own=_of_every((x.own_own for x in several), sum),
        scales=_of_every(
            (x.scales for x in several), lambda of: _scales(of, several, seen, generator)
        ),
    )


def _scales(
    scales: Sequence[ScaleTotals[Array]],
    several: Sequence[Totals[Array]],
    seen: Sequence[Sampled[Array]],
    generator: np.random.Generator,
) -> ScaleTotals[Array]:
    """Merge the sums over scales."""
    count, sums = np.concatenate([x.active for x in several]), np.array([x.sum[0] for x in scales])
    off = np.where(count > 0, sums / count - sums.sum() / count.sum(), 0.0)
    squares = np.concatenate([x.deviation for x in scales]) ** 2 + count * off**2
    places = _evenly([len(x.entries) for x in scales], [rows.total for rows in seen], generator)
    return ScaleTotals(
        sum=np.array([sums.sum()]),
        deviation=np.sqrt([squares.sum()]),
        largest=np.max([x.largest for x in scales], axis=0),
        entries=np.concatenate([x.entries[at] for x, at in zip(scales, places, strict=True)]),
    )


def _evenly(
    counts: Sequence[int], totals: Sequence[float], generator: np.random.Generator
) -> list[Index]:
    """Return indices of the ranks' samples such that each rank's share is proportional to size."""
    least = min(
        [count / total for count, total in zip(counts, totals, strict=True) if total] or [1]
    )
    kept = [min(n, math.ceil(least * total)) for n, total in zip(counts, totals, strict=True)]
    return [generator.permutation(n)[:some] for n, some in zip(counts, kept, strict=True)]


def _blocks(
    several: Sequence[Blocks[Array]], seen: Sequence[Sampled[Array]], generator: np.random.Generator
) -> Blocks[Array]:
    """Merge the scales of every row and group, relative to one pivot; some entries with rows."""
    groups = several[0].groups
    pivots = [float(own.pivot.max(initial=0.0)) for own in several]  # empty without rows
    pivot = max(pivots)
    off = np.repeat([own - pivot for own in pivots], [rows.seen for rows in seen])
    sums, norms, largest = (
        np.concatenate(of)
        for of in zip(*((own.sums, own.norms, own.largest) for own in several), strict=True)
    )
    squares = norms**2 + 2 * off * sums + groups * off**2
    starts = np.cumsum([0, *(rows.seen for rows in seen)])
    entry_rows = [own.rows_of_entries(rows.seen) for own, rows in zip(several, seen, strict=True)]
    sizes = [float(rows.seen * groups) for rows in seen]
    places = _evenly([len(of) for of in entry_rows], sizes, generator)
    chosen = [*zip(several, entry_rows, places, starts, strict=False)]
    return Blocks(
        groups,
        pivot=np.array([[pivot]]),
        sums=sums + groups * off,
        norms=np.sqrt(np.maximum(squares, 0.0)),
        largest=largest,
        entries=np.concatenate([own.entries[at] for own, _, at, _ in chosen]),
        entry_rows=np.concatenate([of[at] + start for _, of, at, start in chosen]),
    )


def _common(
    several: Sequence[Common[Array]],
    rows: Sequence[Sampled[Array]],
    is_active: Bool[np.ndarray, " rows"],
) -> Common[Array]:
    """Estimate φ_r·Σ_k φ_k of every row over all ranks from the ranks' own sums.

    Only the sum of other ranks' rows is known: a row's product with them is taken to be that with
    its own rank's rows, and all are shifted so that their total over all rows is right.
    """
    norms = np.concatenate([common.norms for common in several])
    products = np.concatenate([common.products for common in several])
    counted = [x.counted for x in several if x.counted is not None]
    sums = np.stack([x.sum for x in several if x.sum is not None])
    count, seen, squares = np.array([(of.active, of.seen, of.squares) for of in counted]).T
    active = np.array([float(x.total) for x in rows]) * np.where(seen > 0, count / seen, 0.0)
    means = np.where(count[:, None] > 0, sums / count[:, None], 0.0)
    alone = ((sums**2).sum(1) - squares) / (count * (count - 1))
    alone = np.where(count > 1, alone, (means**2).sum(1))
    mean = active @ means
    across = mean @ mean - (active**2 * (means**2).sum(1)).sum()
    within = (active * (active - 1) * alone)[active > 1].sum()
    n_all, n = active.sum(), is_active.sum()
    pairs = (across + within) / (n_all * (n_all - 1)) if n_all > 1 else 0.0
    own_squares = norms**2
    factors = np.where(count > 1, (n - 1) / (count - 1), 0.0)
    lengths = [len(common.products) for common in several]
    products = (products - own_squares) * np.repeat(factors, lengths) + own_squares
    whole = pairs * n * (n - 1) + own_squares[is_active].sum()
    return Common(products + (whole - products[is_active].sum()) / max(n, 1), norms)


def in_units(layer: RankSums, factor: float) -> RankSums:
    """Return the record with G in the units of the optimizer's gradient.

    Args:
        layer: the record with G as the backward passes left it.
        factor: ‖gradient the optimizer saw‖ / ‖gradient that backward left‖; NaN if unknown.
    """
    c = 1.0 if math.isnan(factor) else factor
    seen = replace(layer.evidence, factor=factor)
    if c == 1:
        return replace(layer, evidence=seen)
    pairs = pairs_of(layer.vectors)
    if seen.e_by_rows:  # everything but z and d is linear in G
        products = _scaled(layer.products, pairs, c, (Vector.G, Vector.OWN, Vector.E, Vector.REST))
        return replace(layer, products=products, evidence=seen)
    products = _scaled(layer.products, pairs, c, (Vector.G, Vector.OWN))
    if Vector.REST in layer.vectors:  # e − D G, which depends on the units
        e_e = of_rows(layer, Vector.E, Vector.E)
        if Vector.OWN in layer.vectors:
            own_e = of_rows(layer, Vector.OWN, Vector.E)
            own_own = of_rows(layer, Vector.OWN, Vector.OWN)
        else:
            assert layer.scale is not None
            own_e = layer.scale * of_rows(layer, Vector.G, Vector.E)
            own_own = layer.scale**2 * of_rows(layer, Vector.G, Vector.G)
        rest = np.maximum(e_e - 2 * c * own_e + c**2 * own_own, 0.0)
        products[:, column_of(pairs, Vector.REST, Vector.REST)] = rest
    return replace(layer, products=products, evidence=seen)


def _scaled(products: Array, pairs: Pairs, factor: float, of: Sequence[Vector]) -> Array:
    """Return the dot products of pairs, with some vectors multiplied by a factor."""
    powers = [sum(vector in of for vector in pair) for pair in pairs]
    found: Array = products * factor ** np.array(powers, dtype=np.float64)
    return found
