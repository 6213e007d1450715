"""The weights of a model in one forward pass, and where in them the matrices of a layer lie."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from adiv_monitor.capture.selection import named_modules
from adiv_monitor.capture.weights.pieces import Strides
from adiv_monitor.capture.weights.shards import Standing
from adiv_monitor.capture.weights.tape import memory_of, whole_of
from adiv_monitor.features.features import DenseFeatures, Features
from adiv_monitor.features.functions.blocks import BlockFeatures
from adiv_monitor.features.uses import Use


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter, or what a parametrization or a forward pass makes of parameters.

    Attributes:
        path: of the module that holds it.
        module: that module.
        name: of its attribute there; of one that the forward pass makes, of its largest parameter.
        value: what it is now.
        parameters: that it is, or is made of.
        number: of those that a forward pass makes of one name, its place, from 1; 0 of all others.
    """

    path: str
    module: nn.Module
    name: str
    value: Tensor
    parameters: tuple[nn.Parameter, ...]
    number: int = 0

    @property
    def full_name(self) -> str:
        """Its name in the model."""
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def key(self) -> str:
        """Tells weights apart, in saved states too."""
        return f"{self.full_name}~{self.number}" if self.number else self.full_name

    @cached_property
    def stand_in(self) -> Tensor:
        """The weight as rules know one: a gradient flows back to it, whatever the pass records."""
        return self.value.detach().requires_grad_()

    def view(self, tensor: Tensor) -> Tensor:
        """A view of the weight, as one of its stand-in."""
        if tensor is self.value:
            return self.stand_in
        with torch.enable_grad():  # else it would not be known as a view of what is trained
            return self.stand_in.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class Weights:
    """Finds the weights of a model by the memory in which they lie.

    Args:
        model: the model; buffers and parametrizations are as they will be in the pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._by_memory: dict[int, list[Weight]] = defaultdict(list)
        self._sharded: dict[int, Weight] = {}  # by id of the parameter
        self._standing = Standing(model)
        self._made: dict[str, list[Tensor]] = defaultdict(list)  # those that differ, by name
        for path, module in named_modules(model):
            for weight in _own_weights(path, module):
                if type(weight.value.data) is Tensor:
                    self._by_memory[memory_of(weight.value)].append(weight)
                else:  # a module's forward will bring the whole
                    self._sharded[id(weight.value)] = weight

    def of(self, tensor: Tensor, running: str = "") -> Weight | None:
        """The weight in whose memory a tensor lies; of tied ones that of the running module.

        Args:
            tensor: the tensor.
            running: path of the module that runs.
        """
        if not tensor.is_floating_point():
            return None
        found = [w for w in self._by_memory.get(memory_of(tensor), ()) if _holds(w.value, tensor)]
        if not found:
            whole = whole_of(tensor)
            sharded = self._sharded.get(id(self._standing.of(whole)))
            if sharded is None:
                return None
            found = [Weight(sharded.path, sharded.module, sharded.name, whole, sharded.parameters)]
            self._by_memory[memory_of(whole)] += found
        return next((weight for weight in found if weight.path == running), found[0])

    def is_made(self, value: Tensor, of: Sequence[Weight]) -> None:
        """The forward pass has made a tensor of weights and constants alone."""
        if not value.is_floating_point() or self.of(value) is not None:
            return
        lead = max(of, key=lambda weight: weight.value.numel())
        parameters = dict.fromkeys(p for weight in of for p in weight.parameters)
        made = self._made[lead.full_name]
        alike = (i for i, other in enumerate(made, 1) if torch.equal(other, value))
        number = next(alike, len(made) + 1)  # a module that is called again makes it again
        if number > len(made):
            made.append(value)
        self._by_memory[memory_of(value)].append(
            Weight(*(lead.path, lead.module, lead.name, value, tuple(parameters)), number)
        )


def _own_weights(path: str, module: nn.Module) -> Iterator[Weight]:
    if isinstance(module, parametrize.ParametrizationList):
        return  # what it holds is used through what it makes
    for name, parameter in module._parameters.items():
        if parameter is not None and not is_lazy(parameter) and parameter.is_floating_point():
            yield Weight(path, module, name, parameter, (parameter,))
    if parametrize.is_parametrized(module):
        for name, makers in module.parametrizations.items():  # type: ignore[operator, union-attr]
            value = getattr(module, name)
            yield Weight(path, module, name, value, tuple(makers.parameters()))


def _holds(weight: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor begins within a weight in the same memory."""
    within = int(tensor.storage_offset()) - int(weight.storage_offset())
    return tensor.dtype == weight.dtype and 0 <= within < max(1, weight.numel())


@dataclass(frozen=True)
class Matrices:
    """The matrices of a layer in a weight: all of it, a part, or its entries in another order.

    Attributes:
        strides: the view of the weight in which they lie.
        count: how many there are: groups, or blocks of which each row uses one.
        fan_in: n, how many features a row has.
        transposed: the view is (fan-in, outputs).
        entries: places of their entries in that view; None: in its order.
    """

    strides: Strides
    count: int
    fan_in: int
    transposed: bool = False
    entries: Tensor | None = field(default=None, compare=False)

    @classmethod
    def of(cls, use: Use, features: Features, weight: Tensor) -> "Matrices":
        """Those that a use multiplies its features by.

        Args:
            use: the use.
            features: some of its features.
            weight: the weight in whose memory `use.weight` lies.
        """
        assert use.weight is not None
        shaped, entries = use.shaped(use.weight.detach()), None
        strides = Strides.between(shaped, weight)
        if memory_of(shaped) != memory_of(weight):
            places = torch.arange(1, use.weight.numel() + 1, dtype=torch.float64)  # with a sign
            entries = use.shaped(places.view(use.weight.shape)).abs().long().reshape(-1) - 1
            strides = Strides.between(use.weight, weight)
        transposed = isinstance(features, DenseFeatures) and features.transposed
        if isinstance(features, DenseFeatures):
            assert features.phi is not None
            _, count, fan_in = features.phi.shape
        elif isinstance(features, BlockFeatures):
            count, fan_in = features.count, features.phi.shape[1]
        else:  # a table: a matrix whose rows are looked up
            count, fan_in = 1, shaped.numel() // len(shaped)
        return cls(strides, count, fan_in, transposed, entries)

    @property
    def outputs(self) -> int:
        """How many outputs there are, of all groups and blocks together."""
        return prod(self.strides.size) // self.fan_in

    @property
    def lines(self) -> int:
        """How many lines of `fan_in` numbers there are, those that are repeated counted once."""
        sizes = zip(self.strides.size, self.strides.stride, strict=True)
        return prod(size for size, stride in sizes if stride or size == 1) // self.fan_in

    def matrices(self, weight: Tensor) -> Tensor:
        """(count, outputs, fan-in), of a tensor that lies in memory as the weight does."""
        size, stride, offset = self.strides.size, self.strides.stride, self.strides.offset
        view = weight.as_strided(size, stride, weight.storage_offset() + offset)
        if self.entries is not None:
            view = view.reshape(-1)[self.entries.to(weight.device)]
        if self.transposed:
            return view.t()[None]
        return view.reshape(self.count, -1, self.fan_in)
