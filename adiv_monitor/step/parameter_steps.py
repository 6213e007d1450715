"""The three vectors of a parameter step: its gradient γ, and what was subtracted, w and a.

w = θ before − θ after the optimizer's step is the negative of the update u; a is the same of the
applied update, up to the next forward pass. They cover all layers, end to end. Keeping all three
until the next forward pass takes three copies of the parameters. This is only needed where
something changes the weights after the step. The first measured step of a layer keeps everything,
and its result decides (`RunHistory`). Elsewhere a = w as long as nothing has written to the
parameters since the step, by their version counters.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.pieces import Key, Parts, Piece, gradient
from adiv_monitor.features.rows import to_compute_dtype
from adiv_monitor.step.flat import Flat
from adiv_monitor.step.run_history import RunHistory


class ParameterSteps:
    """γ, u and a of all measured pieces of parameters around one optimizer step.

    Args:
        pieces: the measured pieces of parameters.
        history: the run history so far.
        masters: by id of a parameter, the copy of higher precision that the optimizer steps.
        scale: the number by which a fused optimizer divides `.grad` in its step (AMP); None: 1.
        new: whether some of the layers were not measured before.

    Attributes:
        keys: the pieces.
        products: their dot products and counts, by the names of `OF_PARAMETERS`, in the order of
            `keys`: one vector for each dtype and device.
        has_copies: whether γ is preserved even if the optimizer changes `.grad`.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        history: RunHistory,
        masters: Mapping[int, Tensor],
        *,
        scale: Tensor | None,
        new: bool,
    ) -> None:
        self._masters = masters
        self._pieces = {piece.key: piece for piece in pieces}
        self._keeps_update = new or history.weights_change
        # `.grad` may be zeroed before the next forward pass, so γ must be a copy then too.
        self.has_copies = scale is not None or history.gradient_changes or self._keeps_update
        # By id of a parameter, the key of the piece that is all of it.
        self._whole = {id(x.parameter): key for key, x in self._pieces.items() if x.view is None}
        every = {id(piece.parameter): piece.parameter for piece in self._pieces.values()}
        gradients = {of: gradient(parameter) for of, parameter in every.items()}
        self._given = {
            key: piece.own(gradients[id(piece.parameter)]) for key, piece in self._pieces.items()
        }
        self._copied: Flat | None = _copy(self._values(), self._given)  # γ
        if scale is not None:
            for buffer in self._copied.buffers:
                buffer.div_(scale.to(buffer.device))
        self._gamma = self._copied.views
        self.keys = self._copied.keys
        sizes = torch.tensor([self._gamma[k].numel() for k in self.keys], dtype=torch.float64)
        self.products = {"gamma_gamma": self._copied.dots(self._copied), "size": (sizes,)}
        self._before: Flat | None = None  # θ before; after the step w, if no update is kept
        self._taken: Flat | None = None  # w
        self._after: list[tuple[int, int]] = []

    def keep_parameters(self) -> None:
        """Copy the parameters before an optimizer step, over the copy of γ if it is not needed."""
        values = self._values()
        if self.has_copies:
            self._before = _copy(values, values)
        else:
            assert self._copied is not None
            self._before, self._copied, self._gamma = self._copied, None, self._given
            self._before.apply(torch._foreach_copy_, values)
        self.products["theta_theta"] = self._before.dots(self._before)
        self._at_first = _versions(self._given.values())

    def _values(self) -> dict[Key, Tensor]:
        """Return the pieces as they are now; a plain parameter stands for itself."""
        found: dict[Key, Tensor] = {}
        for key, piece in self._pieces.items():
            if (master := self._masters.get(id(piece.parameter))) is not None:
                found[key] = piece.of(master)
            else:
                is_plain = piece.view is None and type(piece.parameter) is nn.Parameter
                found[key] = piece.parameter if is_plain else piece.value()
        return found

    def update_of(self, parameter: nn.Parameter) -> Tensor:
        """Return w of a parameter of which a piece is the whole, after the optimizer's step."""
        return to_compute_dtype(self.taken[self._whole[id(parameter)]])

    def gamma(self, parts: Parts) -> Parts:
        """Return γ of every piece, with those that were all-gathered."""
        return {**self._gamma, **parts} if parts else self._gamma

    @property
    def taken(self) -> Parts:
        """The subtracted update w = θ before − θ of every piece."""
        assert self._taken is not None
        return self._taken.views

    def now(self, layer: Layer) -> Tensor:
        """Return the weight of a layer as it is now."""
        weight = layer.change({k: x.detach() for k, x in self._values().items()})[0]
        assert weight is not None
        return weight

    def stepped(self) -> None:
        """Take the updates after the optimizer's step."""
        assert self._before is not None
        values = self._values()
        self._after = _versions(values.values())
        before = self._before
        self._taken = taken = _copy(values, before.views) if self._keeps_update else before
        taken.apply(torch._foreach_sub_, values)

    def finish_update(self) -> Tensor:
        """Take the products of w, and return whether `.grad` has changed since its copy.

        Where there is a copy, values are compared: version counters miss writes through .data.
        """
        w = self._taken
        assert w is not None
        self.products["w_w"] = w.dots(w)
        gamma, moved = self._copied, w.nonzero()
        if gamma is not None:
            self.products["w_gamma"] = w.dots(gamma)
        else:
            w.apply(torch._foreach_mul_, self._gamma)
            self.products["w_gamma"] = w.sums()
            w.apply(torch._foreach_copy_, self._gamma)
            gamma = w
        reached = gamma.nonzero()
        self.products["reached"] = gamma.counts(reached)
        self.products["changed"] = gamma.counts(map(torch.logical_and, reached, moved))
        if self.has_copies:
            assert self._copied is not None
            changed = self._copied.differs(self._given)
        else:
            changed = torch.tensor(self._at_first != _versions(self._given.values()))
        self._given = {}
        return changed

    def applied(self) -> Tensor | None:
        """Take the products of a as the next forward begins, or return whether a differs from u.

        None if the products of a show it.
        """
        differs = None
        if self._keeps_update:
            a, w, gamma = self._before, self._taken, self._copied
            assert a is not None and w is not None and gamma is not None
            a.apply(torch._foreach_sub_, self._values())
            self.products |= {"a_a": a.dots(a), "a_w": a.dots(w), "a_gamma": a.dots(gamma)}
        else:
            differs = torch.tensor(self._after != _versions(self._values().values()))
        self._before = self._taken = self._copied = None
        self._gamma = self._given = {}
        return differs


def _copy(like: Parts, tensors: Parts) -> Flat:
    """Return a copy of tensors that are laid out like others."""
    flat = Flat(like)
    flat.apply(torch._foreach_copy_, tensors)
    return flat


def _versions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    return [(-1 if x.is_inference() else x._version, x.data_ptr()) for x in tensors]
