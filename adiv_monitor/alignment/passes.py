"""The probe's forward pass, which changes nothing of the run, and all that weights do in it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from adiv_monitor.alignment.slots import Held, Slot, Weights, slots_of, weights_of
from adiv_monitor.alignment.uses import WeightUse, weight_use
from adiv_monitor.capture.forwards import without_overrides
from adiv_monitor.capture.selection import inside_wrappers, named_modules
from adiv_monitor.rerun.surroundings import untouched

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Found:
    """A layer at one of its calls; it refers to activations and must not be kept.

    Attributes:
        path: what reports call the layer.
        slot: where its weight lies.
        held: the weight that holds it, as it is now.
        use: the call.
        sources: the layers from whose outputs the input is made.
    """

    path: str
    slot: Slot
    held: Held
    use: WeightUse
    sources: frozenset[str]


def run_probe(model: nn.Module, arguments: Arguments, found: Callable[[Found], None]) -> None:
    """One forward pass: evaluation mode, no gradients, no autocast; `found` gets every layer.

    Afterwards random numbers, buffers, modes and attributes of modules are what they were.
    """
    modules = list(model.modules())
    devices = {p.device for p in model.parameters()} | {b.device for b in model.buffers()}
    others = {device for device in devices if device.type not in ("cpu", "meta")}

    def run() -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for device_type in {"cpu", *(device.type for device in others)}:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            stack.enter_context(parametrize.cached())  # so that a weight is one tensor throughout
            _evaluating(modules)
            watch = stack.enter_context(_watching(model, found))
            try:
                with watch:
                    inside_wrappers(model)(*arguments[0], **arguments[1])
            finally:
                for module in modules:
                    reshard = getattr(module, "reshard", None)
                    if callable(reshard):  # FSDP2 would keep the whole weights of its root
                        reshard()

    untouched(modules, others, run)


def _evaluating(modules: list[nn.Module]) -> None:
    """Not by `eval()`, of which some modules have one of their own that does more."""
    copies: dict[int, Tensor] = {}
    for module in modules:
        module.training = False
        for name, buffer in module._buffers.items():
            if buffer is not None:  # written to in place, some state would stay changed
                module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())


@contextmanager
def _watching(model: nn.Module, found: Callable[[Found], None]) -> Iterator["_Watch"]:
    watch = _Watch(weights_of(model), found)
    handles: list[RemovableHandle] = []

    def take_off() -> None:
        for handle in handles:
            handle.remove()

    try:
        for path, module in named_modules(model):
            handles += watch.follow(path, module)
        yield watch
        take_off()
    finally:  # again, where that was interrupted
        take_off()


class _Watch(TorchFunctionMode):
    """Sees every call of a torch function: those by a weight, and what results are made of."""

    def __init__(self, weights: Weights, found: Callable[[Found], None]) -> None:
        super().__init__()
        self._weights = weights
        self._found = found
        self._running: list[str] = []
        self._names: dict[tuple[str, Slot], str] = {}
        self._sources = WeakTensorKeyDictionary()  # tensor → layers whose outputs it is made of

    def follow(self, path: str, module: nn.Module) -> list[RemovableHandle]:
        """Know when a module's forward runs, and what its weights are then."""

        def enter(module: nn.Module, args: object) -> None:
            with torch._C.DisableTorchFunction():
                self._weights.add(path, module)  # sharded ones are whole only now
            self._running.append(path)

        def leave(module: nn.Module, args: object, output: object) -> None:
            self._running.pop()

        return [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave),
        ]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """A call."""
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            with self:
                return without_overrides(func)(*args, **kwargs)
        sources = self._sources_of((args, kwargs))
        result = func(*args, **kwargs)
        use = weight_use(func, args, kwargs, result)
        made = sources if use is None else self._layers(use, sources)
        for tensor in tree_leaves((result, args[:1] if result is None else ())):
            if isinstance(tensor, Tensor) and made:
                self._sources[tensor] = made
        return result

    def _sources_of(self, values: object) -> frozenset[str]:
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
        known = self._sources
        return frozenset().union(*(known[tensor] for tensor in tensors if tensor in known))

    def _layers(self, use: WeightUse, sources: frozenset[str]) -> frozenset[str]:
        """Hand on the layers that a use is; of what results, they are the sources."""
        holders = self._weights.holders(use.weight)
        if not holders:
            return sources  # a product of activations
        running = self._running[-1] if self._running else ""
        held = next((h for h in holders if h.path == running), holders[-1])
        paths = []
        for path, slot in slots_of(use, held):
            name = self._name(path, slot, running)
            paths.append(name)
            self._found(Found(name, slot, held, use, sources))
        return frozenset(paths)

    def _name(self, path: str, slot: Slot, running: str) -> str:
        """The layer's path; of a second use of a weight, with the module that makes it."""
        name = self._names.get((path, slot))
        if name is None:
            name = path if path not in self._names.values() else f"{path}@{running or slot.kind}"
            self._names[path, slot] = name
        return name
