"""The activation functions of a model: dead units and saturated entries."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, Watched
from adiv_monitor.audit.experiments.flat import ends_of_function
from adiv_monitor.diagnosis.record import UnitStatistics

_NORMS = ("batch_norm", "group_norm", "instance_norm")
_LAST = (
    *("linear", "layer_norm", "rms_norm", "matmul", "bmm", "addmm", "einsum", "embedding"),
    *("multi_head_attention_forward", "scaled_dot_product_attention"),
)
# Class names of modules that compose these functions from tanh and sigmoid, which aren't looked at.
_COMPOSED = re.compile("gelu|silu|swish", re.IGNORECASE)


class Units:
    """Accumulates statistics of the inputs of activation functions during `watching`.

    Functions are named by the path of the innermost module that they run in. Functions outside of
    modules (in the loss) and inside fused functions (recurrent layers) are not observed. Units are
    the channels behind a convolution or batch normalisation, and the last dimension elsewhere.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._composed = {
            path for path, module in model.named_modules()
            if _COMPOSED.search(type(module).__name__)
        }  # fmt: skip
        self._seen: dict[str, list[_Seen]] = defaultdict(list)
        self._batches = 0

    @property
    def fewest_values(self) -> int:
        """The number of values that each unit of any function has got, at least."""
        counts = [sum(x.entries // len(x.awake) for x in seen) for seen in self._seen.values()]
        return min(counts, default=0)

    def statistics(self) -> dict[str, UnitStatistics]:
        """Return the statistics of each function by path; `path#2` is a module's second one.

        Functions whose number of units differs between calls are left out.
        """
        kinds = {
            key: {(x.function, len(x.awake)) for x in seen} for key, seen in self._seen.items()
        }
        return {key: _joined(seen) for key, seen in self._seen.items() if len(kinds[key]) == 1}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe one batch that runs through the model in this context."""
        self._calls: Counter[str] = Counter()
        self._channels: bool | None = None
        with Watched(self._model, change=self._call):
            yield
        self._batches += 1

    def _call(self, call: Call) -> Any:
        """Handle a function that is about to run."""
        x = call.argument(0, "input")
        if call.path is None or not isinstance(x, Tensor):
            return NotImplemented
        if call.name.startswith("conv") or call.name in _NORMS:
            self._channels = x.ndim > 2
        elif call.name in _LAST:
            self._channels = False
        elif not (call.name in ("tanh", "sigmoid") and call.path in self._composed):
            given = dict(zip(("min", "max"), call.args[1:], strict=False))  # of clamps
            ends = ends_of_function(call.name, {**given, **call.kwargs})
            if ends is not None and x.is_floating_point() and x.ndim:
                self._look(call.path, *ends, x)
        return NotImplemented

    @torch.no_grad()
    def _look(self, path: str, name: str, ends: tuple[float, float], x: Tensor) -> None:
        self._calls[path] += 1
        key = path if self._calls[path] == 1 else f"{path}#{self._calls[path]}"
        flat = x <= ends[0]
        if ends[1] != inf:
            flat |= x >= ends[1]
        channels = x.ndim > 3 if self._channels is None else self._channels and x.ndim > 2
        # A vector holds one value for each sample, of a single unit.
        flat = flat[None] if x.ndim == 1 else flat.movedim(1 if channels else -1, 0).flatten(1)
        awake = ~flat.all(1).cpu()
        seen = _Seen(name, awake, int(flat.count_nonzero()), flat.numel(), self._batches)
        self._seen[key].append(seen)


class _Seen(NamedTuple):
    """One call of a function: its units with an entry that is not flat, and its entries."""

    function: str
    awake: Tensor
    flat: int
    entries: int
    batch: int


def _joined(seen: list[_Seen]) -> UnitStatistics:
    """Return the statistics of all calls of a function."""
    awake = torch.stack([x.awake for x in seen]).any(0)
    return UnitStatistics(
        function=seen[0].function,
        units=len(awake),
        dead=int((~awake).sum()),
        saturated=sum(x.flat for x in seen) / max(sum(x.entries for x in seen), 1),
        batches=len({x.batch for x in seen}),
    )
