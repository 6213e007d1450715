"""Kernel launches of a measured and of a plain step, and the code that makes them.

On a GPU a measured step of small layers costs what it launches, not what it computes; a count is
exact and the same on every machine. A `TorchDispatchMode` counts every operation that reaches a
backend, in the forward pass, the backward pass, the optimizer and the monitor. Excluded are
operations that move no data:

- views and aliases, by their schema (view, t, select, split, as_strided, expand, detach, ...), and
  those without such a schema: `_unsafe_view`, `lift_fresh`, `_reshape_alias`, `t_` and the like;
- memory without contents: every `empty`, `resize_`, `set_`;
- queries: sizes, strides, devices, `_local_scalar_dense` (it is a copy to the host), and the
  profiler's marks.

A `_foreach` operation counts once, as it is launched on a GPU (on a CPU it is a loop inside). Every
step of the run is measured: one begins with the report of the step before. The gradients of all
layers are checked in the second step, and in the sixth that of one layer alone, as in most steps.
Copies from the device to the host are counted too, on any machine: see `Launches`. `max_rows` has
its default.

Known before: ResNet-18 dispatched 5,342 in a measured step and 321 in a plain one (without the 28
additions to BatchNorm's counters and to shared gradients), other models 121 to 126 per layer.
Goals: ResNet-18 at most 2,000; MobileNetV3-small, ConvNeXt-T and GPT at most 40 per layer; one
copy to the host per report. In bfloat16 by autocast: GPT-2 small at most 750 beyond a plain step,
ViT-B/16 600, ResNet-50 1,100.

    python tests/benchmarks/launches.py [--models resnet18 gpt] [--where [N]] [--write FILE]
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from models import GPT, Task, Trainer, ViT, images, text, vision
from models import TASKS as SMALL
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from visible import visible
from write_up import heading, parser, table, write

import adiv_monitor
from adiv_monitor.features import rows
from adiv_monitor.step import flat, vectors

# Transformers a quarter as wide, which changes no number: bfloat16 is slow on a CPU.
NARROW = {
    "gpt2": Task(
        "GPT-2 small, bfloat16",
        lambda: GPT(vocabulary=50257, length=1024, width=192, depth=12, heads=12),
        lambda: text(50257, 1, 256),
        is_half=True,
    ),
    "vit-b": Task(
        "ViT-B/16, bfloat16",
        lambda: ViT(side=224, patch=16, channels=3, width=192, depth=12, heads=12, packed=True),
        lambda: images(2, 3, 224, 224),
        is_half=True,
    ),
    "resnet50": Task(
        "ResNet-50, bfloat16",
        lambda: vision.resnet50(num_classes=10),
        lambda: images(3, 3, 224, 224),
        is_half=True,
    ),
}
TASKS = SMALL | NARROW

# Bounds set beforehand: kernels of the whole measured step, or the monitor's own per layer.
EXPECTED = {
    "resnet18": "≤ 2,000",
    "mobilenet": "≤ 40 per layer",
    "convnext": "≤ 40 per layer",
    "gpt": "≤ 40 per layer",
    "gpt2": "≤ 750 beyond plain",
    "resnet50": "≤ 1,100 beyond plain",
    "vit-b": "≤ 600 beyond plain",
}

CHECKED, UNCHECKED = 1, 5  # steps before one in which the gradients are checked, and are not

_MONITOR = Path(adiv_monitor.__file__).parent
# Places that pass a mode's intercepted calls on to torch: the calls belong to their callers.
_HANDED_ON = ("capture/forwards.py:opened", "capture/watch.py:__torch_function__")
_aten = torch.ops.aten
_NO_KERNEL = {
    *(_aten._unsafe_view, _aten.lift_fresh, _aten._reshape_alias),
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.empty_permuted),
    *(_aten.new_empty_strided, _aten.resize_, _aten.set_, _aten._local_scalar_dense),
    *(_aten.t_, _aten.transpose_, _aten.squeeze_, _aten.unsqueeze_, _aten.as_strided_),
    _aten.detach_,
}
# Operations that wait until the device has given the host a value.
_WAIT = {
    *(_aten._local_scalar_dense, _aten.nonzero, _aten.equal, _aten.masked_select, _aten._unique2),
    *(_aten.unique_consecutive, _aten.unique_dim, _aten.bincount),
}
_TO_HOST = {"cpu", "tolist", "numpy", "__array__"}


class Launches:
    """Counts of the launches inside its `with` block, in this thread and its backward passes.

    Copies to the host are recognised by the tensors' provenance, so that they can be counted on a
    CPU. Tensors computed from `resident` ones (the model's, its data) would lie on the device;
    others, such as rows chosen by a generator on the host, would not. `.cpu()`, `.item()`,
    `bool(...)`, `.tolist()`, `nonzero` and the like of a resident tensor are copies, whose results
    lie on the host. A copy into a buffer that was made on the host beforehand is not recognised.

    Attributes:
        operators: kernels by name.
        places: kernels by the nearest file:function of adiv_monitor on the stack; "" where there
            is none: the training step itself.
        copies: copies to the host by file:function of adiv_monitor.
    """

    def __init__(self, resident: Iterable[Tensor] = ()) -> None:
        self.operators: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self._resident: set[int] = set()
        self._contexts = (visible(), _Methods(self), _Dispatched(self))
        for tensor in resident:
            self._settle(tensor)

    @property
    def kernels(self) -> int:
        return self.operators.total()

    def __enter__(self) -> "Launches":
        for context in self._contexts:
            context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)

    def dispatched(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        packet = func.overloadpacket
        on_device = any(self._is_resident(t) for t in inputs)
        if on_device and (packet in _WAIT or _by_mask(packet, inputs)):
            self.copies[_place()] += 1
        if on_device:
            for tensor in outputs:
                self._settle(tensor)
        if is_kernel(func):
            self.operators[str(packet)] += 1
            self.places[_place()] += 1

    def to_host(self, tensor: Tensor) -> None:
        if self._is_resident(tensor):
            self.copies[_place()] += 1
            self._resident.discard(tensor.untyped_storage()._cdata)

    def _is_resident(self, tensor: Tensor) -> bool:
        return _has_memory(tensor) and tensor.untyped_storage()._cdata in self._resident

    def _settle(self, tensor: Tensor) -> None:
        if _has_memory(tensor) and not self._is_resident(tensor):
            storage = tensor.untyped_storage()
            self._resident.add(storage._cdata)
            weakref.finalize(storage, self._resident.discard, storage._cdata)


class _Dispatched(TorchDispatchMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._launches.dispatched(func, tensors((args, kwargs)), tensors(result))
        return result


class _Methods(TorchFunctionMode):
    """Mode for methods that read a CPU tensor without dispatching an operation."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        # Not `.to(other.device)`, which moves nothing where both lie on one device.
        given = (*args[1:], *(kwargs or {}).values())
        moved = name == "to" and any(isinstance(x, str) and x == "cpu" for x in given)
        if (name in _TO_HOST or moved) and isinstance(args[0], Tensor):
            self._launches.to_host(args[0])
        return func(*args, **(kwargs or {}))


def tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided


def is_kernel(func: Any) -> bool:
    """Whether an operation moves data."""
    is_none = func.namespace == "profiler" or func.overloadpacket in _NO_KERNEL
    return not is_none and not _is_view(func)


def _is_view(func: Any) -> bool:
    """Whether all results are aliases of the arguments, and none is written."""
    returns = [result.alias_info for result in func._schema.returns]
    return bool(returns) and all(alias is not None and not alias.is_write for alias in returns)


def _by_mask(packet: Any, inputs: list[Tensor]) -> bool:
    """Whether an operation indexes by a mask, and so must know how many entries that keeps."""
    return packet in (_aten.index, _aten.index_put_) and any(
        t.dtype == torch.bool for t in inputs[1:]
    )


def _place() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if path.is_relative_to(_MONITOR):
            place = f"{path.relative_to(_MONITOR)}:{name}"
            if place not in _HANDED_ON:
                return place
        frame = frame.f_back
    return ""


def resident(model: nn.Module, optimizer: torch.optim.Optimizer, *data: Tensor) -> list[Tensor]:
    """Return all tensors that live on the device between steps."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    state = tensors([dict(held) for held in optimizer.state.values()])
    return [*model.parameters(), *model.buffers(), *gradients, *state, *data]


def count(
    step: Callable[[], object],
    resident: Iterable[Tensor] = (),
    begins: Callable[[Launches], None] = lambda _: None,
) -> Launches:
    """Count the launches of one call of `step`; `begins` is called with the empty count first."""
    with Launches(resident) as launches:
        begins(launches)
        step()
    return launches


def count_task(
    task: Task,
    monitor: dict[str, object] | None = None,
    begins: Callable[[Launches], None] = lambda _: None,
    after: int = 2,
) -> tuple[Launches, int]:
    """Count a step of a task after some others; return the count, and the number of layers."""
    # A CPU takes parts that fit into its cache, in as many operations; a GPU takes the whole.
    with (
        mock.patch.object(rows, "SLOW", ()),
        mock.patch.object(vectors, "STACKED", 2**62),
        mock.patch.object(flat, "CACHED", flat.CHUNK),
    ):
        trainer = Trainer(task, monitor)
        for _ in range(after):
            trainer.step()
        held = resident(trainer.model, trainer.optimizer, trainer.x, trainer.y)
        launches = count(trainer.step, held, begins)
        trainer.close()
    measured = trainer.monitor and trainer.monitor.latest
    return launches, len(measured.layers) if measured else 0


def main(given: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", choices=TASKS)
    made.add_argument(
        "--where", nargs="?", type=int, const=20, help="also the N places that launch most"
    )
    arguments = made.parse_args(given)
    torch.set_num_threads(arguments.threads)
    chosen = arguments.models or (["mlp"] if arguments.quick else list(TASKS))
    lines = heading("Kernels that a measured step launches", __file__, arguments)
    rows, places = [], []
    for name in chosen:
        title = TASKS[name].title
        plain, _ = count_task(TASKS[name])
        checked, layers = count_task(TASKS[name], {"every_n_steps": 1}, after=CHECKED)
        measured, _ = count_task(TASKS[name], {"every_n_steps": 1}, after=UNCHECKED)
        counts = [measured.kernels, checked.kernels]
        kernels = [f"{plain.kernels:,}", *(f"{n:,}" for n in counts), layers]
        per_layer = [f"{(n - plain.kernels) / layers:.1f}" for n in counts]
        copies = measured.copies.total()
        rows.append((title, *kernels, *per_layer, copies, EXPECTED.get(name, "")))
        most = measured.places.most_common(arguments.where or 0)
        places += [(title, place or "(the training step)", n) for place, n in most]
    lines += table(
        (
            *("model", "plain", "measured", "with the check", "layers", "extra per layer"),
            *("with the check", "copies to the host", "goal"),
        ),
        rows,
    )
    if places:
        lines += table(("model", "place", "kernels"), places)
    print(write(lines, arguments.write))


if __name__ == "__main__":
    main()
