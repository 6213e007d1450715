"""The provenance of tensors in a forward pass: computed from the model alone, or data."""

import weakref
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from adiv_monitor.capture.weights.computed import computed
from adiv_monitor.capture.weights.pieces import Piece, Source, Strides, whole_of
from adiv_monitor.capture.weights.shards import Sharded, is_shard
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.nested import tensors_in


class NotFollowed(Refused):
    """A weight is computed from parameters in a way that can't be followed."""


class _Known(NamedTuple):
    """What is known of a tensor. Views that are not data are known by what they view.

    Attributes:
        tensor: the tensor.
        source: how it is computed from the parameters to measure; None: not from these.
        version: the version of its memory when it was made; None: the model holds it.
        is_data: whether it counts as data.
    """

    tensor: weakref.ref[Tensor]
    source: Source | None = None
    version: int | None = None
    is_data: bool = False


class Provenance:
    """Follows parameters, buffers and constants through the functions of one step.

    Args:
        model: the model.
        trained: the parameters to measure.
        follows_all: whether weights that can't be followed are refused; else they are known by
            their pieces alone.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Iterable[nn.Parameter],
        *,
        follows_all: bool = True,
    ) -> None:
        self._model, self._follows_all = model, follows_all
        self._modules = [*model.modules()]  # now, as the forward pass may be deep
        self._trained = {id(p): p for p in trained}

    @cached_property
    def sharded(self) -> Sharded:
        """The model's sharded parameters, and the unsharded ones that replace them."""
        return Sharded(self._model)

    @cached_property
    def _known(self) -> dict[int, _Known]:
        """What is known, by id of the tensor: at first what the model holds as it runs."""
        every = [
            held
            for module in self._modules
            for held in (*module._parameters.values(), *module._buffers.values())
            if held is not None
        ]
        return {id(held): self._held(held) for held in every}

    def _held(self, tensor: Tensor) -> _Known:
        """Return what is known of a tensor that the model holds now."""
        stood_for = self.sharded.of(tensor)
        parameter = self._trained.get(id(tensor if stood_for is None else stood_for))
        if parameter is None:
            return _Known(weakref.ref(tensor))
        return _Known(weakref.ref(tensor), Source((Piece(parameter),)))

    def _look_up(self, value: Tensor) -> _Known | None:
        """Return what is known of a tensor, or of the tensor that it is a view of."""
        known = self._known.get(id(value))
        if known is not None and known.tensor() is value:
            return known
        if value._base is not None:
            return self._look_up(value._base)
        if isinstance(value, nn.Parameter) and self.sharded.of(value) is not None:
            known = self._known[id(value)] = self._held(value)
            return known
        return None

    def of_model(self, value: object) -> bool:
        """Return whether a value is no data: it depends on the model and constants alone."""
        if not isinstance(value, Tensor):
            return True
        known = self._look_up(value)
        return known is not None and not known.is_data

    def parameters_of(self, value: Tensor) -> Collection[int]:
        """Return ids of the parameters to measure that it depends on, if it depends on no data."""
        known = self._look_up(value) if value.requires_grad else None
        source = None if known is None else known.source
        return () if source is None else {id(piece.parameter) for piece in source.pieces}

    def source(self, value: object) -> Source | None:
        """Return how a tensor is computed from measured parameters; None if it is not.

        Raises:
            NotFollowed: it is computed in another way than those that are followed.
            Refused: it is not a contiguous part of a sharded parameter.
        """
        source = self._followed(value)
        if source is None:
            return None
        if source.steps is None and self._follows_all:
            raise NotFollowed(
                "its weight is computed from parameters in a way that can't be followed: only "
                "views, casts, constants and masks are"
            )
        for piece in source.pieces:
            lies = piece.view is None or not is_shard(piece.parameter) or piece.contiguous_range
            if is_shard(piece.parameter) and not (source.is_view and lies):
                raise Refused(
                    "its weight is computed from a parameter of which each rank holds a part: "
                    "only a whole parameter, or a contiguous range of one, can be all-gathered"
                )
        return source

    def _followed(self, value: object) -> Source | None:
        """Return how a tensor is computed from measured parameters; None if it is not."""
        if not isinstance(value, Tensor) or not self.parameters_of(value):
            return None
        whole = whole_of(value)
        known = self._look_up(whole)
        assert known is not None and known.source is not None
        if value.dtype != whole.dtype or known.version not in (None, whole._version):
            return _unknown([known.source])
        if value is whole:
            return known.source
        strides = Strides.between(value, whole)
        if known.version is None and value.numel() != whole.numel():
            return Source((Piece(known.source.pieces[0].parameter, strides),))
        return known.source.then(strides)

    def computes(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> None:
        """Remember the result of a function of the model and constants alone; see `computed`."""
        given = [x for x in map(self._followed, tensors_in(*args, *kwargs.values())) if x]
        source = _unknown(given) if given else None
        if given and isinstance(made, Tensor) and made.is_floating_point():
            source = computed(function, args, kwargs, made, self._followed) or source
        for tensor in tensors_in(made):
            whole = whole_of(tensor)
            known, how = self._look_up(whole), source if tensor.requires_grad else None
            if known is None or (whole is tensor and known.version is not None):
                how = how if how is None or whole is tensor else _unknown([how])
                self._known[id(whole)] = _Known(weakref.ref(whole), how, whole._version)
            elif how is not None and known.version not in (None, whole._version):  # written to
                of = [how] if known.source is None else [how, known.source]
                self._known[id(whole)] = known._replace(source=_unknown(of))

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
                    is_made = each.requires_grad and not isinstance(each, nn.Parameter)
                    if known and not known.is_data and (is_made or known.version is not None):
                        del self._known[id(each)]
            elif tensor._base is not None:  # a parameter that was expanded, or a view of that
                self._known[id(tensor)] = _Known(weakref.ref(tensor), is_data=True)


def _unknown(sources: Iterable[Source]) -> Source:
    """Return the source of a tensor that is computed from these in an unknown way."""
    pieces = {piece.key: piece for source in sources for piece in source.pieces}
    return Source(tuple(pieces.values()), None, is_view=False)
