"""The weights of a model in one forward pass, found by the memory in which they lie."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from adiv_monitor.capture.selection import named_modules
from adiv_monitor.capture.weights.shards import Standing, is_shard, part_of, sharded_as
from adiv_monitor.capture.weights.tape import memory_of, whole_of


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter, or a tensor that a parametrization of torch's computes from parameters.

    Attributes:
        path: path of the module that holds it.
        module: the module.
        name: name of its attribute in the module.
        value: the present value, unsharded.
        parameters: the parameter that is the weight, or those from which it is computed.
    """

    path: str
    module: nn.Module
    name: str
    value: Tensor
    parameters: tuple[nn.Parameter, ...]

    @property
    def full_name(self) -> str:
        """The weight's name in the model."""
        return f"{self.path}.{self.name}" if self.path else self.name

    def place(self, view: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the position of a view in the weight: size, stride, offset."""
        offset = int(view.storage_offset()) - int(self.value.storage_offset())
        return tuple(view.size()), view.stride(), offset

    @property
    def _sharded(self) -> Tensor | None:
        parameter = self.module._parameters.get(self.name)
        return parameter if is_shard(parameter) else None

    def present(self) -> Tensor:
        """Return the present value; a sharded weight is all-gathered."""
        if self._sharded is None:
            return self.value.detach()
        whole: Tensor = self._sharded.detach().full_tensor()  # type: ignore[attr-defined]
        return whole

    def kept(self) -> Tensor:
        """Return a copy on the host of the weight, or of this rank's part of a sharded weight."""
        value = self.value.detach() if self._sharded is None else part_of(self._sharded)
        return value.to("cpu", copy=True)

    def whole(self, kept: Tensor) -> Tensor:
        """Return a copy unsharded, on the weight's device; for a part, all ranks have to call."""
        copied = kept.to(self.value.device, non_blocking=True)
        if self._sharded is None:
            return copied
        whole: Tensor = sharded_as(copied, self._sharded).full_tensor()
        return whole


class Weights:
    """Look-up of a model's weights by the memory in which they lie.

    Args:
        model: the model, with buffers and parametrizations already set up for the pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._by_memory: dict[int, list[Weight]] = defaultdict(list)
        self._sharded: dict[int, Weight] = {}  # by id of the parameter
        self._standing = Standing(model)
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
