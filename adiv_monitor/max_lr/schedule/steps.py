"""Gains that apply during an optimizer's step only, so that no other scheduler sees them."""

from collections.abc import Mapping
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer

from adiv_monitor.max_lr.optimizers import couples_decay

Group = dict[str, Any]
_OURS = ("params", "lr", "weight_decay")

_scaled: WeakSet[Optimizer] = WeakSet()  # optimizers whose steps are scaled


class ScaledSteps:
    """Splits the optimizer's groups by layer when a step begins, and restores them when it ends.

    They are restored after a step that raises, too: hooks do not run then, so `step` is wrapped.

    Args:
        optimizer: the optimizer.
        layers: layers by id of a parameter.

    Raises:
        ValueError: another object scales its steps, or the optimizer trains none of the layers.
    """

    def __init__(self, optimizer: Optimizer, layers: Mapping[int, str]) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if held.isdisjoint(layers):
            raise ValueError(
                f"MaxLRScheduler(optimizer=…): {type(optimizer).__name__} trains no weight of the "
                f"model's layers ({', '.join(list(dict.fromkeys(layers.values()))[:4])}), expected "
                "the optimizer of this very model"
            )
        self._optimizer = optimizer
        self._layers = layers
        self._whole: list[Group] | None = None
        self._split: list[tuple[Group, list[Group]]] = []
        self._step = step = optimizer.step

        # As a method with the attributes of `step`, which torch's schedulers look for.
        @wraps(step)
        def restoring(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            finally:
                self.end()

        self._restoring = MethodType(restoring, optimizer)

    def claim(self) -> None:
        """Claim the optimizer: no other object may scale its steps until `close`."""
        if self._optimizer in _scaled:
            raise ValueError(
                f"MaxLRScheduler: another one scales the steps of this "
                f"{type(self._optimizer).__name__} already, and their factors would multiply: "
                "expected close() of that one first, or mode='monitor'"
            )
        _scaled.add(self._optimizer)
        self._optimizer.step = self._restoring  # type: ignore[method-assign]

    def close(self) -> None:
        """Stop scaling steps; a second call does nothing."""
        self.end()
        if vars(self._optimizer).get("step") is self._restoring:
            self._optimizer.step = self._step  # type: ignore[method-assign]
            _scaled.discard(self._optimizer)

    def begin(self, gains: Mapping[str, float]) -> None:
        """Apply these factors of the rates to the step that begins."""
        self.end()  # the previous step may have raised where another wrapper went around `step`
        if all(gain == 1 for gain in gains.values()):
            return
        self._whole = self._optimizer.param_groups
        self._split = [(group, self._parts(group, gains)) for group in self._whole]
        self._optimizer.param_groups = [part for _, parts in self._split for part in parts]

    def end(self) -> None:
        """Restore the groups, and keep what the optimizer has stored in them."""
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
        # Where decay is rate × decay, so that a larger rate does not raise it.
        follows = "weight_decay" in group and not couples_decay(self._optimizer, group)
        parts: list[Group] = []
        for gain, held in by_gain.items():
            parts.append({**group, "params": held, "lr": group["lr"] * gain})
            if follows:
                parts[-1]["weight_decay"] = group["weight_decay"] / gain
        return parts or [group]
