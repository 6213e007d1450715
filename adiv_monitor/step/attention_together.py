"""Attentions of several processes, made one: of samples, a sample of all."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from adiv_monitor.capture.sampling import draw, winners
from adiv_monitor.maths.sums import Array
from adiv_monitor.step.attention_outcome import Attended
from adiv_monitor.step.part import Part


def attention_together(
    whole: Part, several: Sequence[Part], generator: np.random.Generator
) -> Part:
    """The whole part, with the attentions of all.

    Args:
        whole: what else they have to say together.
        several: the processes' parts.
        generator: the source of chance.
    """
    refused = {path: why for part in several for path, why in part.no_attention.items()}
    attended, attention = {}, {}
    for path in dict.fromkeys(path for part in several for path in part.attended):
        own = [part for part in several if path in part.attended]
        own = [part for part in own if _is_alike(own[0].attention[path], part.attention[path])]
        if path not in refused:
            attended[path] = _attended([part.attended[path] for part in own])
            attention[path] = _joined(
                [part.attention[path] for part in own],
                [part.attended[path].samples for part in own],
                generator,
            )
    return replace(whole, attended=attended, attention=attention, no_attention=refused)


def _is_alike(values: Mapping[str, Array], others: Mapping[str, Array]) -> bool:
    """Whether there are numbers of as many heads in both."""
    return all(values[n].shape[1:] == others[n].shape[1:] for n in values.keys() & others.keys())


def _attended(several: Sequence[Attended]) -> Attended:
    return Attended(
        samples=sum(seen.samples for seen in several),
        precision=max(seen.precision for seen in several),
        no_scale=next((seen.no_scale for seen in several if seen.no_scale), ""),
    )


def _joined(
    several: Sequence[dict[str, Array]], totals: Sequence[int], generator: np.random.Generator
) -> dict[str, Array]:
    """Of samples, as many as there are evenly; of what is no sample's, the worst."""
    seen = [len(values["G_G"]) for values in several]
    draws = [draw(t, n, np.inf, generator) for n, t in zip(seen, totals, strict=True)]
    kept = winners(draws, None)
    names = set.intersection(*(set(values) for values in several))
    pivot = several[0].get("scale_pivot")
    found: dict[str, Array] = {}
    moved = [_around(values, pivot) for values in several]
    for name in names:
        parts = [values[name] for values in moved]
        if parts[0].ndim == 2:
            chosen = (p if k is None else p[k] for p, k in zip(parts, kept, strict=True))
            found[name] = np.concatenate(list(chosen))
        else:
            extreme = min if name == "scale_share" else max
            found[name] = np.array(extreme(float(part) for part in parts))
    return found


def _around(values: dict[str, Array], pivot: Array | None) -> dict[str, Array]:
    """With the scales relative to another number."""
    if pivot is None or "scale_pivot" not in values:
        return values
    off = float(values["scale_pivot"]) - float(pivot)
    count, sums, squares = (values[f"scale_{name}"] for name in ("count", "sum", "square"))
    return values | {
        "scale_pivot": pivot,
        "scale_sum": sums + off * count,
        "scale_square": squares + 2 * off * sums + off**2 * count,
    }
