"""What tensors of a forward pass are made of: of outputs of layers, or of the model alone."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from adiv_monitor.capture.weights.tape import memory_of, whole_of

Sources = frozenset[str]  # paths of layers
NONE: Sources = frozenset()


class Lineage:
    """Follows what functions give; what no function was seen to make is data.

    Args:
        model: its parameters and buffers are of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        held = [*model.parameters(), *model.buffers()]
        self._memory = {memory_of(tensor) for tensor in held if type(tensor.data) is Tensor}
        self._made = WeakTensorKeyDictionary()  # tensor → its sources; None: of the model alone

    def of_model(self, value: object) -> bool:
        """Whether it is no data: a parameter, a buffer, a constant, or made of these alone."""
        if not isinstance(value, Tensor):
            return True
        if value in self._made:
            return self._made[value] is None
        return memory_of(value) in self._memory

    def sources(self, tensors: Iterable[Tensor]) -> Sources:
        """The layers of whose outputs any of these is made."""
        made = self._made
        return NONE.union(*(made[tensor] or NONE for tensor in tensors if tensor in made))

    def is_made(self, results: Iterable[Tensor], sources: Sources | None) -> None:
        """A function gave these.

        Args:
            results: what it gave.
            sources: layers; None: they are of the model alone.
        """
        for tensor in results:
            self._made[tensor] = sources

    def is_written(self, tensor: Tensor, sources: Sources) -> None:
        """Data was written into it, and into what it is a view of."""
        whole = whole_of(tensor)
        self._memory.discard(memory_of(tensor))
        self.is_made((tensor, whole), sources | self.sources((tensor, whole)))

    def ends(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """A module has run: what no function was seen to make is made of what it was given."""
        given = list(inputs)
        known = {id(tensor) for tensor in given}
        unseen = [x for x in outputs if id(x) not in known and x not in self._made]
        if unseen:
            self.is_made(unseen, self.sources(given))
