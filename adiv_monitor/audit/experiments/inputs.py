"""Statistics of a model's floating-point inputs, accumulated batch by batch during training."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.training.batches import tensors
from adiv_monitor.diagnosis.record import InputStatistics

# Words in the names of arguments that are not inputs.
_NO_INPUTS = ("label", "target", "mask")


def by_name(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward pass by name; those without a name have a number."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    own = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [*own, *map(str, range(len(own), len(args)))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def changed(
    module: nn.Module, args: Any, kwargs: dict[str, Any], change: Callable[[str, Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward pass, each replaced by `change(name, value)`."""
    new = [change(name, value) for name, value in by_name(module, args, kwargs).items()]
    return tuple(new[: len(args)]), dict(zip(kwargs, new[len(args) :], strict=True))


def is_input(name: str) -> bool:
    """Return whether an argument of this name is an input, not a label, a target or a mask."""
    return not any(word in name.lower() for word in _NO_INPUTS)


def is_list(value: Any) -> bool:
    """Return whether an argument is a list of tensors, which may be the samples themselves."""
    several = isinstance(value, (list, tuple)) and len(value) > 1
    return several and all(isinstance(item, Tensor) for item in value)


def by_feature(x: Tensor) -> Tensor:
    """Return the entries of a batch (N, …) as (entries, features).

    Features are the channels, dim 1, of four or more dimensions, and the last dimension otherwise;
    a vector is of one feature.
    """
    x = x[:, None] if x.ndim == 1 else x
    return (x.movedim(1, -1) if x.ndim >= 4 else x).flatten(0, -2)


class Inputs:
    """Accumulates statistics of the inputs of a model's forward pass.

    Attributes:
        watching: Whether calls count at present.
        ran: Whether the model was called at all.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sums: dict[str, _Sums] = {}
        self.watching = False
        self.ran = False
        self._handle = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def remove(self) -> None:
        """Remove the hook from the model."""
        self._handle.remove()

    def statistics(self) -> dict[str, InputStatistics]:
        """Return the statistics of each floating-point input, by the argument's name or number."""
        return {name: sums.statistics() for name, sums in self._sums.items()}

    @torch.no_grad()
    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.watching:
            return
        self.ran = True
        for name, value in by_name(module, args, kwargs).items():
            if not is_input(name):
                continue
            found = [x for x in tensors(value) if x.is_floating_point() and x.ndim and x.numel()]
            for number, x in enumerate(found):
                key = name if len(found) == 1 else f"{name}.{number}"
                self._sums.setdefault(key, _Sums()).add(x.detach())


class _Sums:
    """Moments of an input's features and of its samples' squared lengths, in double precision.

    Parts are merged by the formulas of Chan, Golub and LeVeque (1979), without differences of large
    sums.
    """

    def __init__(self) -> None:
        self._features: _Moments | None = None
        self._lengths: _Moments | None = None
        self._minimum, self._maximum = math.inf, -math.inf

    def add(self, x: Tensor) -> None:
        """Add a batch (N, …)."""
        x = (x.to_dense() if x.is_sparse else x).cpu().double()
        rows = by_feature(x)
        lengths = x.reshape(len(x), -1).square().sum(1)[:, None]
        self._minimum, self._maximum = _outer(self._minimum, self._maximum, x)
        self._features = _joined(self._features, _Moments.of(rows))
        self._lengths = _joined(self._lengths, _Moments.of(lengths))

    def statistics(self) -> InputStatistics:
        """Return the statistics of all batches."""
        assert self._features is not None and self._lengths is not None
        whole, lengths = self._features.merged(), self._lengths.merged()
        means, stds = self._features.mean, self._features.std()
        return InputStatistics(
            mean=float(whole.mean),
            std=float(whole.std()),
            minimum=self._minimum,
            maximum=self._maximum,
            feature_mean_spread=float(means.std(correction=0)),
            feature_std_ratio=_spread(stds),
            length_cv=_ratio(float(lengths.std()), float(lengths.mean)),
            features=len(means),
        )


@dataclass(frozen=True, eq=False)
class _Moments:
    """The entries per feature, their means, and the sums of their squared deviations."""

    count: int
    mean: Tensor
    squares: Tensor

    @staticmethod
    def of(rows: Tensor) -> "_Moments":
        """Return the moments of rows (entries, features)."""
        mean = rows.mean(0)
        return _Moments(len(rows), mean, (rows - mean).square().sum(0))

    def merged(self) -> "_Moments":
        """Return the moments of all features taken as one."""
        mean = self.mean.mean(0, keepdim=True)
        between = self.count * (self.mean - mean).square().sum(0, keepdim=True)
        return _Moments(
            self.count * len(self.mean), mean, self.squares.sum(0, keepdim=True) + between
        )

    def std(self) -> Tensor:
        """Return the standard deviation of each feature over all its entries."""
        return (self.squares / self.count).sqrt()


def _joined(first: _Moments | None, second: _Moments) -> _Moments:
    """Merge two moments; all features are taken as one if their numbers of features differ."""
    if first is None:
        return second
    if len(first.mean) != len(second.mean):
        first, second = first.merged(), second.merged()
    count = first.count + second.count
    moved = second.mean - first.mean
    squares = first.squares + second.squares
    squares = squares + moved.square() * (first.count * second.count / count)
    return _Moments(count, first.mean + moved * (second.count / count), squares)


def _outer(minimum: float, maximum: float, x: Tensor) -> tuple[float, float]:
    least, most = (float(value) for value in torch.aminmax(x))
    if math.isnan(least) or math.isnan(minimum):
        return math.nan, math.nan
    return min(minimum, least), max(maximum, most)


def _spread(stds: Tensor) -> float:
    """Return the maximum over the median of the nonzero deviations; NaN if all are zero."""
    varying = stds[stds != 0]
    return float(varying.max() / varying.median()) if len(varying) else math.nan


def _ratio(value: float, base: float) -> float:
    if base == 0:
        return math.inf if value > 0 else math.nan
    return value / base
