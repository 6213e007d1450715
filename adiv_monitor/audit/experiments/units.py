"""The activation functions of a model: dead units and saturated entries."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, Watched
from adiv_monitor.audit.experiments.flat import ends_of_function, ends_of_module
from adiv_monitor.diagnosis.record import UnitStatistics

# Spatial dimensions behind functions whose units are in dim 1; others have units in the last dim.
_CONVOLUTION = {f"conv{t}{k}d": k for k in (1, 2, 3) for t in ("", "_transpose")}
_NORMS = ("batch_norm", "group_norm", "instance_norm")
_LAST = (
    *("linear", "layer_norm", "rms_norm", "matmul", "bmm", "addmm", "einsum", "embedding"),
    *("multi_head_attention_forward", "scaled_dot_product_attention"),
)
# Arguments that may follow the input by position.
_BY_PLACE = {
    "softplus": ("beta", "threshold"),
    "threshold": ("threshold", "value"),
    "hardtanh": ("min_val", "max_val"),
    "elu": ("alpha",),
    "celu": ("alpha",),
    "clamp": ("min", "max"),
    "clip": ("min", "max"),
    "clamp_min": ("min",),
}


class Units:
    """Accumulates statistics of the inputs of activation functions during `watching`.

    Functions are named by the path of the innermost module that they run in. Functions outside of
    modules (in the loss) and inside fused functions (recurrent layers) are not observed. Units are
    the channels behind a convolution or batch normalisation, and the last dimension elsewhere.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Modules that are one function as a whole, with its name and its flat ends.
        self._whole = {
            path: ends
            for path, module in model.named_modules()
            if (ends := ends_of_module(type(module).__name__)) is not None
        }
        self._sums: dict[str, _Sums | None] = {}  # None: the number of units differs between calls
        self._batches = 0
        self._begin()

    def statistics(self) -> dict[str, UnitStatistics]:
        """Return the statistics of each function by path; `path#2` is a module's second one."""
        return {key: sums.statistics() for key, sums in self._sums.items() if sums is not None}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe one batch that runs through the model in this context."""
        with ExitStack() as hooks:
            for path, module in self._model.named_modules():
                if self._whole_around(path) == path:
                    enter = partial(self._enter, path)
                    hooks.enter_context(module.register_forward_pre_hook(enter))
            self._begin()
            hooks.enter_context(Watched(self._model, change=self._call))
            yield
        self._batches += 1

    def _begin(self) -> None:
        self._calls: Counter[str] = Counter()
        self._places: int | None = None

    def _whole_around(self, path: str) -> str | None:
        """Return the outermost module that is one function and holds a module, or is it itself."""
        return next((w for w in self._whole if w in ("", path) or path.startswith(f"{w}.")), None)

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args:
            self._look(path, *self._whole[path], args[0])

    def _call(self, call: Call) -> Any:
        """Handle a function that is about to run."""
        name, args = call.name, call.args
        if call.path is None or self._whole_around(call.path) is not None:
            return NotImplemented
        if name in _CONVOLUTION:
            self._places = _CONVOLUTION[name]
        elif name in _NORMS and args and isinstance(args[0], Tensor):
            self._places = args[0].ndim - 2
        elif name in _LAST:
            self._places = 0
        else:
            given = dict(zip(_BY_PLACE.get(name.strip("_"), ()), args[1:], strict=False))
            ends = ends_of_function(name, {**given, **call.kwargs})
            if ends is not None:
                self._look(call.path, *ends, call.argument(0, "input"))
        return NotImplemented

    @torch.no_grad()
    def _look(self, path: str, name: str, ends: tuple[float, float], x: object) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.ndim:
            return
        self._calls[path] += 1
        key = path if self._calls[path] == 1 else f"{path}#{self._calls[path]}"
        places = max(x.ndim - 2, 0) if self._places is None and x.ndim > 3 else self._places or 0
        unit = x.ndim - 1 - places if x.ndim > places else x.ndim - 1
        flat = x <= ends[0]
        if ends[1] != inf:
            flat |= x >= ends[1]
        # A vector holds one value for each sample, of a single unit.
        flat = flat[None] if x.ndim == 1 else flat.movedim(unit, 0).flatten(1)
        sums = self._sums.setdefault(key, _Sums(name, len(flat)))
        if sums is not None and not sums.add(name, flat, self._batches):
            self._sums[key] = None


class _Sums:
    """Accumulated statistics of one function."""

    def __init__(self, name: str, units: int) -> None:
        self._name = name
        self._awake = torch.zeros(units, dtype=torch.bool)
        self._flat = 0
        self._entries = 0
        self._batches: set[int] = set()

    def add(self, name: str, flat: Tensor, batch: int) -> bool:
        """Add a call's entries (units, rows); return False if its function or units differ."""
        self._batches.add(batch)
        if name != self._name or len(flat) != len(self._awake):
            return False
        self._awake |= ~flat.all(1).cpu()
        self._flat += int(flat.count_nonzero())
        self._entries += flat.numel()
        return True

    def statistics(self) -> UnitStatistics:
        """Return the statistics of all calls."""
        return UnitStatistics(
            function=self._name,
            units=len(self._awake),
            dead=int((~self._awake).sum()),
            saturated=self._flat / max(self._entries, 1),
            batches=len(self._batches),
        )
