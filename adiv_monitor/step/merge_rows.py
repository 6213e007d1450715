"""Merging of one layer's records of several ranks."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool

from adiv_monitor.capture.sampling import winners
from adiv_monitor.features.rows import Index
from adiv_monitor.maths.ceiling import attainable_cosine
from adiv_monitor.maths.records import R, joined, leaves
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
from adiv_monitor.step.gradient_check import multiples

S = TypeVar("S")
RankSums = LayerSums[Array]

# Fields whose length differs by rank: with its rows, or the entries that it sends.
_OF_SOME = {
    *("products", "realised.products", "scale", "common.products", "common.norms"),
    *("evidence.since", "evidence.then", "evidence.now", "evidence.contributed"),
    *(f"blocks.{name}" for name in ("pivot", "sums", "norms", "largest", "entries")),
    "totals.scales.entries",
}


def counted(layer: RankSums) -> RankSums:
    """Record the counts over all present rows in `common`, before some rows are left out."""
    if layer.common is None:
        return layer
    active = of_rows(layer, Vector.G, Vector.G) != 0
    squares = float((layer.common.norms[active] ** 2).sum())
    of = Counted(int(active.sum()), len(active), squares)
    return replace(layer, common=replace(layer.common, counted=of))


def packed(layer: RankSums) -> RankSums:
    """Return the record as it is sent: with a factor for the gradient's entries; see `Multiple`."""
    evidence = layer.evidence
    if evidence.since is None:
        return layer
    now, then = evidence.since
    since = multiples([(now, then, 0.0)])[0]
    factor = np.array([(since.factor, since.rest)])
    return replace(layer, evidence=replace(evidence, since=factor))


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
            entry_rows=np.searchsorted(kept, entry_rows[among]),
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
    """Whether two records have the same kind, vectors and groups, and arrays of the same shapes."""
    mine, others = ((x.about.kind, x.blocks and x.blocks.groups, x.vectors) for x in (part, other))
    shapes, as_many = _shapes(part), _shapes(other)
    shared = shapes.keys() & as_many.keys()
    return mine == others and all(shapes[name] == as_many[name] for name in shared)


def _shapes(layer: RankSums) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all arrays, without the dimension that differs by rank."""
    return {
        name: array.shape[1:] if name in _OF_SOME else array.shape for name, array in leaves(layer)
    }


def _with_keys(part: RankSums, generator: np.random.Generator) -> RankSums:
    """Draw keys for the rows of a rank that took all of its rows, without drawing."""
    keys = part.sampled.keys
    if keys is None or keys.any() or part.sampled.bound < np.inf:
        return part
    return replace(part, sampled=replace(part.sampled, keys=generator.random(len(keys))))


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
    if max_rows is not None:
        filled = [_with_keys(part, generator) for part in filled]
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
        _evidence(parts, some),
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
    present = [one for one in every if one is not None]
    return of(present) if len(present) == len(every) else None


def _moved(several: Sequence[Moved[Array]]) -> Moved[Array]:
    """Join the rows of the ranks' probes."""
    return Moved(sum(x.total for x in several), np.concatenate([x.products for x in several]))


def _added(several: Sequence[Array]) -> Array:
    """Return the sum of arrays of one number each."""
    return np.array([sum(float(one[0]) for one in several)])


def _dots(parts: Sequence[RankSums]) -> Dots[float]:
    """Merge the parameters' dot products: one rank's, or the sum if each holds a part."""
    dots = parts[0].dots
    if not dots.partial:
        return dots
    several = [part.dots for part in parts]
    return Dots(
        gamma_gamma=sum(dots.gamma_gamma for dots in several),
        w_w=_of_every((dots.w_w for dots in several), sum),
        w_gamma=_of_every((dots.w_gamma for dots in several), sum),
        a_a=_of_every((dots.a_a for dots in several), sum),
        a_w=_of_every((dots.a_w for dots in several), sum),
        a_gamma=_of_every((dots.a_gamma for dots in several), sum),
        partial=True,
    )


