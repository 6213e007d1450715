"""Merging of the numbers of several ranks: rows are concatenated, sums are added.

Every sampled row has a random key, and the rows with the smallest keys of all ranks are a sample of
all rows (`capture/sampling.py`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from adiv_monitor.capture.sampling import draw
from adiv_monitor.features.rows import Index
from adiv_monitor.maths.ceiling import attainable_cosine
from adiv_monitor.maths.sums import DOTS, Array, StepSums, Table, blank


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
    totals = layers["total"].tolist()
    drawn = [
        draw((total,), seen, np.inf, generator)
        for total, seen in zip(totals, sums.seen.tolist(), strict=True)
    ]
    rows["key"] = np.concatenate([np.empty(0), *(of.keys for of in drawn if of.keys is not None)])
    layers["bound"] = [of.bound for of in drawn]
    active = (rows["G_G"] != 0).astype(float)
    layers["common_active"], layers["common_seen"] = sums.total(active), sums.seen
    layers["common_squares"] = sums.total(np.where(active, rows["length"] ** 2, 0.0))
    sums = replace(sums, layers=layers, rows=rows)
    if max_rows is None:
        return sums
    # One rank has more than this share of the sample only with low probability.
    share = max_rows / world
    likely = (share + 4 * math.sqrt(share)) / np.maximum(layers["total"], 1)
    layers["bound"] = np.minimum(layers["bound"], likely)
    return sums.with_rows(np.flatnonzero(rows["key"] < layers["bound"][rows["layer"]]))


def merge(
    several: Sequence[StepSums], max_rows: int | None, generator: np.random.Generator
) -> tuple[StepSums, set[str]]:
    """Merge the numbers of ranks that train together.

    Also return the paths of layers of which rows have more scales in some ranks than in the first
    one; those ranks' numbers are left out.

    Args:
        several: numbers of the ranks.
        max_rows: largest number of rows of a layer to keep; None: all.
        generator: random generator.
    """
    paths = tuple(dict.fromkeys(path for sums in several for path in sums.paths))
    ranks = _Ranks(several, paths)
    layers = ranks.layers()
    rows, of_row, order = ranks.joined("rows")
    bounds = ranks.each("bound", np.inf).min(0, initial=np.inf)
    kept = _winners(rows, bounds, max_rows)
    entries, of_entry, _ = ranks.joined("entries")
    place = np.full(sum(len(sums.rows) for sums in several) + 1, -1)
    place[order] = np.arange(len(order))
    entries["row"] = place[entries["row"]]
    # Of all rows where every rank knows them, else of the sampled rows.
    is_sampled, knows = entries["row"] >= 0, layers["knows_scales"][entries["layer"]]
    some = np.flatnonzero((is_sampled != knows) & (~is_sampled | np.isin(entries["row"], kept)))
    sizes = ranks.each("total", 0.0)
    seen = np.zeros_like(sizes)
    np.add.at(seen, (of_row[kept], rows["layer"][kept]), 1)
    sizes = np.where(layers["knows_scales"], sizes, seen)
    even = _evenly(entries["layer"][some], of_entry[some], sizes, generator)

    tables = {"rows": rows, "entries": entries[some[even]], "moves": ranks.joined("moves")[0]}
    tables |= {name: ranks.added(name) for name in ("equations", "ceilings")}
    tables["features"] = blank("features", 0)
    sums = StepSums(paths, ranks.about, layers, **tables).with_rows(kept)
    _add_common(sums, ranks, of_row[kept])
    for i in np.flatnonzero(sums.lines("ceilings")).tolist():
        layers["attainable"][i], layers["has_attainable"][i] = _attainable(sums, i), True
    lost = (ranks.there & ~ranks.alike).any(0)
    return sums, {path for path, is_lost in zip(paths, lost, strict=True) if is_lost}


class _Ranks:
    """The numbers of several ranks, by layer.

    Attributes:
        there: whether a rank has a layer, (ranks, layers).
        alike: whether its rows also have as many scales as the first rank's.
        counts: whether it also has rows; if no rank has, the first one counts.
        about: static properties of the layers.
    """

    def __init__(self, several: Sequence[StepSums], paths: Sequence[str]) -> None:
        number, shape = {path: i for i, path in enumerate(paths)}, (len(several), len(paths))
        self._several = several
        self._places = [np.array([number[p] for p in x.paths], np.int64) for x in several]
        self._lines, self.there = blank("layers", shape), np.zeros(shape, dtype=bool)
        for rank, (sums, at) in enumerate(zip(several, self._places, strict=True)):
            self._lines[rank, at], self.there[rank, at] = sums.layers, True
        self._first = self.there.argmax(0), np.arange(len(paths))
        about = [zip(sums.paths, sums.about, strict=True) for sums in reversed(several)]
        first = {path: of for pairs in about for path, of in pairs}
        self.about = tuple(first[path] for path in paths)
        groups = self._lines["groups"]
        same: np.ndarray = groups == groups[self._first]
        self.alike = self.there & same
        self.counts = self.alike & (self._lines["total"] > 0)
        self.counts[self._first] |= ~self.counts.any(0)

    def each(self, column: str, rest: float) -> Array:
        """Return a column of the layers of all ranks that count; `rest` for the others."""
        found: Array = np.where(self.counts, self._lines[column], rest)
        return found

    def all_have(self, column: str) -> np.ndarray:
        """Return whether a flag is set in all ranks that count."""
        found: np.ndarray = np.all(self.each(column, 1.0), axis=0)
        return found

    def joined(self, table: str) -> tuple[Table, Index, Index]:
        """Return the lines of all ranks that count, by layer and rank; the rank of each line.

        And the numbers of the lines, as if those of all ranks were end to end; in the same way
        entries name their rows.
        """
        parts, start = list[Table](), 0
        for sums, at in zip(self._several, self._places, strict=True):
            lines = getattr(sums, table).copy()
            lines["layer"] = at[lines["layer"]]
            if table == "entries":
                lines["row"] += np.where(lines["row"] < 0, 0, start)
                start += len(sums.rows)
            parts.append(lines)
        whole, rank = np.concatenate(parts), np.repeat(np.arange(len(parts)), [*map(len, parts)])
        kept = np.flatnonzero(self.counts[rank, whole["layer"]])
        order = kept[np.argsort(whole["layer"][kept], kind="stable")]
        return whole[order], rank[order], order

    def by_rank(self, table: str) -> Iterator[Table]:
        """Yield the lines of every layer of which all ranks have equally many, (ranks, lines)."""
        lines, rank, _ = self.joined(table)
        # Equations of weight and bias are apart.
        key = 2 * lines["layer"] + (lines["of_bias"] if table == "equations" else 0)
        order = np.lexsort((rank, key))
        ends = np.flatnonzero(np.diff(key[order])) + 1
        for at in np.split(order, ends) if len(order) else ():
            count = int(self.counts[:, lines["layer"][at[0]]].sum())
            if len(at) % count == 0:
                of = at.reshape(count, -1)
                if (rank[of] == rank[of[:, :1]]).all() and len(set(rank[of[:, 0]])) == count:
                    yield lines[of]

    def added(self, table: str) -> Table:
        """Return the sums over the ranks of the numbers that add up; else those of the first."""
        parts, column = [blank(table, 0)], "h" if table == "equations" else "sum"
        for lines in self.by_rank(table):
            parts.append(lines[0].copy())
            parts[-1][column] = lines[column].sum(0)
        found: Table = np.concatenate(parts)
        return found

    def layers(self) -> Table:
        """Return the lines of the merged layers, without `attainable`."""
        lines = self._lines
        found: Table = lines[self._first]
        names = "total", "moved", "terms", "active", "G_G", "own_G", "own_own", "scale_sum"
        for name in names:  # NaN if one rank does not know it
            found[name] = self.each(name, 0.0).sum(0)
        for name in ("precision", "scale_max"):
            found[name] = np.nan_to_num(self.each(name, 0.0)).max(0, initial=0.0)
        for name in ("knows_scales", "has_common"):
            found[name] = self.all_have(name)
        found["moved"] *= self.all_have("moved")
        found["ranks"], found["reason"] = self.alike.sum(0), ""
        for rank in reversed(range(len(lines))):
            own = lines["reason"][rank]
            found["reason"] = np.where(self.counts[rank] & (own != ""), own, found["reason"])
        whole = np.where(found["G_G"] == 0, 1.0, found["G_G"])
        shares = (self.each("G_G", 0.0) / whole) ** 2
        found["concentration"] = (self.each("concentration", 0.0) * shares).sum(0)
        count, sums = self.each("active", 0.0), self.each("scale_sum", 0.0)
        off = np.where(count > 0, sums / count - sums.sum(0) / count.sum(0), 0.0)
        squares = self.each("scale_off", 0.0) ** 2 + count * off**2
        found["scale_off"] = np.sqrt(squares.sum(0))
        for name in DOTS:  # one rank's, or the sum if each holds a part
            of_all = np.where(self.alike, lines[name], 0.0).sum(0)
            found[name] = np.where(found["partial"], of_all, found[name])
        return found


def _winners(rows: Table, bounds: Array, max_rows: int | None) -> Index:
    """Return the rows of each layer with the smallest keys, below the bounds."""
    if max_rows is not None:
        order = np.lexsort((rows["key"], rows["layer"]))
        layer = rows["layer"][order]
        more = order[_places(layer) == max_rows]
        at = rows["layer"][more]
        bounds[at] = np.minimum(bounds[at], rows["key"][more])
    return np.flatnonzero(rows["key"] < bounds[rows["layer"]])


def _places(ordered: Index) -> Index:
    """Return the place of each number among those that equal it."""
    found: Index = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
    return found


def _evenly(layer: Index, rank: Index, sizes: Array, generator: np.random.Generator) -> Index:
    """Return indices of entries such that each rank's share is proportional to its size.

    Args:
        layer: the layer of each entry, in order.
        rank: the rank of each.
        sizes: of every layer in every rank, (ranks, layers).
        generator: random generator.
    """
    counts = np.zeros_like(sizes)
    np.add.at(counts, (rank, layer), 1)
    least = np.where(sizes > 0, counts / sizes, np.inf).min(0, initial=np.inf)
    most = np.ceil(np.where(np.isfinite(least), least, 1.0) * sizes)
    of = layer * len(sizes) + rank
    order = np.lexsort((generator.random(len(of)), of))
    return np.sort(order[_places(of[order]) < most[rank[order], layer[order]]])


def _attainable(sums: StepSums, layer: int) -> float:
    line, numbers = sums.layers[layer], torch.from_numpy(sums.of("ceilings", layer)["sum"].copy())
    groups, width = int(line["ceiling_groups"]), int(line["ceiling_width"])
    gram, cross = numbers[: groups * width**2], numbers[groups * width**2 : -1]
    sizes = groups, width, -1
    return float(attainable_cosine(gram.view(sizes), cross.view(sizes), numbers[-1].sqrt()))


def _add_common(sums: StepSums, ranks: _Ranks, of_row: Index) -> None:
    """Estimate φ_r·Σ_k φ_k of every row over all ranks from the ranks' own sums.

    Only the sum of other ranks' rows is known: a row's product with them is taken to be that with
    its own rank's rows, and all are shifted so that their total over all rows is right.

    Args:
        sums: the merged numbers, of which `common` is replaced.
        ranks: the ranks.
        of_row: the rank of each row.
    """
    told = {int(lines["layer"][0, 0]): lines["sum"] for lines in ranks.by_rank("features")}
    sums.layers["has_common"] &= np.isin(np.arange(len(sums.paths)), [*told])
    for i in np.flatnonzero(sums.layers["has_common"]).tolist():
        at = slice(*np.searchsorted(sums.rows["layer"], (i, i + 1)))
        rows, own = sums.rows[at], np.flatnonzero(ranks.counts[:, i])
        of = [ranks.each(f"common_{name}", 0.0)[own, i] for name in ("active", "seen", "squares")]
        count, seen, squares = of
        features, total = told[i], ranks.each("total", 0.0)[own, i]
        active = total * np.where(seen > 0, count / seen, 0.0)
        means = np.where(count[:, None] > 0, features / count[:, None], 0.0)
        alone = ((features**2).sum(1) - squares) / (count * (count - 1))
        alone = np.where(count > 1, alone, (means**2).sum(1))
        mean = active @ means
        across = mean @ mean - (active**2 * (means**2).sum(1)).sum()
        within = (active * (active - 1) * alone)[active > 1].sum()
        is_active = rows["G_G"] != 0
        n_all, n = active.sum(), is_active.sum()
        pairs = (across + within) / (n_all * (n_all - 1)) if n_all > 1 else 0.0
        own_squares = rows["length"] ** 2
        factors = np.where(count > 1, (n - 1) / (count - 1), 0.0)
        products = (rows["common"] - own_squares) * factors[np.searchsorted(own, of_row[at])]
        products += own_squares
        whole = pairs * n * (n - 1) + own_squares[is_active].sum()
        rows["common"] = products + (whole - products[is_active].sum()) / max(n, 1)
