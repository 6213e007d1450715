"""The three vectors of a parameter step: its gradient γ, and what was subtracted, w and a.

w = θ before − θ after the optimizer's step is the negative of the update u; a is the same of the
applied update, up to the next forward pass. They cover all layers, parameter by parameter. Keeping
all three until the next forward pass takes three copies of the parameters. This is only needed
where something changes the weights after the step. The first measured step of a layer keeps
everything, and its result decides (`RunHistory`). Elsewhere a = w as long as nothing has written to
the parameters since the step: small ones are compared, of large ones the version counter is read.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic

import torch
from torch import Tensor, nn

from adiv_monitor.capture.entries import is_small
from adiv_monitor.capture.weights.pieces import Piece, gradient
from adiv_monitor.capture.weights.shards import part_of
from adiv_monitor.features.rows import to_compute_dtype
from adiv_monitor.maths import dots
from adiv_monitor.maths.sums import T
from adiv_monitor.rerun.surroundings import version
from adiv_monitor.step.run_history import RunHistory
from adiv_monitor.step.side_by_side import Entries, SideBySide, any_differs


@dataclass(frozen=True, slots=True, eq=False)
class PieceNumbers(Generic[T]):
    """By key of a piece, numbers that add up to a dot product, or to its square root.

    `a_b` is ⟨a, b⟩, see `Dots`.
    """

    gamma_gamma: dict[int, T] = field(default_factory=dict)
    w_w: dict[int, T] = field(default_factory=dict)
    w_gamma: dict[int, T] = field(default_factory=dict)
    a_a: dict[int, T] = field(default_factory=dict)
    a_w: dict[int, T] = field(default_factory=dict)
    a_gamma: dict[int, T] = field(default_factory=dict)


class ParameterSteps:
    """γ, u and a of all measured pieces of parameters around one optimizer step.

    Args:
        pieces: every measured piece of a parameter, as often as layers use it.
        history: the run history so far.
        updates: whether an optimizer step follows, so that the parameters must be copied.
        copy_gradient: whether the optimizer will write to `.grad` (it unscales AMP gradients).
        new: whether some of the layers were not measured before.

    Attributes:
        products: numbers that add up to dot products.
        norms: norms of parts, whose squares add up to dot products.
        has_copies: whether γ is preserved even if the optimizer changes `.grad`.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        history: RunHistory,
        *,
        updates: bool,
        copy_gradient: bool,
        new: bool,
    ) -> None:
        uses = Counter(pieces)
        every = list(uses)
        self._shared = {p.key for p, count in uses.items() if count > 1}
        values = {p.key: p.value() for p in every}
        smallness = {p.key: is_small(values[p.key]) for p in every}
        self._small = [p for p in every if smallness[p.key]]
        self._large = [p for p in every if not smallness[p.key]]
        self._keep_update = new or history.weights_change
        # `.grad` may be zeroed before the next forward pass, so γ must be a copy then too.
        self.has_copies = copy_gradient or history.gradient_changes or self._keep_update
        self.products: PieceNumbers[Tensor] = PieceNumbers()
        self.norms: PieceNumbers[Tensor] = PieceNumbers()
        self._parameters: dict[int, Tensor] = {}  # their gradients, by id
        self._whole: dict[int, int] = {}  # key of the piece that is all of a parameter, by id
        grads: dict[int, Tensor] = {}
        for p in every:
            of = id(p.parameter)
            if of not in self._parameters:
                self._parameters[of] = gradient(p.parameter)
            if p.view is None:
                self._whole[of] = p.key
            grads[p.key] = p.own(self._parameters[of])
        self._seen = Entries(self._parameters)
        small = [p.key for p in self._small]
        self._gammas = SideBySide({key: grads[key] for key in small})
        self._befores = SideBySide({key: values[key] for key in small} if updates else {})
        self._updates: SideBySide | None = None
        before, moving = _copied(
            history,
            {p.key: values[p.key] for p in self._large} if updates else {},
            {p.key: grads[p.key] for p in self._large} if self.has_copies else {},
        )
        self._before = before
        self._gamma = {p.key: grads[p.key] for p in self._large} | moving
        self.norms.gamma_gamma.update({p.key: dots.norms(grads[p.key]) for p in self._large})
        self.products.gamma_gamma.update(self._gammas.times(self._gammas))
        self._update: dict[int, Tensor] = {}
        self._versions: list[tuple[int, int]] = []  # of the large pieces after the optimizer's step

    def before(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the parameter before the step, or None once its copy is released or missing."""
        key = self._whole.get(id(parameter))
        if key is None:
            return None
        large = self._before.get(key)
        return self._befores.views.get(key) if large is None else large

    def gamma(self, piece: Piece) -> Tensor:
        """Return γ of a piece; for a small piece it is a copy that never changes."""
        found = self._gammas.views.get(piece.key)
        return self._gamma[piece.key] if found is None else found

    def gamma_norm_of(self, parameter: nn.Parameter) -> Tensor:
        """Return a tensor whose norm is that of the gradient: itself, or norms of its parts."""
        key = self._whole.get(id(parameter))
        if key is None:  # only pieces of it are measured
            return dots.norms(self._parameters[id(parameter)])
        parts = self.norms.gamma_gamma.get(key)
        return self._gammas.views[key] if parts is None else parts

    def entries_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the `sampled_entries` of the parameter's gradient, or of this rank's part."""
        return self._seen.of(id(parameter))

    def stepped(self) -> None:
        """Take the updates of the small parameters after the optimizer's step."""
        self._updates = self._taken_from_small()
        self._update = dict(self._updates.views)
        self._versions = self._versions_now()

    def taken(self, piece: Piece) -> Tensor:
        """Return the subtracted update w = θ before − θ of a piece, in compute precision."""
        key = piece.key
        if key in self._update:
            return self._update[key]
        after = to_compute_dtype(piece.value())
        if not (self._keep_update or key in self._shared):
            return to_compute_dtype(self._before.pop(key)).sub_(after)
        taken = to_compute_dtype(self._before[key]) - after
        if self._keep_update:
            self._update[key] = taken
        return taken

    def take_products(self, piece: Piece, taken: Tensor) -> None:
        """Take ‖w‖ and ⟨w, γ⟩ of a large piece; may overwrite the difference `taken`."""
        key = piece.key
        assert self._updates is not None
        if key in self._updates.views:  # small
            return
        self.norms.w_w[key] = dots.norms(taken)
        spare = taken.clone() if self._keep_update else taken
        self.products.w_gamma[key] = spare.mul_(self._gamma[key]).sum()

    def finish_update(self) -> Tensor:
        """Take the small pieces' products, and return whether `.grad` has changed since its copy.

        Values are compared, because version counters miss writes through .data or by fused kernels.
        """
        update, found = self._updates, self.products
        assert update is not None
        found.w_w.update(update.times(update))
        found.w_gamma.update(update.times(self._gammas))
        changed = self._seen.differ(self._parameters)
        self._parameters.clear()
        if not self._keep_update:
            self._gamma.clear()
        return changed

    def is_as_stepped(self) -> bool:
        """Return whether θ is still that after the optimizer's step; waits for the device."""
        if self._updates is None:
            return True
        return not bool(self._differs(self._taken_from_small()))

    def _differs(self, applied: SideBySide) -> Tensor:
        """Return whether anything has written to a parameter since the optimizer's step."""
        assert self._updates is not None
        if self._versions != self._versions_now():
            return torch.ones((), dtype=torch.bool)
        return any_differs([(applied.flat[key], w) for key, w in self._updates.flat.items()])

    def _versions_now(self) -> list[tuple[int, int]]:
        return [(version(x), x.data_ptr()) for x in (p.value() for p in self._large)]

    def applied(self) -> Tensor | None:
        """Take the products of a as the next forward begins, or return whether a differs from u.

        Small parameters' are computed in the same way, so they are equal to the last bit unless θ
        has changed. None if the products of a show it.
        """
        applied, update, found = self._taken_from_small(), self._updates, self.products
        assert update is not None
        differs = None
        if not self._keep_update:
            differs = self._differs(applied)
        else:
            found.a_a.update(applied.times(applied))
            found.a_w.update(applied.times(update))
            found.a_gamma.update(applied.times(self._gammas))
            for p in self._large:
                key = p.key
                if key not in self._update:  # measuring its layer failed
                    continue
                a = to_compute_dtype(self._before.pop(key)).sub_(to_compute_dtype(p.value()))
                self.norms.a_a[key] = dots.norms(a)
                found.a_w[key] = (a * self._update.pop(key)).sum()
                found.a_gamma[key] = a.mul_(self._gamma.pop(key)).sum()
        self._before.clear()
        self._gamma.clear()
        self._update.clear()
        return differs

    def _taken_from_small(self) -> SideBySide:
        now = SideBySide({p.key: p.value() for p in self._small})
        return self._befores.minus(now)

    @property
    def places(self) -> dict[int, tuple[int, slice]]:
        """For each small piece by key, the product that contains it and the slice in it."""
        return self._gammas.places


def _copied(history: RunHistory, *several: dict[int, Tensor]) -> list[dict[int, Tensor]]:
    """Return copies of all tensors, made in one operation."""
    tensors = [tensor for named in several for tensor in named.values()]
    made, history.copies = history.copies, []  # dropped if copying fails
    if [_placed(tensor) for tensor in made] != [_placed(tensor) for tensor in tensors]:
        made = []  # their memory is free before new ones take theirs
        made = [torch.empty_like(tensor) for tensor in tensors]
    if tensors:
        torch._foreach_copy_(made, tensors)
    history.copies = made if all(tensor.is_cpu for tensor in made) else []
    copies = iter(made)
    return [{key: next(copies) for key in named} for named in several]


def _placed(tensor: Tensor) -> tuple[object, ...]:
    # Tensors that were made in inference mode can't be written to outside of it.
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_inference()


def weight_norms(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return ‖θ‖ of every parameter, which shows whether an optimizer moved it."""
    return list(torch._foreach_norm([part_of(p) for p in parameters])) if parameters else []