def _attainable(several: Sequence[CeilingSums[Array]]) -> Array:
    added = joined(several, sum)
    gram, cross, square = map(torch.as_tensor, (added.gram, added.cross, added.square))
    found: Array = attainable_cosine(gram, cross, square.sqrt()).numpy()
    return found


def _evidence(parts: Sequence[RankSums], some: Sequence[RankSums]) -> Evidence[Array]:
    """Merge the evidence on a gradient.

    Args:
        parts: records of all ranks.
        some: records of the ranks that have rows.
    """
    several = [part.evidence for part in some]
    since = [e.since for part in parts if (e := part.evidence).since is not None]
    foreign = [float(e.foreign) for e in several if e.foreign is not None]
    then = _of_entries(e.then for e in several)
    now = [_of_entries(of) for of in zip_longest(*(e.now for e in several))]
    contributed = [_of_entries(of) for of in zip_longest(*(e.contributed for e in several))]
    return Evidence(
        precision=max(e.precision for e in several),
        reason=next((e.reason for e in several if e.reason), ""),
        terms=sum(e.terms for e in several),
        then=sum(then, np.zeros(1)) if then else None,
        now=tuple(of[0] if of else None for of in now),
        contributed=tuple(sum(of, np.zeros(1)) if of else None for of in contributed),
        since=np.concatenate(since) if since else None,
        foreign=np.array(sum(foreign)) if foreign else None,
    )


def _of_entries(several: Iterable[Array | None]) -> list[Array]:
    """Return the ranks' entries of a gradient; none if they are of different shapes."""
    known = [entries for entries in several if entries is not None]
    return known if len({entries.shape for entries in known}) == 1 else []


def _totals(
    several: Sequence[Totals[Array]], seen: Sequence[Sampled], generator: np.random.Generator
) -> Totals[Array]:
    """Merge the totals of the ranks' passes over all rows."""
    active = np.array([float(totals.active[0]) for totals in several])
    G_G = np.array([float(totals.G_G[0]) for totals in several])
    whole = np.array([sum(G_G.tolist())])

    def mean_concentration(of_ranks: Sequence[Array]) -> Array:
        pairs = zip(of_ranks, G_G.tolist(), strict=True)
        found: Array = sum(float(own[0] * square**2) for own, square in pairs) / (whole**2 or 1.0)
        return found

    return Totals(
        active=np.array([sum(active.tolist())]),
        G_G=whole,
        concentration=mean_concentration([x.concentration for x in several]),
        own_G=_of_every((x.own_G for x in several), _added),
        own_own=_of_every((x.own_own for x in several), _added),
        scales=_of_every(
            (x.scales for x in several), lambda of: _scales(of, active, seen, generator)
        ),
    )


def _scales(
    several: Sequence[ScaleTotals[Array]],
    counts: Array,
    seen: Sequence[Sampled],
    generator: np.random.Generator,
) -> ScaleTotals[Array]:
    """Merge the sums over scales; `counts` are the numbers of active rows by rank."""
    sums = np.array([float(scales.sum[0]) for scales in several])
    spreads = np.array([float(scales.deviation[0]) for scales in several])
    whole = np.array([sum(sums.tolist())])
    some = counts > 0
    counts, sums, spreads = counts[some], sums[some], spreads[some]
    off = sums / counts - (sums.sum() / counts.sum() if some.any() else 0.0)
    places = _evenly(
        [len(scales.entries) for scales in several], [rows.total for rows in seen], generator
    )
    parts = [scales.entries[at] for scales, at in zip(several, places, strict=True)]
    return ScaleTotals(
        sum=whole,
        deviation=np.sqrt([(spreads**2).sum() + (counts * off**2).sum()]),
        largest=np.array([max(float(scales.largest[0]) for scales in several)]),
        entries=np.concatenate(parts),
    )


