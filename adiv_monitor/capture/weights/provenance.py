"""The provenance of tensors in a forward pass: computed from the model alone, or data.

A weight that a function gets is often not a parameter: it is a view of one, a cast, or 1 + p. Each
entry of such a weight is one of the parameter, plus a constant, so the weight's change is the
parameter's in another arrangement. What is known of a computed tensor is noted at its node of the
graph, which a write to it replaces. Whatever is computed from anything else is data.
"""

import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from adiv_monitor.capture.weights.pieces import Piece, Source, Strides, whole_of
from adiv_monitor.capture.weights.shards import Sharded, is_shard
from adiv_monitor.features.rows import compute_dtype
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.nested import tensors_in

CASTS = ("to", "float", "double", "half", "bfloat16", "type", "type_as")
_MOVES = (*CASTS, "clone", "contiguous", "reshape", "flatten")  # entries stay in their order
_SUMS = ("add", "__add__", "__radd__")
_NOTE = "adiv_monitor"  # at a node of the graph: a source and the tensor's version; None: data


class NotFollowed(Refused):
    """A weight is computed from parameters in a way that can't be followed."""


class Provenance:
    """Follows the parameters and buffers of a model through the functions of one step.

    Args:
        model: the model.
        trained: the parameters to measure.
        follows_all: whether weights that can't be followed are refused; else they are known by
            their pieces alone.
    """

    def __init__(
        self, model: nn.Module, trained: Iterable[nn.Parameter], *, follows_all: bool = True
    ) -> None:
        self._model, self._follows_all = model, follows_all
        # Now: in the forward pass, `functional_call` may have put other tensors in their places.
        held = (x for m in model.modules() for x in (*m._parameters.values(), *m._buffers.values()))
        self._held = {id(x): x for x in held if x is not None}
        self._trained = {id(p): p for p in trained}
        self._constants: dict[int, weakref.ref[Tensor]] = {}  # that the forward pass has made

    @cached_property
    def sharded(self) -> Sharded:
        """The model's sharded parameters, and the unsharded ones that replace them."""
        return Sharded(self._model)

    def _source(self, value: Tensor) -> Source | None:
        """Return how a tensor is computed from the model alone; None: it is data."""
        node: Any = value.grad_fn
        if node is not None and _NOTE in node.metadata:
            source, version = node.metadata[_NOTE]
            return source if source is None or version == value._version else _unknown([source])
        whole = whole_of(value)
        if whole is not value:
            source = self._source(whole)
            return source and _viewed(source, value, whole)
        if node is not None:
            return None
        stood_for = (
            self.sharded.replaced().get(id(value)) if isinstance(value, nn.Parameter) else None
        )
        constant = (known := self._constants.get(id(value))) and known()
        if stood_for is None and constant is not value and id(value) not in self._held:
            return None
        parameter = self._trained.get(id(value if stood_for is None else stood_for))
        return _unknown([]) if parameter is None else Source((Piece(parameter),))

    def of_model(self, value: object) -> bool:
        """Return whether a value is no data: it depends on the model and constants alone."""
        return not isinstance(value, Tensor) or self._source(value) is not None

    def parameters_of(self, value: Tensor) -> Collection[int]:
        """Return ids of the parameters to measure that it depends on, if it depends on no data."""
        source = self.followed(value)
        return () if source is None else {id(piece.parameter) for piece in source.pieces}

    def followed(self, value: object) -> Source | None:
        """Return how a tensor is computed from measured parameters; None if it is not."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return None
        source = self._source(value)
        return source if source is not None and source.pieces else None

    def source(self, value: object) -> Source | None:
        """Return how a tensor is computed from measured parameters; None if it is not.

        Raises:
            NotFollowed: it is computed in another way than those that are followed.
            Refused: it is not a contiguous part of a sharded parameter.
        """
        source = self.followed(value)
        if source is None:
            return None
        if source.steps is None and self._follows_all:
            raise NotFollowed(
                "its weight is computed from parameters in a way that can't be followed: only "
                "views, casts and sums with constants are"
            )
        for piece in source.pieces:
            if is_shard(piece.parameter) and piece.view and not piece.contiguous_range:
                raise Refused(
                    "its weight is computed from a parameter of which each rank holds a part: "
                    "only a whole parameter, or a contiguous range of one, can be all-gathered"
                )
        return source

    def computes(
        self, name: str, kwargs: dict[str, Any], values: Sequence[Tensor], made: Any
    ) -> None:
        """Note the result of a function of the model alone.

        Args:
            name: the function's name.
            kwargs: its keyword arguments.
            values: the tensors that it is a function of.
            made: its result.
        """
        found = [(value, source) for value in values if (source := self.followed(value))]
        source = _unknown(source for _, source in found)
        if len(found) == 1 and isinstance(made, Tensor) and made.is_floating_point():
            weight, of_weight = found[0]
            is_moved = name in _MOVES and made.device == weight.device
            is_followed = is_moved or (name in _SUMS and not kwargs)
            if is_followed and made.numel() == weight.numel():  # else it is repeated
                source = of_weight.then(made.shape, compute_dtype(made))
        for tensor in tensors_in(made):
            whole = whole_of(tensor)
            if not whole.requires_grad:
                self._constants[id(whole)] = weakref.ref(whole)
            elif whole is tensor:
                _note(tensor, source)

    def spend(self, result: object) -> None:
        """Count the result as data from here on: an input was data, or its use is already recorded.

        Only what was written to a constant, and a parameter that was expanded, or a view of that,
        would not be anyway.
        """
        for tensor in tensors_in(result):
            for each in (tensor, whole_of(tensor)):
                self._constants.pop(id(each), None)
            if tensor._base is not None and self.followed(tensor):
                _note(tensor, None)


def _note(tensor: Tensor, source: Source | None) -> None:
    node: Any = tensor.grad_fn
    if node is not None:
        node.metadata[_NOTE] = source, tensor._version


def _viewed(source: Source, view: Tensor, whole: Tensor) -> Source:
    """Return the source of a view of a tensor."""
    if view.dtype != whole.dtype:
        return _unknown([source])
    strides = Strides.between(view, whole)
    if whole.grad_fn is None and source.pieces and view.numel() != whole.numel():
        return Source((Piece(source.pieces[0].parameter, strides),))
    return source.then(strides)


def _unknown(sources: Iterable[Source]) -> Source:
    """Return the source of a tensor that is computed from these in an unknown way."""
    pieces = {piece.key: piece for source in sources for piece in source.pieces}
    return Source(tuple(pieces.values()), None)
