"""The provenance of tensors in a forward pass: computed from the model alone, or data."""

import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from adiv_monitor.capture.weights.computed import NotFollowed, computed, parametrized
from adiv_monitor.capture.weights.pieces import Pieces, Source, Strides, whole_of
from adiv_monitor.capture.weights.shards import Standing, is_shard, waiting
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.nested import tensors_in
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.twin import Twin


class _Known(NamedTuple):
    """What is known of a tensor. Views that are not data are known by what they view.

    Attributes:
        tensor: the tensor.
        keys: ids of the parameters to measure that it depends on; None: it is data.
        source: how it changes with these; None: not known.
        version: the version of its memory when it was made; None: the model holds it.
    """

    tensor: weakref.ref[Tensor]
    keys: frozenset[int] | None = frozenset()
    source: Source | None = None
    version: int | None = None


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
        trained = [*trained]
        self._trained = dict(zip(map(id, trained), trained, strict=True))
        self.pieces = Pieces() if pieces is None else pieces
        self.start()

    def start(self) -> None:
        """Reset to the tensors that the model holds now."""
        self._own: dict[int, Tensor] = {}  # copies of parameters, see `Twin`
        self._makers: dict[nn.Module, Source] = {}  # the weights of parametrizations
        self._stand_ins: dict[int, nn.Parameter] = {}
        for name in ("_standing", "_known"):
            vars(self).pop(name, None)
        if self._is_asked:  # in a forward pass, other tensors may take the places of these
            _ = self._known

    @cached_property
    def _standing(self) -> Standing:
        return Standing(self._model)

    @cached_property
    def _known(self) -> dict[int, _Known]:
        """What is known, by id of the tensor."""
        known: dict[int, _Known] = {}
        for module in self._model.modules():
            for held in (*module._parameters.values(), *module._buffers.values()):
                if held is not None:
                    known[id(held)] = self._held(held)
        return known

    def _held(self, tensor: Tensor) -> _Known:
        """Return what is known of a tensor that the model holds now."""
        stood_for = self._standing.of(tensor)
        key = id(tensor if stood_for is None else stood_for)
        parameter = self._trained.get(key)
        if parameter is None:
            return _Known(weakref.ref(tensor))
        if stood_for is not None:
            assert isinstance(tensor, nn.Parameter)
            self._stand_ins[key] = tensor
        source = self.pieces.whole(parameter)
        return _Known(weakref.ref(tensor), frozenset((key,)), source)

    def stand_in(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the unsharded parameter used in place of a sharded one; None if it has none."""
        return self._stand_ins.get(id(parameter)) if self._stand_ins else None

    def waiting(self, parameter: nn.Parameter) -> Callable[[], bool]:
        """Return a check for gradients that are pending; see `shards.waiting`."""
        return waiting(self._model, parameter)

    def _look_up(self, value: Tensor) -> _Known | None:
        """Return what is known of a tensor, or of the tensor that it is a view of."""
        known = self._known.get(id(value))
        if known is not None and known.tensor() is value:
            return known
        if value._base is not None:
            return self._look_up(value._base)
        if isinstance(value, nn.Parameter) and self._standing.of(value) is not None:
            known = self._known[id(value)] = self._held(value)
            return known
        return None

    def of_model(self, value: object) -> bool:
        """Return whether a value is no data: it depends on the model and constants alone."""
        if not isinstance(value, Tensor):
            return True
        known = self._look_up(value)
        return known is not None and known.keys is not None

    def parameters_of(self, value: Tensor) -> Collection[int]:
        """Return ids of the parameters to measure that it depends on, if it depends on no data."""
        known = self._look_up(value) if value.requires_grad else None
        return () if known is None or known.keys is None else known.keys

    def source(self, value: object) -> Source | None:
        """Return how a tensor is computed from measured parameters; None if it is not.

        Raises:
            Refused: its memory is read as another dtype, or it is not a contiguous part of a
                sharded parameter.
        """
        if not isinstance(value, Tensor) or not self.parameters_of(value):
            return None
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
        known = self._look_up(whole)
        if known is None or known.source is None or value.dtype != whole.dtype:
            return None
        if known.version not in (None, whole._version):
            return None
        if value is whole:
            return known.source
        strides = Strides.between(value, whole)
        if known.version is None:
            return self.pieces.view(known.source.pieces[0].parameter, strides)
        return known.source.then(strides, is_view=not strides.repeats)

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
            whole = whole_of(tensor)
            known, of = self._look_up(whole), keys if tensor.requires_grad else frozenset[int]()
            if known is None or (whole is tensor and known.version is not None):
                how = source if whole is tensor else None
                self._known[id(whole)] = _Known(weakref.ref(whole), of, how, whole._version)
            elif known.version is not None:  # it was written to
                self._known[id(whole)] = known._replace(keys=of.union(known.keys or ()))

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
        """Remember the weight that a parametrization of torch computed; not if it draws numbers.

        Args:
            maker: the parametrization, whose forward has just run.
            made: the weight.
            random: the state of the random numbers when it began.
        """
        trained = [self._trained.get(id(p)) for p in maker.parameters() if p.requires_grad]
        pieces = [self.pieces.of(p) for p in trained if p is not None]
        if not pieces or not self.of_model(made) or self._followed(made) is not None:
            return
        if maker not in self._makers and random.is_still():
            twin = Twin(maker, ((), {}), random, self._own)
            self._makers[maker] = parametrized(maker, pieces, twin)
        keys = frozenset(id(piece.parameter) for piece in pieces)
        self.remember(made, keys, self._makers.get(maker))

    def spend(self, result: object, *, written: bool) -> None:
        """Count the result as data from here on: an input was data, or its use is already recorded.

        Args:
            result: the result.
            written: whether the result is an argument that the function wrote to.
        """
        for tensor in tensors_in(result):
            if written:  # what the model holds stays, unless it leads to parameters
                for each in (tensor, whole_of(tensor)):
                    known = self._known.get(id(each))
                    if known is None or known.keys is None:
                        continue
                    if known.version is not None or _is_made(each):
                        del self._known[id(each)]
            elif tensor._base is not None:  # a parameter that was expanded, or a view of that
                self._known[id(tensor)] = _Known(weakref.ref(tensor), None, None, tensor._version)


def _is_made(tensor: Tensor) -> bool:
    return tensor.requires_grad and not isinstance(tensor, nn.Parameter)
