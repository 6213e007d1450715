"""What is remembered of a model at one point: its weights, and rows of the inputs of its layers."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from adiv_monitor.alignment.passes import Found, run_probe
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.alignment.sharding import Kept
from adiv_monitor.alignment.slots import Held, Slot
from adiv_monitor.capture.selection import is_chosen
from adiv_monitor.capture.weights.shards import peers
from adiv_monitor.errors import AdivError
from adiv_monitor.features.rows import Rows, joined


@dataclass(frozen=True, eq=False)
class Seen:
    """A layer in one forward pass of the probe.

    Attributes:
        held: the weight that holds its matrix.
        slot: where in it.
        rows: its inputs, (rows, groups, fan-in), or tokens (rows,); over all calls.
        shapes: rows that there were in each call.
        predecessors: layers that came before and whose outputs make up the input of any call.
    """

    held: Held
    slot: Slot
    rows: Tensor
    shapes: tuple[tuple[int, ...], ...]
    predecessors: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The reference point.

    Attributes:
        rows: layer → its inputs then.
        weights: name of a weight → a copy.
    """

    rows: Mapping[str, Tensor]
    weights: Mapping[str, Kept]

    @classmethod
    def of(cls, seen: Mapping[str, Seen]) -> "Snapshot":
        """Remember what a forward pass has shown."""
        held = {layer.held.full_name: layer.held for layer in seen.values()}
        return cls(
            {path: layer.rows for path, layer in seen.items()},
            {name: Kept.of(h.module, h.name, h.tensor) for name, h in held.items()},
        )


def look(model: nn.Module, probe: Probe) -> dict[str, Seen]:
    """Run the probe: the chosen layers in the order in which they are first called.

    Raises:
        AdivError: none of them is called, or processes compute some together.
    """
    if peers(model) is not None:
        raise AdivError(
            "Probe: some layers are computed by several processes together (tensor parallelism), "
            "expected layers of which each process has all"
        )
    firsts: dict[str, tuple[Held, Slot]] = {}
    rows: dict[str, list[Tensor]] = {}
    shapes: dict[str, list[tuple[int, ...]]] = {}
    sources: dict[str, set[str]] = {}

    def see(found: Found) -> None:
        path = found.path
        if not is_chosen(path, found.held.module, probe.layers):
            # What feeds it feeds what it feeds.
            passed.setdefault(path, set()).update(found.sources)
            return
        firsts.setdefault(path, (found.held, found.slot))
        sources.setdefault(path, set()).update(found.sources)
        shape = tuple(found.use.shape)
        calls = shapes.setdefault(path, [])
        # A layer's rows depend on nothing but its place among layers and calls.
        chosen = choose(shape, probe, [list(firsts).index(path), len(calls)])
        calls.append(shape)
        device = found.use.weight.device
        taken = found.use.rows(Rows(shape, chosen, device))
        rows.setdefault(path, []).append(taken)

    passed: dict[str, set[str]] = {}
    run_probe(model, probe.arguments, see)
    if not firsts:
        raise AdivError(
            f"Probe: the forward pass of {type(model).__name__} shows no layer to measure, "
            "expected linear layers, convolutions or embeddings that Probe(layers=…) takes"
        )
    order = list(firsts)
    return {
        path: Seen(
            *first,
            joined(rows[path]),
            tuple(shapes[path]),
            # A loop is cut where a layer would come before itself.
            tuple(p for p in order[:place] if p in _reached(sources[path], passed)),
        )
        for place, (path, first) in enumerate(firsts.items())
    }


def choose(
    shape: tuple[int, ...], probe: Probe, key: list[int]
) -> "np.ndarray[tuple[int], np.dtype[np.int64]] | None":
    """Which rows of a call are looked at; None: all."""
    total = int(np.prod(shape))
    if probe.max_rows is None or total <= probe.max_rows:
        return None
    generator = np.random.default_rng([probe.seed, *key])
    return np.sort(generator.choice(total, probe.max_rows, replace=False))


def _reached(sources: set[str], passed: Mapping[str, set[str]]) -> set[str]:
    """The sources, through layers that are left out."""
    found: set[str] = set()
    waiting = list(sources)
    while waiting:
        path = waiting.pop()
        if path in passed:
            waiting += passed[path]
        else:
            found.add(path)
    return found
