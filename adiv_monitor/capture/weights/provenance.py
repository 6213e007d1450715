"""The provenance of tensors in a forward pass: computed from the model alone, or data."""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property

from torch import Tensor, nn

from adiv_monitor.capture.weights.derived import Derived
from adiv_monitor.capture.weights.pieces import Pieces, Source, Strides
from adiv_monitor.capture.weights.shards import Standing, is_shard, waiting
from adiv_monitor.capture.weights.tape import Tape, whole_of
from adiv_monitor.capture.world import world_size
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.nested import tensors_in


class _Held:
    """The tensors that a model holds at one time.

    Attributes:
        tape: the calls that compute tensors from its parameters.
        standing: finds unsharded parameters that stand in for sharded ones.
        tensors: its parameters and buffers, and such stand-ins, by id.
        buffers: ids of its buffers.
    """

    def __init__(self, model: nn.Module, trained: Mapping[int, nn.Parameter]) -> None:
        # Equals `model.parameters()` and `model.buffers()` in one traversal of the modules.
        held: dict[int, nn.Parameter] = {}
        buffers: dict[int, Tensor] = {}
        for module in model.modules():
            held.update((id(p), p) for p in module._parameters.values() if p is not None)
            buffers.update((id(b), b) for b in module._buffers.values() if b is not None)
        self.tape = Tape(trained, held.values(), buffers.values())
        self.standing = Standing(model)
        own = {key: p for key, p in held.items() if self.standing.of(p) is None}
        self.tensors: dict[int, Tensor] = {**own, **buffers}
        self.buffers = set(buffers)


