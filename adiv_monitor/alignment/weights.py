"""The weights of a model in one forward pass, and the positions of layers' matrices in them."""

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
from adiv_monitor.capture.weights.pieces import Strides, memory_of, whole_of
from adiv_monitor.capture.weights.shards import Standing
from adiv_monitor.features.features import BlockFeatures, DenseFeatures, Features
from adiv_monitor.features.uses import Use


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter, or a tensor that a parametrization or a forward pass computes from parameters.

    Attributes:
        path: path of the module that holds it.
        module: the module.
        name: name of its attribute in the module; if the forward pass computes the weight, that of
            its largest parameter.
        value: the present value.
        parameters: the parameter that is the weight, or those from which it is computed.
        number: number, from 1, among the weights of one name that a forward pass computes; 0 for
            all other weights.
    """

    path: str
    module: nn.Module
    name: str
    value: Tensor
    parameters: tuple[nn.Parameter, ...]
    number: int = 0

    @property
    def full_name(self) -> str:
        """The weight's name in the model."""
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def key(self) -> str:
        """Unique name of the weight, also in saved states."""
        return f"{self.full_name}~{self.number}" if self.number else self.full_name

    @cached_property
    def stand_in(self) -> Tensor:
        """The weight for use in rules: it requires a gradient, even if the pass runs without."""
        return self.value.detach().requires_grad_()

    def view(self, tensor: Tensor) -> Tensor:
        """Return the view of the stand-in that corresponds to a view of the weight."""
        if tensor is self.value:
            return self.stand_in
        with torch.enable_grad():  # so that autograd knows it as a view of a trained tensor
            return self.stand_in.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class Weights:
    """Look-up of a model's weights by the memory in which they lie.

    Args:
        model: the model, with buffers and parametrizations already set up for the pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._by_memory: dict[int, list[Weight]] = defaultdict(list)
        self._sharded: dict[int, Weight] = {}  # by id of the parameter
        self._standing = Standing(model)
        self._made: dict[str, list[Tensor]] = defaultdict(list)  # distinct values by name
        for path, module in named_modules(model):
            for weight in _own_weights(path, module):
                if type(weight.value.data) is Tensor:
                    self._by_memory[memory_of(weight.value)].append(weight)
                else:  # the module's forward will unshard it
                    self._sharded[id(weight.value)] = weight

    def of(self, tensor: Tensor, running: str = "") -> Weight | None:
        """Return the weight in whose memory a tensor lies; None if there is none.

        Among tied weights, that of the running module is preferred.

        Args:
            tensor: the tensor.
            running: path of the running module.
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
        """Record a tensor that the forward pass computed from weights and constants alone."""
        if not value.is_floating_point() or self.of(value) is not None:
            return
        lead = max(of, key=lambda weight: weight.value.numel())
        parameters = dict.fromkeys(p for weight in of for p in weight.parameters)
        made = self._made[lead.full_name]
        alike = (i for i, other in enumerate(made, 1) if torch.equal(other, value))
        number = next(alike, len(made) + 1)  # a module called again computes the same value
        if number > len(made):
            made.append(value)
        self._by_memory[memory_of(value)].append(
            Weight(lead.path, lead.module, lead.name, value, tuple(parameters), number=number)
        )


def _own_weights(path: str, module: nn.Module) -> Iterator[Weight]:
    if isinstance(module, parametrize.ParametrizationList):
        return  # its parameters are used only through the weight that it computes
    for name, parameter in module._parameters.items():
        if parameter is not None and not is_lazy(parameter) and parameter.is_floating_point():
            yield Weight(path, module, name, parameter, (parameter,))
    if parametrize.is_parametrized(module):
        for name, makers in module.parametrizations.items():  # type: ignore[operator, union-attr]
            value = getattr(module, name)
            yield Weight(path, module, name, value, tuple(makers.parameters()))


def _holds(weight: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor begins within a weight, given that they share storage."""
    within = int(tensor.storage_offset()) - int(weight.storage_offset())
    return tensor.dtype == weight.dtype and 0 <= within < max(1, weight.numel())


@dataclass(frozen=True)
class Matrices:
    """The matrices of a layer in a weight: all of it, a part, or its entries in another order.

    Attributes:
        strides: the view of the weight that holds the matrices.
        count: number of matrices: groups, or blocks of which each row uses one.
        fan_in: n, number of features of a row.
        transposed: the view is (fan-in, outputs).
        entries: positions of the matrices' entries in the view; None: in its order.
    """

    strides: Strides
    count: int
    fan_in: int
    transposed: bool = False
    entries: Tensor | None = field(default=None, compare=False)

    @classmethod
    def of(cls, use: Use, features: Features, weight: Tensor) -> "Matrices":
        """Return the matrices by which a use multiplies its features.

        Args:
            use: the use.
            features: the features of some of its rows.
            weight: the weight in whose memory `use.weight` lies.
        """
        assert use.weight is not None
        shaped, entries = use.shaped(use.weight.detach()), None
        strides = Strides.between(shaped, weight)
        if memory_of(shaped) != memory_of(weight):
            # Numbered from 1, since `shaped` may change the sign.
            places = torch.arange(1, use.weight.numel() + 1, dtype=torch.float64)
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
        """Number of outputs of all groups and blocks together."""
        return prod(self.strides.size) // self.fan_in

    @property
    def lines(self) -> int:
        """Number of rows of `fan_in` numbers; broadcast ones count once."""
        sizes = zip(self.strides.size, self.strides.stride, strict=True)
        return prod(size for size, stride in sizes if stride or size == 1) // self.fan_in

    def matrices(self, weight: Tensor) -> Tensor:
        """Return (count, outputs, fan-in) from a tensor with the weight's memory layout."""
        size, stride, offset = self.strides.size, self.strides.stride, self.strides.offset
        view = weight.as_strided(size, stride, weight.storage_offset() + offset)
        if self.entries is not None:
            view = view.reshape(-1)[self.entries.to(weight.device)]
        if self.transposed:
            return view.t()[None]
        return view.reshape(self.count, -1, self.fan_in)
