"""What measured steps show about the whole model: what is not trained, and what was undone."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.selection import (
    elements,
    named_modules,
    paths_of_parameters,
    trainable,
    unregistered,
)
from adiv_monitor.capture.weights.shards import is_shard, part_of
from adiv_monitor.maths.sums import Array, StepSums
from adiv_monitor.step.training import Training
from adiv_monitor.step.transfer import Flags, HostFlags

# Of so many parameters so many entries each; and the number of earlier steps that are kept.
_PARAMETERS, _ENTRIES, _STEPS = 8, 32, 32


class WholeModel:
    """What the measured steps of a run do not train of a model, and how far steps were undone.

    It reads the model as the optimizer's step begins, and as it ends.

    Args:
        training: the training.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._model = training, training.model
        self._weights = EarlierWeights()
        self._known_cut_off = set[int]()  # ids of the parameters, when that was last known
        # By id, the parameters that the optimizer did not step in the last measured step, as it
        # does not hold them or they had no gradient, with their norm as it began.
        self._untrained: dict[int, float] = {}
        self._hidden = unregistered(training.model)
        self._capture: Capture | None = None

    def begins(self, capture: Capture, flags: Flags) -> None:
        """Read the model as the optimizer's step begins; add numbers for the host to `flags`.

        Args:
            capture: the capture of this step, which is finished.
            flags: takes the numbers.
        """
        self._capture = capture
        self._sample = chosen(capture.selection.parameters)  # whose weights are compared
        flags["began"] = [sampled(self._sample)] if self._sample else []
        held = set(map(id, self._training.trained()))
        self._every = [*trainable(self._model)]
        leaves = {id(p): p for p in (*self._every, *(x for _, x in self._hidden.values()))}
        self._unheld = [p for p in leaves.values() if p.grad is not None and id(p) not in held]
        found = capture.cut_off()
        if found is not None:
            self._known_cut_off = set(map(id, found))
        known = (p for p in capture.selection.parameters if id(p) in self._known_cut_off)
        self._cut_off = [p for p in known if p.requires_grad and p.grad is None]
        watched = [*self._unheld, *self._cut_off]
        self._watched = [*map(id, watched)]
        plain = [part_of(p) for p in watched if is_shard(p) or type(p.data) is Tensor]
        if len(plain) == len(watched) > 0:
            flags["untrained"] = [*torch._foreach_norm(plain)]

    def ends(self, flags: Flags) -> None:
        """Read the model as the optimizer's step ends."""
        if "began" in flags:
            flags["stepped"] = [sampled(self._sample)] if self._sample else []

    def facts(
        self, capture: Capture, sums: StepSums, flags: HostFlags, *, comes_late: bool
    ) -> dict[str, Any]:
        """Return for the report what a step showed; nothing if it had no final gradient.

        Args:
            capture: the capture of the step.
            sums: the numbers of the layers.
            flags: the numbers of the step on the host.
            comes_late: whether a gradient came after the step, which had none.
        """
        last, self._capture = self._capture, None  # it is not kept until the next step
        if capture is not last:
            return {}
        found = capture.layers.found
        zeroed = [found[sums.paths[i]] for i in np.flatnonzero(sums.was_zeroed)]
        removed = [*capture.removed, *(p for layer in zeroed for p in layer.parameters)]
        if comes_late:
            removed = [*capture.selection.parameters]
        removed = [p for p in removed if not is_shard(p)]  # other ranks may hold the gradient
        # Other code may train what the optimizer does not: another optimizer, or a moving average.
        norms = map(float, flags.get("untrained", ()))
        before, self._untrained = self._untrained, dict(zip(self._watched, norms, strict=False))
        same = {key for key, norm in self._untrained.items() if before.get(key) == norm}
        cut_off = [p for p in self._cut_off if id(p) in same or id(p) not in before]
        unheld = [p for p in self._unheld if id(p) in same]
        paths, not_held = paths_of_parameters(self._model) if unheld else {}, Counter[str]()
        for p in unheld:
            not_held[paths.get(id(p)) or self._hidden[id(p)][0]] += elements(p)
        began, stepped = (next(iter(flags.get(name, ())), None) for name in ("began", "stepped"))
        earlier, every = self._weights, self._every
        returned = None if began is None else earlier.returned(self._sample, began, stepped)
        return {
            "trainable": sum(map(elements, {*every, *unheld})),
            "frozen": _frozen(self._model) if every else {},
            "not_held": dict(not_held),
            "cut_off": capture.selection.by_module(cut_off),
            "removed": capture.selection.by_module(removed),
            "weights_returned": returned,
        }


def _frozen(model: nn.Module) -> dict[str, int]:
    """Return the outermost modules that hold frozen parameters alone, with their elements."""
    of_modules = [p for module in model.modules() for p in module._parameters.values()]
    parameters = {p for p in of_modules if p is not None}
    trains = {id(p) for p in parameters if p.requires_grad or p.grad is not None}
    if len(trains) == len(parameters):
        return {}
    found, inside = dict[str, int](), set[nn.Module]()
    for path, module in named_modules(model):  # parents first
        if module not in inside and trains.isdisjoint(map(id, module.parameters())):
            inside.update(module.modules())
            found[path] = sum(map(elements, module.parameters()))
    return {path: count for path, count in found.items() if count}


# --- weights of earlier steps -----------------------------------------------------------------


class EarlierWeights:
    """A few weights as earlier measured steps began, the older the fewer steps.

    A weight that comes back is seen in any sample of entries, so a small one suffices.
    """

    def __init__(self) -> None:
        self._of: tuple[int, ...] = ()
        self._points: list[Array] = []  # of each step the weights as it began, and as it left them

    @np.errstate(all="ignore")  # weights may not be finite
    def returned(self, of: Sequence[Tensor], began: Array, stepped: Array | None) -> float | None:
        """Return max_i 1 − ‖θ − θ_i‖ / max_j ‖θ_j − θ_i‖ over earlier steps i < j, within [0, 1].

        The θ_j are the weights as measured steps between them began, and as these steps left them.

        Args:
            of: the parameters.
            began: θ, their sampled entries as this step began.
            stepped: the same after its update.

        Returns:
            The result; None if fewer than two earlier steps are known, or no weight moved.
        """
        keys = tuple(id(parameter) for parameter in of)
        if self._of != keys:
            self._of, self._points = keys, []
        shares = np.zeros(0)
        if len(self._points) > 1:
            points = np.concatenate(self._points)
            ways = np.linalg.norm(points[:, None] - points, axis=2)
            farthest = np.fmax.reduce(np.triu(ways), axis=1)
            shares = 1 - (np.linalg.norm(points - began, axis=1) / farthest)[farthest > 0]
            shares = shares[shares == shares]
        if len(self._points) == _STEPS:
            self._points = self._points[::2]
        self._points.append(np.stack([began] if stepped is None else [began, stepped]))
        return min(max(float(shares.max()), 0.0), 1.0) if shares.size else None


def chosen(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return a few parameters, evenly spread over the network, all on one device."""
    alike = [p for p in parameters if p.device == parameters[0].device]
    count = min(_PARAMETERS, len(alike))
    return [p for i in range(count) if part_of(p := alike[i * len(alike) // count]).numel()]


def sampled(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a copy of a few entries of each of these parameters, always the same."""
    return torch.cat([_few(part_of(p)) for p in parameters])


def _few(tensor: Tensor) -> Tensor:
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    flat = tensor.permute(order).reshape(-1)  # in the order of memory, so that nothing is copied
    return flat[:: -(-len(flat) // _ENTRIES)]
