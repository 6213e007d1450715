"""What a measured step shows about the whole model: what is not trained, and what was undone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.selection import elements, named_modules, paths_of_parameters, trainable
from adiv_monitor.capture.weights.shards import is_shard, part_of
from adiv_monitor.maths.sums import Array, StepSums
from adiv_monitor.rerun.surroundings import version
from adiv_monitor.step.earlier_weights import chosen, sampled
from adiv_monitor.step.run_history import RunHistory
from adiv_monitor.step.training import Training
from adiv_monitor.step.transfer import Flags


class WholeModel:
    """What a measured step does not train of a model, and how far earlier steps were undone.

    It reads the model as the optimizer's step begins.

    Args:
        training: the training.
        history: the run history; what this step shows is recorded there.
        capture: the capture of this step, which is finished.
        flags: takes numbers for the host.
    """

    def __init__(
        self, training: Training, history: RunHistory, capture: Capture, flags: Flags
    ) -> None:
        self._model, self._history, self._capture = training.model, history, capture
        self._sample = chosen(capture.selection.parameters)  # whose weights are compared
        flags["began"] = [sampled(self._sample)] if self._sample else []
        held, every = set(map(id, training.trained())), trainable(self._model)
        self._unheld = [p for p in every if p.grad is not None and id(p) not in held]
        found = capture.cut_off()
        if found is not None:
            history.cut_off = set(map(id, found))
        of_history = (p for p in capture.selection.parameters if id(p) in history.cut_off)
        self._cut_off = [p for p in of_history if p.requires_grad and p.grad is None]
        self._versions = {p: version(p) for p in (*self._unheld, *self._cut_off)}
        plain = [part_of(p) for p in self._versions if is_shard(p) or type(p.data) is Tensor]
        if len(plain) == len(self._versions) > 0:  # writes through .data change no version
            flags["untrained"] = [*torch._foreach_norm(plain)]

    def updated(self, flags: Flags) -> None:
        """Read the model as the optimizer's step ends; add numbers for the host to `flags`."""
        flags["stepped"] = [sampled(self._sample)] if self._sample else []

    def facts(
        self, sums: StepSums, flags: Mapping[str, Sequence[Array]], *, comes_late: bool
    ) -> dict[str, Any]:
        """Return for the report what this step showed, and record it in the run history.

        Args:
            sums: the numbers of the layers.
            flags: the numbers of the step on the host.
            comes_late: whether a gradient came after the step, which had none.
        """
        found = self._capture.layers.found
        zeroed = [found[sums.paths[i]] for i in np.flatnonzero(sums.was_zeroed)]
        removed = [*self._capture.removed, *(p for layer in zeroed for p in layer.parameters)]
        if comes_late:
            removed = [*self._capture.selection.parameters]
        removed = [p for p in removed if not is_shard(p)]  # other ranks may hold the gradient
        is_as_before = self._are_as_before(flags.get("untrained", ()))
        cut_off = [p for p in self._cut_off if is_as_before[id(p)] is not False]
        unheld = [p for p in self._unheld if is_as_before[id(p)]]
        paths, not_held = paths_of_parameters(self._model) if unheld else {}, Counter[str]()
        for p in unheld:
            not_held[paths[id(p)]] += elements(p)
        given, of_weights = self._history.weights, (flags.get("began"), flags.get("stepped"))
        began, stepped = (of[0] if of else None for of in of_weights)
        every = [*trainable(self._model)]
        returned = None if began is None else given.returned(self._sample, began, stepped)
        return {
            "trainable": sum(map(elements, every)),
            "frozen": _frozen(self._model) if every else {},
            "not_held": dict(not_held),
            "cut_off": self._capture.selection.by_module(cut_off),
            "removed": self._capture.selection.by_module(removed),
            "weights_returned": returned,
        }

    def _are_as_before(self, norms: Sequence[Array]) -> dict[int, bool | None]:
        """Return which parameters nothing has changed since the last measured step; None: unknown.

        Other code may train what the optimizer does not: another optimizer, or a moving average.
        """
        known = [*map(float, norms)] or [0.0] * len(self._versions)
        pairs = zip(self._versions.items(), known, strict=True)
        now = {id(p): (number, norm) for (p, number), norm in pairs}
        before, self._history.untrained = self._history.untrained, now
        return {key: before[key] == seen if key in before else None for key, seen in now.items()}


def _frozen(model: nn.Module) -> dict[str, int]:
    """Return the outermost modules that hold frozen parameters alone, with their elements."""
    parameters = list(model.parameters())
    trains = {id(p) for p in parameters if p.requires_grad or p.grad is not None}
    if len(trains) == len(parameters):
        return {}
    found, inside = dict[str, int](), set[nn.Module]()
    for path, module in named_modules(model):  # parents first
        if module not in inside and trains.isdisjoint(map(id, module.parameters())):
            inside.update(module.modules())
            found[path] = sum(map(elements, module.parameters()))
    return {path: count for path, count in found.items() if count}