def _evenly(
    counts: Sequence[int], totals: Sequence[float], generator: np.random.Generator
) -> list[Index]:
    """Return indices of the ranks' samples such that each rank's share is proportional to size."""
    shares = [count / total for count, total in zip(counts, totals, strict=True) if total]
    least = min(shares, default=1.0)
    return [
        np.arange(count)
        if count <= math.ceil(least * total)
        else generator.choice(count, math.ceil(least * total), replace=False)
        for count, total in zip(counts, totals, strict=True)
    ]


def _blocks(
    several: Sequence[Blocks[Array]], seen: Sequence[Sampled], generator: np.random.Generator
) -> Blocks[Array]:
    """Merge the scales of every row and group, relative to one pivot; some entries with rows."""
    groups = several[0].groups
    pivots = [float(own.pivot.reshape(-1)[0]) for own in several if own.pivot.size]
    pivot = pivots[0] if pivots else 0.0
    sums, norms = [], []
    for own in several:
        off = (float(own.pivot.reshape(-1)[0]) if own.pivot.size else pivot) - pivot
        sums.append(own.sums + groups * off)
        squares = own.norms**2 + 2 * off * own.sums + groups * off**2
        norms.append(np.sqrt(np.maximum(squares, 0.0)))
    starts = np.cumsum([0, *(rows.seen for rows in seen)])
    entry_rows = [own.rows_of_entries(rows.seen) for own, rows in zip(several, seen, strict=True)]
    sizes = [float(rows.seen * groups) for rows in seen]
    places = _evenly([len(of) for of in entry_rows], sizes, generator)
    chosen = zip(entry_rows, places, starts, strict=False)
    return Blocks(
        groups,
        pivot=np.array([[pivot]]),
        sums=np.concatenate(sums),
        norms=np.concatenate(norms),
        largest=np.concatenate([own.largest for own in several]),
        entries=np.concatenate([own.entries[at] for own, at in zip(several, places, strict=True)]),
        entry_rows=np.concatenate([of[at] + start for of, at, start in chosen]),
    )


def _common(
    several: Sequence[Common[Array]], rows: Sequence[Sampled], is_active: Bool[np.ndarray, " rows"]
) -> Common[Array]:
    """Estimate φ_r·Σ_k φ_k of every row over all ranks from the ranks' own sums.

    Only the sum of other ranks' rows is known: a row's product with them is taken to be that with
    its own rank's rows, and all are shifted so that their total over all rows is right.
    """
    norms = np.concatenate([common.norms for common in several])
    products = np.concatenate([common.products for common in several])
    known = _of_every((x.counted for x in several), list)
    sums = _of_every((x.sum for x in several), np.stack)
    if known is None or sums is None:
        return Common(products, norms)
    count = np.array([float(of.active) for of in known])
    seen = np.array([float(of.seen) for of in known])
    squares = np.array([of.squares for of in known])
    total = np.array([float(x.total) for x in rows])
    with np.errstate(divide="ignore", invalid="ignore"):
        active = np.where(seen > 0, total * count / seen, 0.0)
        means = np.where(count[:, None] > 0, sums / count[:, None], 0.0)
        alone = np.where(
            count > 1, ((sums**2).sum(1) - squares) / (count * (count - 1)), (means**2).sum(1)
        )
        mean = active @ means
        across = mean @ mean - (active**2 * (means**2).sum(1)).sum()
        within = (active * (active - 1) * alone)[active > 1].sum()
        n_all = active.sum()
        pairs = (across + within) / (n_all * (n_all - 1)) if n_all > 1 else 0.0
    own_squares = norms**2
    n = is_active.sum()
    factors = [(n - 1) / (c - 1) if c > 1 else 0.0 for c in count]
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
    pairs = pairs_of(layer.vectors)
    products = _scaled(layer.products, pairs, c)
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
    return replace(
        layer,
        products=products,
        evidence=replace(layer.evidence, factor=np.array(factor)),
    )


def _scaled(products: Array, pairs: Pairs, factor: float) -> Array:
    """Return the dot products of pairs, with G and what is linear in it multiplied by a factor."""
    powers = [sum(vector in (Vector.G, Vector.OWN) for vector in pair) for pair in pairs]
    found: Array = products * factor ** np.array(powers, dtype=np.float64)
    return found
