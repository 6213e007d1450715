"""Where in a model's weights the matrix of a layer lies, and which weight a function was given."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from adiv_monitor.alignment.uses import WeightUse, blocks
from adiv_monitor.capture.selection import named_modules

_PARTS = ("q", "k", "v")


@dataclass(frozen=True)
class Slot:
    """A matrix, or one per group, inside a weight: all of it, a slice or its transpose.

    Attributes:
        weight: name of the weight in the model, without what wrappers add.
        kind: "linear", "convolution" or "embedding".
        size: of the view of the weight that is used.
        stride: of that view.
        offset: of that view.
        groups: independent blocks.
        transposed: the view is (fan-in, outputs).
    """

    weight: str
    kind: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    groups: int
    transposed: bool

    @property
    def fan_in(self) -> int:
        """How many inputs an output has; of an embedding, how many rows."""
        if self.transposed or self.kind == "embedding":
            return self.size[0]
        fan_in = 1
        for extent in self.size[1:]:
            fan_in *= extent
        return fan_in

    @property
    def fan_out(self) -> int:
        """How many outputs there are; of an embedding, how wide it is."""
        return self.size[1] if self.transposed or self.kind == "embedding" else self.size[0]

    def matrices(self, weight: Tensor) -> Tensor:
        """(groups, outputs, fan-in) of the weight."""
        view = weight.as_strided(self.size, self.stride, weight.storage_offset() + self.offset)
        return blocks(view, self.groups, transposed=self.transposed)


@dataclass(frozen=True, eq=False)
class Held:
    """A weight as it is now.

    Attributes:
        path: of the module that holds it.
        name: of its attribute there.
        module: that module.
        tensor: its value, which a parametrization may have made.
    """

    path: str
    name: str
    module: nn.Module
    tensor: Tensor

    @property
    def full_name(self) -> str:
        """Its name in the model."""
        return f"{self.path}.{self.name}" if self.path else self.name


class Weights:
    """Finds the weights of a model by the memory in which they lie."""

    def __init__(self) -> None:
        self._by_memory: dict[int, list[Held]] = defaultdict(list)
        self._names: dict[str, Held] = {}

    def add(self, path: str, module: nn.Module) -> None:
        """Take in what a module itself holds, as it is now."""
        for name, tensor in _own_weights(module):
            held = Held(path, name, module, tensor)
            known = self._names.get(held.full_name)
            if known is not None and known.tensor is tensor:
                continue
            self._names[held.full_name] = held
            self._by_memory[_memory(tensor)].append(held)

    def holders(self, tensor: Tensor) -> list[Held]:
        """The weights, one tied to the other, in whose memory a tensor lies; the newest first."""
        start = tensor.storage_offset()
        return [
            held
            for held in reversed(self._by_memory.get(_memory(tensor), []))
            if held.tensor.storage_offset()
            <= start
            < held.tensor.storage_offset() + max(1, held.tensor.numel())
        ]


def slots_of(use: WeightUse, held: Held) -> list[tuple[str, Slot]]:
    """Names and slots of the layers that one use is: three where projections are packed."""
    offset = int(use.weight.storage_offset() - held.tensor.storage_offset())
    size, stride = tuple(use.weight.shape), use.weight.stride()
    slot = Slot(held.full_name, use.kind, size, stride, offset, use.groups, use.transposed)
    if not (isinstance(held.module, nn.MultiheadAttention) and held.name == "in_proj_weight"):
        return [(_layer_name(held), slot)]
    width, row = held.module.embed_dim, stride[0]
    first = offset // (width * row)
    return [
        (
            f"{held.path}.{_PARTS[first + i]}".lstrip("."),
            Slot(
                *(held.full_name, use.kind, (width, size[1]), stride),
                offset + i * width * row,
                groups=1,
                transposed=False,
            ),
        )
        for i in range(size[0] // width)
    ]


def weights_of(model: nn.Module) -> Weights:
    """All weights of a model."""
    weights = Weights()
    for path, module in named_modules(model):
        weights.add(path, module)
    return weights


def makers_of(module: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters that a weight is, or is made of by parametrizations."""
    if parametrize.is_parametrized(module, name):
        return list(module.parametrizations[name].parameters())  # type: ignore[index, union-attr]
    parameter = module._parameters[name]
    return [] if parameter is None else [parameter]


def _layer_name(held: Held) -> str:
    if held.name == "weight":
        return held.path
    if isinstance(held.module, nn.MultiheadAttention) and held.name[1:] == "_proj_weight":
        return f"{held.path}.{held.name[0]}".lstrip(".")
    return held.full_name


def _own_weights(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    if isinstance(module, parametrize.ParametrizationList):
        return  # what it holds is used through what it makes
    for name, parameter in module._parameters.items():
        # Of sharded ones a module's forward will bring the whole.
        if parameter is not None and not is_lazy(parameter) and type(parameter.data) is Tensor:
            yield name, parameter
    if parametrize.is_parametrized(module):
        for name in module.parametrizations:  # type: ignore[union-attr]
            yield name, getattr(module, name)


def _memory(tensor: Tensor) -> int:
    memory: int = tensor.untyped_storage()._cdata
    return memory
