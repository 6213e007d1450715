"""What in a forward pass is made of the model alone, and of which parameters: all else is data."""

import weakref
from collections.abc import Collection, Iterable

from torch import Tensor, nn

from adiv_monitor.capture.weights.derived import Derived
from adiv_monitor.capture.weights.pieces import Pieces, Source, Strides
from adiv_monitor.capture.weights.tape import Tape, tensors_in, whole_of


class Origin:
    """Follows parameters, buffers and constants through the functions of one step.

    Args:
        model: the model.
        trained: the parameters to measure.

    Attributes:
        tape: the calls that make tensors of parameters.
        pieces: of the parameters.
    """

    def __init__(self, model: nn.Module, trained: Iterable[nn.Parameter]) -> None:
        self._model = model
        self._trained = {id(p): p for p in trained}
        self.pieces = Pieces()
        self.start()

    def start(self) -> None:
        """Know of nothing but what the model holds now."""
        model = self._model
        self.tape = Tape(self._trained, model)
        self._held: dict[int, Tensor] = {id(p): p for p in model.parameters()}
        self._held |= {id(buffer): buffer for buffer in model.buffers()}
        self._buffers = {id(buffer) for buffer in model.buffers()}
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self._expanded: dict[int, weakref.ref[Tensor]] = {}

    def buffer(self, value: object) -> Tensor | None:
        """The buffer of the model that this is, or is a view of; None if it is not."""
        if not isinstance(value, Tensor):
            return None
        base = value if value._base is None else value._base
        return base if id(base) in self._buffers else None

    def of_model(self, value: object) -> bool:
        """Whether it is no data: a parameter, a buffer, a constant, or made of these alone."""
        if id(value) in self._held or not isinstance(value, Tensor):
            return True
        made = self._made.get(id(value))
        if made is not None and made() is value:
            return True
        base = value._base
        return base is not None and not self._is_spent(value) and self.of_model(base)

    def is_trained(self, value: Tensor) -> bool:
        """Whether it depends on a parameter to measure, and on no data."""
        return bool(self.parameters_of(value))

    def parameters_of(self, value: Tensor) -> Collection[int]:
        """Ids of the parameters to measure that it is made of, if of no data."""
        if not value.requires_grad:
            return ()
        if id(value) in self._trained:
            return (id(value),)
        if self._is_spent(value):
            return ()
        whole = whole_of(value)
        return (id(whole),) if id(whole) in self._trained else self.tape.parameters_of(whole)

    def source(self, value: Tensor | None) -> Source | None:
        """Of which parameters it is made, and how; None if of none that are measured.

        Raises:
            Refused: its memory is read as numbers of another type.
        """
        if value is None or not self.is_trained(value):
            return None
        ref = self.tape.ref(value)
        parameter = ref.root.parameter
        view = None if parameter is None else self.pieces.source(value, parameter)
        return view or Derived(ref, self.tape.making_of(ref), self.pieces)

    def remember(self, result: object) -> None:
        """What a function made of the model alone."""
        for tensor in tensors_in(result):
            for known in (tensor, whole_of(tensor)):
                if id(known) not in self._held:
                    self._made[id(known)] = weakref.ref(known)

    def forget(self, tensor: Tensor) -> None:
        """Data was written into it; a buffer stays the model's, unless it leads to parameters."""
        whole = whole_of(tensor)
        for known in (tensor, whole):
            self._made.pop(id(known), None)
            if known.requires_grad and not isinstance(known, nn.Parameter):
                self._held.pop(id(known), None)
        self.tape.forget(whole)

    def spend(self, result: object, *, written: bool) -> None:
        """What a function gave is data now: there was data in it, or a use of it is noted.

        Args:
            result: a tensor, mostly.
            written: it is what the function was given, and wrote to.
        """
        if not isinstance(result, Tensor):
            return
        if written:
            self.forget(result)
        elif result._base is not None:  # a parameter that was expanded
            self._expanded[id(result._base)] = weakref.ref(result._base)

    def _is_spent(self, view: Tensor) -> bool:
        """Whether it shows entries of an expanded parameter again and again."""
        whole = view._base
        if whole is None or id(whole) not in self._expanded:
            return False
        repeats = Strides.between(view, whole).repeats
        return repeats and self._expanded[id(whole)]() is whole