class Provenance:
    """Follows parameters, buffers and constants through the functions of one step.

    Args:
        model: the model.
        trained: the parameters to measure.
        pieces: the pieces that are known already.
        is_asked: whether functions are watched, whose arguments are looked up here.

    Attributes:
        pieces: the pieces of the parameters.
        any_apart: whether parameters may be partitioned across ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Iterable[nn.Parameter],
        pieces: Pieces | None = None,
        *,
        is_asked: bool = True,
    ) -> None:
        self._model = model
        self._is_asked = is_asked
        self._trained = {id(p): p for p in trained}
        self.any_apart = world_size() > 1 or any(map(is_shard, self._trained.values()))
        self.pieces = Pieces() if pieces is None else pieces
        self.start()

    def start(self) -> None:
        """Reset to the tensors that the model holds now."""
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self._expanded: dict[int, weakref.ref[Tensor]] = {}
        self._stand_ins: dict[int, nn.Parameter] = {}
        vars(self).pop("_held", None)
        if self._is_asked:  # in a forward pass, other tensors may take the places of these
            _ = self._held

    @cached_property
    def _held(self) -> _Held:
        """The tensors of the model."""
        return _Held(self._model, self._trained)

    @property
    def tape(self) -> Tape:
        """The calls that compute tensors from parameters."""
        return self._held.tape

    def stand_in(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the unsharded parameter used in place of a sharded one; None if it has none."""
        return self._stand_ins.get(id(parameter))

    def waiting(self, parameter: nn.Parameter) -> Callable[[], bool]:
        """Return a check for gradients that are pending; see `shards.waiting`."""
        return waiting(self._model, parameter)

    @property
    def sharded(self) -> Iterable[nn.Parameter]:
        """The sharded parameters with an unsharded one in their place."""
        return [self._trained[key] for key in self._stand_ins]

    def buffer(self, value: object) -> Tensor | None:
        """Return the buffer of the model that a value is or views, or None."""
        if not isinstance(value, Tensor):
            return None
        base = value if value._base is None else value._base
        return base if id(base) in self._held.buffers else None

    def of_model(self, value: object) -> bool:
        """Return whether a value is no data: it depends on the model and constants alone."""
        if id(value) in self._held.tensors or not isinstance(value, Tensor):
            return True
        made = self._made.get(id(value))
        if made is not None and made() is value:
            return True
        base = value._base
        if base is None:
            return self._stands_in(value)
        return not self._is_spent(value) and self.of_model(base)

    def _stands_in(self, value: Tensor) -> bool:
        """Return whether it is used in place of a sharded parameter, and remember it if so."""
        parameter = self._held.standing.of(value)
        if parameter is None:
            return False
        self._held.tensors[id(value)] = value
        if id(parameter) in self._trained:
            assert isinstance(value, nn.Parameter)
            self._trained[id(value)] = parameter
            self._stand_ins[id(parameter)] = value
        return True

    def is_trained(self, value: Tensor) -> bool:
        """Return whether it depends on a parameter to measure and on no data."""
        return bool(self.parameters_of(value))

    def parameters_of(self, value: Tensor) -> Collection[int]:
        """Return ids of the parameters to measure that it depends on, if it depends on no data."""
        if not value.requires_grad:
            return ()
        if self._trained.get(id(value)) is value:
            return (id(value),)
        if isinstance(value, nn.Parameter) and id(value) not in self._held.tensors:
            self._stands_in(value)
        if id(value) in self._trained:
            return (id(self._trained[id(value)]),)
        if self._is_spent(value):
            return ()
        whole = whole_of(value)
        known = self._trained.get(id(whole))
        return self.tape.parameters_of(whole) if known is None else (id(known),)

    def source(self, value: Tensor | None) -> Source | None:
        """Return how a tensor is computed from measured parameters; None if it is not.

        Raises:
            Refused: its memory is read as another dtype, or it is not a contiguous part of a
                sharded parameter.
        """
        if value is None:
            return None
        parameter = self._trained.get(id(value))
        if parameter is not None and parameter is value and value.requires_grad:  # most are
            return self.pieces.whole(parameter)
        if not self.is_trained(value):
            return None
        if is_shard(value) and id(value) not in self._trained:
            raise Refused(
                "its weight is computed from a parameter of which each rank holds a part (tensor "
                "parallelism): only a parameter itself can be all-gathered"
            )
        ref = self.tape.ref(value)
        parameter = ref.root.parameter
        view = None
        if parameter is not None:
            view = self.pieces.source(value, parameter, whole_of(value))
        source = view or Derived(ref, self.tape.making_of(ref), self.pieces)
        for piece in source.pieces:
            lies = piece.view is None or not is_shard(piece.parameter) or piece.contiguous_range
            if is_shard(piece.parameter) and not (source.is_view and lies):
                raise Refused(
                    "its weight is computed from a parameter of which each rank holds a part: "
                    "only a whole parameter, or a contiguous range of one, can be all-gathered"
                )
        return source

    def remember(self, result: object) -> None:
        """Remember a result that was computed from the model alone."""
        for tensor in tensors_in(result):
            for known in (tensor, whole_of(tensor)):
                if id(known) not in self._held.tensors:
                    self._made[id(known)] = weakref.ref(known)

    def forget(self, tensor: Tensor) -> None:
        """Forget a tensor that data was written to; buffers stay unless they lead to parameters."""
        whole = whole_of(tensor)
        for known in (tensor, whole):
            self._made.pop(id(known), None)
            if known.requires_grad and not isinstance(known, nn.Parameter):
                self._held.tensors.pop(id(known), None)
        self.tape.forget(whole)

    def spend(self, result: object, *, written: bool) -> None:
        """Count the result as data from here on: an input was data, or its use is already recorded.

        Args:
            result: the result, usually a tensor.
            written: whether the result is an argument that the function wrote to.
        """
        if not isinstance(result, Tensor):
            return
        if written:
            self.forget(result)
        elif result._base is not None:  # an expanded parameter
            self._expanded[id(result._base)] = weakref.ref(result._base)

    def _is_spent(self, view: Tensor) -> bool:
        """Return whether it is a repeating view of an expanded parameter."""
        whole = view._base
        if whole is None or id(whole) not in self._expanded:
            return False
        repeats = Strides.between(view, whole).repeats
        return repeats and self._expanded[id(whole)]() is whole
