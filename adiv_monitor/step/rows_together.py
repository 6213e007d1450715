"""One layer's numbers of several processes, made one."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from adiv_monitor.capture.sampling import Draw, winners
from adiv_monitor.features.rows import Index
from adiv_monitor.maths.ceiling import attainable_cosine
from adiv_monitor.maths.readings import REALISED, Array
from adiv_monitor.step.gradient_check import as_multiple, is_now, is_of_entries
from adiv_monitor.step.part import CEILING_SUMS, OWN_DOTS, LayerPart, Looked

Values = dict[str, Array]

# Numbers of every row.
_SCALES = ("scale", "scale_sums", "scale_norms", "scale_largest")
OF_ROWS = ("products", "realised", *_SCALES, "common", "weight_norms")
_MATRICES = ("products", "realised")
# What a pass over all rows summed up, where that adds up.
_ADDED = ("active", "G_G", "own_G", "own_own", "scale_sum", "weight_squares")
_LARGEST = ("rule_error", "replay_error")
# Of these, processes have as many as they have rows, or chose to tell.
_OF_SOME = (
    *(*OF_ROWS, "makings", "since"),
    *("scale_entries", "scale_entries_of_rows", "scale_pivot"),
)


def with_common(values: Values) -> Values:
    """The same, with what the rows that are there say of all of them, before some are left out."""
    if "common" not in values:
        return values
    active = values["products"][:, 0, 0] != 0
    squares = float((values["weight_norms"][active] ** 2).sum())
    return values | {"common_of": np.array([float(active.sum()), len(active), squares])}


def packed(values: Values) -> Values:
    """The same as it travels: a product of two vectors stands in their matrix twice.

    And of what became of the gradient since the last pass, only the factor does; see `as_multiple`.
    """
    found = values | {n: _triangle(values[n]) for n in _MATRICES if n in values}
    if "since" in values:
        found["since"] = np.array([as_multiple(*values["since"])])
    return found


def _triangle(matrices: Array) -> Array:
    rows, columns = np.triu_indices(matrices.shape[1])
    found: Array = matrices[:, rows, columns]
    return found


def _unpacked(values: Values) -> Values:
    return values | {n: _whole(values[n]) for n in _MATRICES if n in values}


def _whole(triangles: Array) -> Array:
    size = math.isqrt(2 * triangles.shape[1])
    rows, columns = np.triu_indices(size)
    found = np.empty((len(triangles), size, size))
    found[:, rows, columns] = found[:, columns, rows] = triangles
    return found


def pick(layer: LayerPart, kept: Index) -> LayerPart:
    """The same with some of its rows."""
    assert layer.draw is not None
    values = layer.values | {n: layer.values[n][kept] for n in OF_ROWS if n in layer.values}
    looked = replace(layer.looked, rows_seen=len(kept))
    if "scale_entries_of_rows" in values:
        rows = _entry_rows(layer)
        among = np.isin(rows, kept)
        values["scale_entries_of_rows"] = values["scale_entries_of_rows"][among]
        looked.entry_rows = np.searchsorted(kept, rows[among])
    drawn = Draw(kept, layer.draw.keys[kept], layer.draw.bound)
    return LayerPart(looked, values, layer.dots, drawn)


def is_alike(part: LayerPart, other: LayerPart) -> bool:
    """Whether the same was looked at in both, and there are numbers of the same shapes of it."""
    mine, others = (
        (looked.kind, looked.groups, looked.vectors) for looked in (part.looked, other.looked)
    )
    shared = part.values.keys() & other.values.keys()
    return mine == others and all(
        _shape(name, part.values[name]) == _shape(name, other.values[name]) for name in shared
    )


def _shape(name: str, array: Array) -> tuple[int, ...]:
    """What is the same of this array in all processes."""
    shape: tuple[int, ...] = array.shape
    return shape[1:] if name in _OF_SOME or is_of_entries(name) else shape


def once(parts: Sequence[LayerPart]) -> list[LayerPart]:
    """Those that make up all rows, each once; none if some of what was dealt out is missing."""
    kept, groups = list[LayerPart](), defaultdict[int, list[LayerPart]](list)
    for part in parts:
        if part.looked.dealt is None:
            kept.append(part)
        else:
            groups[part.looked.dealt.first].append(part)
    for group in groups.values():
        shared = group[0].looked.dealt
        assert shared is not None
        if len(group) < shared.count:
            return []
        kept += group[: shared.count]  # the first, where each has all
    return kept


def layer_together(
    parts: Sequence[LayerPart], max_rows: int | None, generator: np.random.Generator
) -> LayerPart:
    """One part for all.

    Args:
        parts: of one layer, from processes that train together, all alike.
        max_rows: how many rows to keep at most; None: all.
        generator: the source of chance.
    """
    filled = [part for part in parts if part.looked.rows_total] or list(parts[:1])
    draws = [part.draw for part in filled if part.draw is not None]
    kept = winners(draws, max_rows)
    some = [p if k is None else pick(p, k) for p, k in zip(filled, kept, strict=True)]
    several = [_unpacked(part.values) for part in some]
    values = {n: np.concatenate([v[n] for v in several]) for n in _in_all(OF_ROWS, several)}
    values |= {n: _largest([v[n] for v in several]) for n in _in_all(_LARGEST, several)}
    values |= {n: np.concatenate([v[n] for v in several]) for n in _in_all(("makings",), several)}
    values |= _of_all_rows(several, [part.looked for part in some], generator)
    values |= _of_entries(several)
    if since := [part.values["since"] for part in parts if "since" in part.values]:
        values["since"] = np.concatenate(since)
    if all(CEILING_SUMS[0] in own for own in several):
        sums = (sum(torch.from_numpy(own[name]) for own in several) for name in CEILING_SUMS)
        gram, cross, square = map(torch.as_tensor, sums)
        values["attainable_cosine"] = attainable_cosine(gram, cross, square.sqrt()).numpy()
    values |= {n: np.sum([v[n] for v in several], axis=0) for n in _in_all(OWN_DOTS, several)}
    looked = _looked([part.looked for part in some])
    if "scale_pivot" in several[0]:
        values |= _of_blocks(several, looked.groups)
        looked.entry_rows, values["scale_entries_of_rows"] = _entries(some, generator)
    if "common_sum" in several[0]:
        values |= _common(several, [part.looked for part in some], values)
    return LayerPart(looked, values, _dots(parts))


def _dots(parts: Sequence[LayerPart]) -> dict[str, float]:
    """All processes have the same parameters, or each a part of them."""
    dots = parts[0].dots
    if not parts[0].looked.shares:
        return dots
    shared = [name for name in dots if all(name in part.dots for part in parts)]
    return {name: sum(part.dots[name] for part in parts) for name in shared}


def in_units(layer: LayerPart, factor: float) -> Values:
    """The numbers with G in the units of the optimizer's gradient.

    Args:
        layer: with G as the backward passes left it.
        factor: ‖gradient the optimizer saw‖ / ‖gradient that backward left‖; NaN if unknown.
    """
    values = layer.values | {"gradient_factor": np.array(factor)}
    c = 1.0 if math.isnan(factor) else factor
    names = layer.looked.vectors
    products = values["products"].copy()
    G, e = names.index("G"), names.index("e")
    if "rest" in names:  # e − D G, which depends on the units
        rest = names.index("rest")
        if "own" in names:
            own = names.index("own")
            own_e, own_own = products[:, own, e], products[:, own, own]
        else:
            own_e = values["scale"] * products[:, G, e]
            own_own = values["scale"] ** 2 * products[:, G, G]
        squares = products[:, e, e] - 2 * c * own_e + c**2 * own_own
        products[:, rest, rest] = np.maximum(squares, 0.0)
    _scale(products, [names.index(name) for name in ("G", "own") if name in names], c)
    values["products"] = products
    if "realised" in values:
        values["realised"] = values["realised"].copy()
        _scale(values["realised"], [REALISED.index("G")], c)
    return values


def _scale(products: Array, places: Sequence[int], factor: float) -> None:
    for place in places:
        products[:, place, :] *= factor
        products[:, :, place] *= factor


def _in_all(names: Sequence[str], several: Sequence[Values]) -> list[str]:
    return [name for name in names if all(name in values for values in several)]


def _largest(arrays: Sequence[Array]) -> Array:
    return np.array(max(float(np.max(array)) for array in arrays))


def _looked(several: Sequence[Looked]) -> Looked:
    return replace(
        several[0],
        rows_seen=sum(looked.rows_seen for looked in several),
        rows_total=sum(looked.rows_total for looked in several),
        precision=max(looked.precision for looked in several),
        from_rows=next((looked.from_rows for looked in several if looked.from_rows), ""),
        asked_common=all(looked.asked_common for looked in several),
        terms=sum(looked.terms for looked in several),
    )


def _of_all_rows(
    several: Sequence[Values], looked: Sequence[Looked], generator: np.random.Generator
) -> Values:
    """What passes over all rows of each said, where there was one over those of each."""
    found: Values = {}
    if all("weight_sum" in values for values in several):
        found["weight_sum"] = np.array(np.linalg.norm(sum(v["weight_sum"] for v in several)))
    if not all("G_G" in values for values in several):
        return found
    found |= {n: np.array([sum(float(v[n][0]) for v in several)]) for n in _in_all(_ADDED, several)}
    if all("G_concentration" in values for values in several):
        squares = sum(float(v["G_concentration"][0] * v["G_G"][0] ** 2) for v in several)
        found["G_concentration"] = squares / found["G_G"] ** 2
    if all("scale_sum" in values for values in several):
        counts, sums, spreads = (
            np.array([float(v[name][0]) for v in several])
            for name in ("active", "scale_sum", "scale_deviation")
        )
        some = counts > 0
        counts, sums, spreads = counts[some], sums[some], spreads[some]
        off = sums / counts - (sums.sum() / counts.sum() if some.any() else 0.0)
        found["scale_deviation"] = np.sqrt([(spreads**2).sum() + (counts * off**2).sum()])
        found["scale_max"] = np.array([max(float(v["scale_max"][0]) for v in several)])
        totals = [seen.rows_total for seen in looked]
        places = _evenly([len(v["scale_entries"]) for v in several], totals, generator)
        parts = [v["scale_entries"][at] for v, at in zip(several, places, strict=True)]
        found["scale_entries"] = np.concatenate(parts)
    return found


def _evenly(
    counts: Sequence[int], totals: Sequence[float], generator: np.random.Generator
) -> list[Index]:
    """Of what each has chosen of its own, as much that each is represented by its size."""
    shares = [count / total for count, total in zip(counts, totals, strict=True) if total]
    least = min(shares, default=1.0)
    return [
        np.arange(count)
        if count <= math.ceil(least * total)
        else generator.choice(count, math.ceil(least * total), replace=False)
        for count, total in zip(counts, totals, strict=True)
    ]


def _of_entries(several: Sequence[Values]) -> Values:
    """What backward passes left and calls handed on of some entries; what was there before."""
    found: Values = {}
    for name in dict.fromkeys(name for v in several for name in v if is_of_entries(name)):
        with_entries = [v[name] for v in several if name in v]
        if len({entries.shape for entries in with_entries}) == 1:
            found[name] = with_entries[0] if is_now(name) else sum(with_entries, np.zeros(1))
    foreign = [float(v["foreign"]) for v in several if "foreign" in v]
    if foreign:
        found["foreign"] = np.array(sum(foreign))
    return found


def _of_blocks(several: Sequence[Values], groups: int) -> Values:
    """Scales of every row and group, relative to one number for all."""
    pivots = [float(v["scale_pivot"].reshape(-1)[0]) for v in several if v["scale_pivot"].size]
    pivot = pivots[0] if pivots else 0.0
    sums, norms = [], []
    for values in several:
        own = float(values["scale_pivot"].reshape(-1)[0]) if values["scale_pivot"].size else pivot
        off, shifted = own - pivot, values["scale_sums"]
        sums.append(shifted + groups * off)
        squares = values["scale_norms"] ** 2 + 2 * off * shifted + groups * off**2
        norms.append(np.sqrt(np.maximum(squares, 0.0)))
    return {
        "scale_pivot": np.array([[pivot]]),
        "scale_sums": np.concatenate(sums),
        "scale_norms": np.concatenate(norms),
    }


def _entry_rows(layer: LayerPart) -> Index:
    rows = layer.looked.entry_rows
    if rows is not None:
        return rows
    return np.arange(layer.looked.rows_seen * layer.looked.groups) // layer.looked.groups


def _entries(parts: Sequence[LayerPart], generator: np.random.Generator) -> tuple[Index, Array]:
    """Some scales of blocks, and of which row each is."""
    starts = np.cumsum([0, *(part.looked.rows_seen for part in parts)])
    rows = [_entry_rows(part) for part in parts]
    sizes = [float(part.looked.rows_seen * part.looked.groups) for part in parts]
    places = _evenly([len(own) for own in rows], sizes, generator)
    return (
        np.concatenate(
            [own[at] + start for own, at, start in zip(rows, places, starts, strict=False)]
        ),
        np.concatenate(
            [p.values["scale_entries_of_rows"][at] for p, at in zip(parts, places, strict=True)]
        ),
    )


def _common(several: Sequence[Values], looked: Sequence[Looked], values: Values) -> Values:
    """φ_r·Σ_k φ_k of every row, as far as the processes' own sums tell it.

    Of the rows of other processes only the sum is known: what a row has in common with them is
    taken to be what it has in common with its own; the sum over all rows is what it is.
    """
    count, seen, squares = np.array([v["common_of"] for v in several]).T
    sums = np.stack([v["common_sum"] for v in several])
    total = np.array([float(x.rows_total) for x in looked])
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
    is_active = values["products"][:, 0, 0] != 0
    own_squares = values["weight_norms"] ** 2
    n = is_active.sum()
    factors = [(n - 1) / (c - 1) if c > 1 else 0.0 for c in count]
    lengths = [len(v["common"]) for v in several]
    products = (values["common"] - own_squares) * np.repeat(factors, lengths) + own_squares
    whole = pairs * n * (n - 1) + own_squares[is_active].sum()
    products = products + (whole - products[is_active].sum()) / max(n, 1)
    return {"common": products}
