"""Layers grouped by the block of the network that holds them, according to their paths."""

from collections.abc import Iterable, Mapping
from itertools import takewhile

MOST_BLOCKS = 8


def blocks(paths: Iterable[str], most: int = MOST_BLOCKS) -> dict[str, tuple[str, ...]]:
    """Group layers into blocks: name of the block → its layers, in the network's order.

    A block that holds a large part of the layers is split into the blocks inside it, as long as
    there are no more than `most` in all. Numbered blocks that are too many are merged into ranges:
    "encoder.0-5", "encoder.6-11". A block of one layer has the layer's name.

    >>> list(blocks(["stem", "net.0.conv", "net.0.norm", "net.1.conv", "net.1.norm"], most=3))
    ['stem', 'net.0', 'net.1']
    """
    layers = tuple(paths)
    order = {layer: i for i, layer in enumerate(layers)}
    found = {"": layers}
    whole: set[str] = set()  # blocks that can't be split
    while large := [n for n, b in found.items() if len(b) > 2 * len(order) / most and len(b) > 1]:
        large = [name for name in large if name not in whole]
        if not large:
            break
        name = max(large, key=lambda name: len(found[name]))
        parts = _parts(name, found[name])
        room = most - len(found) + 1
        if len(parts) > room:
            parts = _ranges(name, parts, room)
        if len(parts) > room or list(parts) == [name]:
            whole.add(name)
        else:
            del found[name]
            found |= parts
    named = {b[0] if len(b) == 1 else name or "all": b for name, b in found.items() if b}
    return dict(sorted(named.items(), key=lambda pair: order[pair[1][0]]))


def _parts(name: str, layers: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Split a block by the next component of its layers' paths; a range by its first component."""
    stem = name.rpartition(".")[0] if _is_range(name) else name
    depth = len(stem.split(".")) if stem else 0
    parts: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        part = ".".join(layer.split(".")[: depth + 1])
        parts[part] = (*parts.get(part, ()), layer)
    return parts


def _is_range(name: str) -> bool:
    first, dash, last = name.rpartition(".")[2].partition("-")
    return bool(dash) and first.isdigit() and last.isdigit()


def _ranges(
    name: str, parts: Mapping[str, tuple[str, ...]], room: int
) -> dict[str, tuple[str, ...]]:
    """Merge neighbouring blocks with numbers as names into as many ranges as there is room for."""
    stem = name.rpartition(".")[0] if _is_range(name) else name
    numbered = [part for part in parts if part.rpartition(".")[2].isdigit()]
    others = {part: layers for part, layers in parts.items() if part not in numbered}
    room -= len(others)
    if room < 2 or len(numbered) < 2:
        return dict(parts)
    found: dict[str, tuple[str, ...]] = {}
    for i in range(room):
        some = numbered[i * len(numbered) // room : (i + 1) * len(numbered) // room]
        if some:
            first, last = (part.rpartition(".")[2] for part in (some[0], some[-1]))
            label = first if first == last else f"{first}-{last}"
            found[f"{stem}.{label}" if stem else label] = tuple(
                layer for part in some for layer in parts[part]
            )
    return {**found, **others}


def common_stem(paths: Iterable[str]) -> str:
    """Return the common prefix up to a dot: "model." of "model.a" and "model.b.c"."""
    pieces = [path.split(".")[:-1] for path in paths]
    same = takewhile(lambda level: len(set(level)) == 1, zip(*pieces, strict=False))
    return "".join(f"{level[0]}." for level in same)
