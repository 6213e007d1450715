"""The provenance of tensors in a forward pass: computed from the model alone, or data."""

import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from adiv_monitor.capture.weights.computed import NotFollowed, computed, parametrized
from adiv_monitor.capture.weights.computed import part_of as computed_part
from adiv_monitor.capture.weights.pieces import Pieces, Source, whole_of
from adiv_monitor.capture.weights.shards import Standing, is_shard, waiting
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.nested import tensors_in
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.twin import Twin


class _Made(NamedTuple):
    """A tensor that was computed from the model alone.

    Attributes:
        tensor: the tensor.
        keys: ids of the parameters to measure that it depends on.
        source: how it changes with these; None: not known.
        version: the version of its memory when it was made.
    """

    tensor: weakref.ref[Tensor]
    keys: frozenset[int] = frozenset()
    source: Source | None = None
    version: int = 0


class _Held:
    """The tensors that a model holds at one time.

    Attributes:
        standing: finds unsharded parameters that stand in for sharded ones.
        tensors: its parameters and buffers, and such stand-ins, by id.
    """

    def __init__(self, model: nn.Module) -> None:
        # Equals `model.parameters()` and `model.buffers()` in one traversal of the modules.
        held: dict[int, nn.Parameter] = {}
        buffers: dict[int, Tensor] = {}
        for module in model.modules():
            held.update((id(p), p) for p in module._parameters.values() if p is not None)
            buffers.update((id(b), b) for b in module._buffers.values() if b is not None)
        self.standing = Standing(model)
        own = {key: p for key, p in held.items() if self.standing.of(p) is None}
        self.tensors: dict[int, Tensor] = {**own, **buffers}


