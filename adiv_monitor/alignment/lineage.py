"""Origins of the tensors in a forward pass: outputs of layers, data, or the model alone."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from adiv_monitor.alignment.weights import Weights
from adiv_monitor.capture.weights.tape import memory_of, whole_of

Sources = frozenset[str]  # paths of layers
NONE: Sources = frozenset()


class Lineage:
    """Record of the layers from which each tensor was computed; unknown tensors are data.

    Args:
        model: the model with its parameters and buffers, which are not data.
        weights: its weights.
    """

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        self._weights = weights
        held = [*model.parameters(), *model.buffers()]
        self._memory = {memory_of(tensor) for tensor in held if type(tensor.data) is Tensor}
        self._made = WeakTensorKeyDictionary()  # tensor → its sources; None: from the model alone

    def of_model(self, value: object) -> bool:
        """Whether a value is no data: parameter, buffer, constant, or computed from these alone."""
        if not isinstance(value, Tensor) or self._weights.of(value) is not None:
            return True
        if value in self._made:
            return self._made[value] is None
        return memory_of(value) in self._memory

    def sources(self, tensors: Iterable[Tensor]) -> Sources:
        """Return the layers from whose outputs any of the tensors was computed."""
        made = self._made
        return NONE.union(*(made[tensor] or NONE for tensor in tensors if tensor in made))

    def is_made(self, results: Iterable[Tensor], sources: Sources | None) -> None:
        """Record the results of a function.

        Args:
            results: the results.
            sources: the layers they come from; None: they were computed from the model alone.
        """
        for tensor in results:
            self._made[tensor] = sources

    def is_written(self, tensor: Tensor, sources: Sources) -> None:
        """Record that data was written into a tensor, and into the base of a view."""
        whole = whole_of(tensor)
        self._memory.discard(memory_of(tensor))
        self.is_made((tensor, whole), sources | self.sources((tensor, whole)))

    def ends(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """Record a module's call: outputs of unknown origin get the sources of its inputs."""
        given = list(inputs)
        known = {id(tensor) for tensor in given}
        unseen = [x for x in outputs if id(x) not in known and x not in self._made]
        if unseen:
            self.is_made(unseen, self.sources(given))
