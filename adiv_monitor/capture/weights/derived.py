"""Weights that are computed from parameters, and their changes by recomputation.

The tape holds the calls that computed a weight Θ from the parameters θ. Its change J t, J = ∂Θ/∂θ,
to first order in a change t of θ, is computed by two backward passes through the same calls, made
again. Tensors that were computed without gradients stay constant, as they did for the gradient.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from adiv_monitor.capture.weights.pieces import NOTHING, Parts, Piece, Pieces, Source, View, overlap
from adiv_monitor.capture.weights.tape import Recorded, Ref, Root, memory_of, whole_of
from adiv_monitor.features.rows import floats_to_compute_dtype, to_compute_dtype
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.derivatives import pushed_forward
from adiv_monitor.rerun.nested import tensors_in


class Derived:
    """A tensor that recorded calls computed from parameters.

    Args:
        ref: the tensor, as recorded on the tape.
        calls: the calls that computed it, in order.
        pieces: all pieces of the step.
    """

    def __init__(self, ref: Ref, calls: Sequence[Recorded], pieces: Pieces) -> None:
        self._ref = ref
        self._calls = calls
        self._views = _views(dict.fromkeys(_refs(ref, calls)), pieces)

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        """The pieces of parameters that it is computed from, in order of use."""
        return tuple(dict.fromkeys(view.piece for view in self._views.values()))

    @cached_property
    def identity(self) -> object:
        """A value equal for the same functions of the same pieces, constants in the same places."""
        numbers: dict[int, int] = {}

        def told(ref: Ref) -> tuple[object, ...]:
            view = self._views.get(ref)
            name = view.identity if view else numbers.setdefault(ref.root.key, len(numbers))
            return name, ref.strides

        calls = (
            (call.name, tree_map_only(Ref, told, (call.args, dict(call.kwargs))))
            for call in self._calls
        )
        return repr([*calls, told(self._ref)])

    @property
    def is_view(self) -> bool:
        """Always False: its gradient is not that of the pieces."""
        return False

    def is_as(self, other: Source | None) -> bool:
        """Return whether the constants are the same too and no random numbers are involved."""
        if other is self:
            return True
        random = any(call.randomness for call in self._calls)
        return isinstance(other, Derived) and not random and self._constants == other._constants

    @cached_property
    def _constants(self) -> list[tuple[object, ...]]:
        """The memory of each constant, and the version of that memory."""
        roots = (ref.root for ref in _refs(self._ref, self._calls))
        constants = ((root.constant, root.version) for root in roots if root.constant is not None)
        return [
            (memory_of(constant), constant.storage_offset(), constant.stride(), version)
            for constant, version in constants
        ]

    def of(self, parts: Parts, taken: Parts = NOTHING) -> Tensor:
        """Return J t for the change t = `parts`.

        Raises:
            Refused: a function can't be called again, or its backward pass is not differentiable.
        """
        leaves = {piece.key: _before(piece, taken).requires_grad_() for piece in self.pieces}
        with self._differentiable():
            return _moved(self._made_again(leaves), leaves, parts)

    def probed(self, draw: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return two tensors v, each with JJᵀv: the tensor's move when v is its gradient.

        Args:
            draw: (tensor) → a random v of the same shape.

        Raises:
            Refused: see `of`.
        """
        leaves = {piece.key: _before(piece, NOTHING).requires_grad_() for piece in self.pieces}
        found = []
        with self._differentiable():
            made = self._made_again(leaves)
            for v in (draw(made.detach()), draw(made.detach())):
                parts: Parts = {key: torch.zeros_like(leaf) for key, leaf in leaves.items()}
                if made.requires_grad:
                    inputs = list(leaves.values())
                    pulled = torch.autograd.grad(
                        made, inputs, v, retain_graph=True, materialize_grads=True
                    )
                    parts = dict(zip(leaves, pulled, strict=True))
                found.append((v, _moved(made, leaves, parts)))
        return found

    @contextmanager
    def _differentiable(self) -> Iterator[None]:
        """Enable gradients, and refuse functions that can't be called again or differentiated."""
        try:
            with torch.enable_grad(), torch._C.DisableTorchFunction():
                yield
        except RuntimeError as error:
            functions = ", ".join(dict.fromkeys(call.name for call in self._calls))
            raise Refused(
                f"its weight is computed from parameters by torch's {functions}, through which a "
                f"change of the parameters can't be followed: {error}"
            ) from error

    def _made_again(self, leaves: Parts) -> Tensor:
        """Recompute the tensor from other values of the pieces."""
        written = frozenset[int]().union(*(call.written for call in self._calls))
        memory: dict[int, Tensor] = {}

        def tensor_of(ref: Ref) -> Tensor:
            view = self._views.get(ref)
            if view is not None:
                return view.of(leaves)
            root = ref.root
            if root.key not in memory:
                constant = _constant(root)
                memory[root.key] = constant.clone() if root.key in written else constant
            return ref.of(memory[root.key])

        for call in self._calls:
            results = tensors_in(call.again(tensor_of))
            for root, tensor in zip(call.made, results, strict=True):
                if root is not None:
                    memory[root.key] = _laid_out(
                        floats_to_compute_dtype(whole_of(tensor)), root.stride
                    )
        return tensor_of(self._ref)


def _moved(made: Tensor, leaves: Parts, parts: Parts) -> Tensor:
    """Return J t with J = ∂made/∂leaves and t = parts."""
    if not made.requires_grad:
        return torch.zeros_like(made)
    (moved,) = pushed_forward([made], [*leaves.values()], [parts[key] for key in leaves])
    return moved


def _refs(ref: Ref, calls: Sequence[Recorded]) -> Iterator[Ref]:
    for call in calls:
        yield from call.reads
    yield ref


def _views(refs: Iterable[Ref], pieces: Pieces) -> dict[Ref, View]:
    """Return the view for each reference to a parameter, with pieces that don't overlap."""
    of_parameters: dict[nn.Parameter, list[Ref]] = defaultdict(list)
    for ref in refs:
        if ref.root.parameter is not None:
            of_parameters[ref.root.parameter].append(ref)
    views: dict[Ref, View] = {}
    for parameter, several in of_parameters.items():
        apart = [r.strides for r in several if r.strides is not None and not r.strides.repeats]
        parts = [pieces.view(parameter, strides) for strides in apart]
        if len(parts) == len(several) and not overlap(parameter, [v.piece for v in parts]):
            views |= zip(several, parts, strict=True)
        else:
            views |= {ref: View(pieces.of(parameter), ref.strides) for ref in several}
    return views


def _before(piece: Piece, taken: Parts) -> Tensor:
    """Return the piece when the tensor was computed, in compute precision."""
    now = to_compute_dtype(piece.value())
    return now + taken[piece.key] if piece.key in taken else now


def _constant(root: Root) -> Tensor:
    assert root.constant is not None
    if root.constant._version != root.version:
        raise Refused("a constant from which its weight is computed was changed in place since")
    return floats_to_compute_dtype(root.constant)


def _laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the tensor with the memory layout of the recorded one, so that its views apply."""
    if tensor.stride() == stride:
        return tensor
    like = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return like.copy_(tensor)