class Provenance:
    """Follows parameters, buffers and constants through the functions of one step.

    Args:
        model: the model.
        trained: the parameters to measure.
        pieces: the pieces that are known already.
        is_asked: whether functions are watched, whose arguments are looked up here.

    Attributes:
        pieces: the pieces of the parameters.
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
        self.pieces = Pieces() if pieces is None else pieces
        self.start()

    def start(self) -> None:
        """Reset to the tensors that the model holds now."""
        self._made: dict[int, _Made] = {}
        self._own: dict[int, Tensor] = {}  # copies of parameters, see `Twin`
        self._makers: dict[nn.Module, Source] = {}  # the weights of parametrizations
        self._spent: dict[int, weakref.ref[Tensor]] = {}
        self._stand_ins: dict[int, nn.Parameter] = {}
        vars(self).pop("_held", None)
        if self._is_asked:  # in a forward pass, other tensors may take the places of these
            _ = self._held

    @cached_property
    def _held(self) -> _Held:
        """The tensors of the model."""
        return _Held(self._model)

    def stand_in(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the unsharded parameter used in place of a sharded one; None if it has none."""
        return self._stand_ins.get(id(parameter))

    def waiting(self, parameter: nn.Parameter) -> Callable[[], bool]:
        """Return a check for gradients that are pending; see `shards.waiting`."""
        return waiting(self._model, parameter)

    def of_model(self, value: object) -> bool:
        """Return whether a value is no data: it depends on the model and constants alone."""
        if id(value) in self._held.tensors or not isinstance(value, Tensor):
            return True
        if self._made_as(value) is not None:
            return True
        base = value._base
        if base is None:
            return self._stands_in(value)
        return not self._is_spent(value) and self.of_model(base)

    def _made_as(self, value: Tensor) -> _Made | None:
        made = self._made.get(id(value))
        return made if made is not None and made.tensor() is value else None

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
        if known is not None:
            return (id(known),)
        made = self._made_as(value) or self._made_as(whole)
        return () if made is None else made.keys

    def source(self, value: object) -> Source | None:
        """Return how a tensor is computed from measured parameters; None if it is not.

        Raises:
            Refused: its memory is read as another dtype, or it is not a contiguous part of a
                sharded parameter.
        """
        if not isinstance(value, Tensor):
            return None
        parameter = self._trained.get(id(value))
        if parameter is not None and parameter is value and value.requires_grad:  # most are
            return self.pieces.whole(parameter)
        if not self.parameters_of(value):
            return None
        if is_shard(value) and id(value) not in self._trained:
            raise Refused(
                "its weight is computed from a parameter of which each rank holds a part (tensor "
                "parallelism): only a parameter itself can be all-gathered"
            )
        source = self._followed(value)
        if source is None:
            raise NotFollowed(
                "its weight is computed from parameters in a way that can't be followed: only "
                "views, casts, constants, masks and torch's parametrizations are"
            )
        for piece in source.pieces:
            lies = piece.view is None or not is_shard(piece.parameter) or piece.contiguous_range
            if is_shard(piece.parameter) and not (source.is_view and lies):
                raise Refused(
                    "its weight is computed from a parameter of which each rank holds a part: "
                    "only a whole parameter, or a contiguous range of one, can be all-gathered"
                )
        return source

    def _followed(self, value: Tensor) -> Source | None:
        """Return how a tensor changes with the parameters that it depends on; None: not known."""
        whole = whole_of(value)
        parameter = self._trained.get(id(whole))
        if value.dtype != whole.dtype:
            return None
        if parameter is not None:
            found = self.pieces.source(value, parameter, whole)
            return found or computed_part(self.pieces.whole(parameter), value, whole)
        for tensor in (value, whole):
            made = self._made_as(tensor)
            if made is not None and made.source is not None:
                if made.version != tensor._version:
                    return None
                return made.source if tensor is value else computed_part(made.source, value, whole)
        return None

    def remember(
        self, result: object, keys: frozenset[int] = frozenset(), source: Source | None = None
    ) -> None:
        """Remember a result that was computed from the model alone.

        Args:
            result: the result.
            keys: ids of the parameters to measure that it depends on.
            source: how it changes with these, if it is a tensor for which that is known.
        """
        for tensor in tensors_in(result):
            of = keys if tensor.requires_grad else frozenset[int]()
            whole = whole_of(tensor)
            made = self._made_as(whole)
            if made is not None and whole is not tensor:
                self._made[id(whole)] = made._replace(keys=made.keys | of)
            elif id(whole) not in self._held.tensors:
                self._made[id(whole)] = _Made(weakref.ref(whole), of)
            if id(tensor) not in self._held.tensors:
                self._made[id(tensor)] = _Made(weakref.ref(tensor), of, source, tensor._version)

    def computes(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
        trained: Iterable[Tensor],
    ) -> None:
        """Remember the result of a function of weights and constants; see `computed`."""
        keys = frozenset[int]().union(*map(self.parameters_of, trained))
        source = None
        if isinstance(result, Tensor) and result.requires_grad and result.is_floating_point():
            with suppress(Refused):
                source = computed(function, args, kwargs, result, self.source)
        self.remember(result, keys, source)

    def parametrized(self, maker: nn.Module, made: Tensor, random: Randomness) -> None:
        """Remember the weight that a parametrization of torch computed.

        Args:
            maker: the parametrization, whose forward has just run.
            made: the weight.
            random: the state of the random numbers when it began.
        """
        held = [self._trained.get(id(p)) for p in maker.parameters() if p.requires_grad]
        pieces = [self.pieces.of(p) for p in held if p is not None]
        if not pieces or not self.of_model(made) or self._followed(made) is not None:
            return
        source, draws = self._makers.get(maker), not random.is_still(random.now())
        if source is None or draws:
            twin = Twin(maker, ((), {}), random, self._own)
            source = parametrized(maker, pieces, made, twin, draws=draws)
        self._makers[maker] = source
        self.remember(made, frozenset(id(piece.parameter) for piece in pieces), source)

    def spend(self, result: object, *, written: bool) -> None:
        """Count the result as data from here on: an input was data, or its use is already recorded.

        Args:
            result: the result.
            written: whether the result is an argument that the function wrote to.
        """
        for tensor in tensors_in(result):
            if written:  # buffers stay unless they lead to parameters
                for known in (tensor, whole_of(tensor)):
                    self._made.pop(id(known), None)
                    if known.requires_grad and not isinstance(known, nn.Parameter):
                        self._held.tensors.pop(id(known), None)
            elif tensor._base is not None:  # a parameter that was expanded, or a view of that
                self._spent[id(tensor)] = weakref.ref(tensor)

    def _is_spent(self, view: Tensor) -> bool:
        """Return whether it is an expanded parameter, or a view of one."""
        spent = self._spent.get(id(view))
        return spent is not None and spent() is view
