"""Gains during an optimizer's step, and only then: no other scheduler ever sees them."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from torch.optim import Optimizer

from adiv_monitor.max_lr.optimizers import couples_decay

Group = dict[str, Any]
_OURS = ("params", "lr", "weight_decay")

# By id of an optimizer, what scales its steps, as long as that is neither closed nor gone.
_scaling: "WeakValueDictionary[int, ScaledSteps]" = WeakValueDictionary()


class ScaledSteps:
    """Splits the optimizer's groups by layer when a step begins, and puts them back when it ends.

    Where a step is interrupted, they are put back when the next one begins, or when the state of
    the optimizer is asked for or loaded.

    Args:
        optimizer: the optimizer.
        layers: id of a parameter → its layer.
        compensate_decay: divide weight decay by the gain where rate × decay is what decays.

    Raises:
        ValueError: another one scales its steps, or the optimizer trains none of the layers.
    """

    def __init__(
        self, optimizer: Optimizer, layers: Mapping[int, str], *, compensate_decay: bool
    ) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if held.isdisjoint(layers):
            raise ValueError(
                f"MaxLRScheduler(optimizer=…): {type(optimizer).__name__} trains no weight of the "
                f"model's layers ({', '.join(list(dict.fromkeys(layers.values()))[:4])}), expected "
                "the optimizer of this very model"
            )
        self._optimizer = optimizer
        self._layers = layers
        self._compensate = compensate_decay
        self._whole: list[Group] | None = None
        self._split: list[tuple[Group, list[Group]]] = []

    def claim(self) -> None:
        """Be the one that scales the optimizer's steps, until `close`."""
        if id(self._optimizer) in _scaling:
            raise ValueError(
                f"MaxLRScheduler: another one scales the steps of this "
                f"{type(self._optimizer).__name__} already, and their factors would multiply: "
                "expected close() of that one first, or mode='monitor'"
            )
        _scaling[id(self._optimizer)] = self

    def close(self) -> None:
        """Scale no more steps. Can be repeated."""
        self.end()
        if _scaling.get(id(self._optimizer)) is self:
            del _scaling[id(self._optimizer)]

    def begin(self, gains: Mapping[str, float]) -> None:
        """Let the coming step take these factors of the rates."""
        self.end()  # a step that raised has ended without saying so
        if all(gain == 1 for gain in gains.values()):
            return
        self._whole = self._optimizer.param_groups
        self._split = [(group, self._parts(group, gains)) for group in self._whole]
        self._optimizer.param_groups = [part for _, parts in self._split for part in parts]

    def end(self) -> None:
        """The groups are what they were, with what the optimizer has noted in them."""
        if self._whole is None:
            return
        self._optimizer.param_groups = self._whole
        for group, parts in self._split:
            noted = {key: value for key, value in parts[0].items() if key not in _OURS}
            group.update(noted)
        self._whole, self._split = None, []

    def _parts(self, group: Group, gains: Mapping[str, float]) -> list[Group]:
        by_gain: dict[float, list[Any]] = {}
        for parameter in group["params"]:
            gain = gains.get(self._layers.get(id(parameter), ""), 1.0)
            by_gain.setdefault(gain, []).append(parameter)
        if not by_gain:
            return [group]
        return [self._part(group, gain, held) for gain, held in by_gain.items()]

    def _part(self, group: Group, gain: float, parameters: Sequence[Any]) -> Group:
        part = {**group, "params": list(parameters), "lr": group["lr"] * gain}
        if (
            self._compensate
            and "weight_decay" in group
            and not couples_decay(self._optimizer, group)
        ):
            part["weight_decay"] = group["weight_decay"] / gain
        return part
