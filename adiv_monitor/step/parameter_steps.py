"""The three vectors of a parameter step: its gradient γ, and what was subtracted, w and a.

w = θ before − θ after the optimizer's step is the negative of the update u; a is the same of the
applied update, up to the next forward pass. They cover all layers, end to end. Keeping all three
until the next forward pass takes three copies of the parameters. This is only needed where
something changes the weights after the step, or `.grad` in it. The first measured step of a layer
keeps everything, and its result decides (`RunHistory`). Elsewhere γ is `.grad`, and a = w, as long
as nothing has written to them, by their version counters.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.pieces import Key, Parts, Piece, gradient
from adiv_monitor.features.rows import to_compute_dtype
from adiv_monitor.maths.sums import OF_PARAMETERS, ONCE, Array, StepSums
from adiv_monitor.step.flat import Flat, copied


class ParameterSteps:
    """γ, u and a of all measured pieces of parameters around one optimizer step.

    Args:
        pieces: the measured pieces of parameters.
        masters: by id of a parameter, the copy of higher precision that the optimizer steps.
        scale: the number by which a fused optimizer divides `.grad` in its step (AMP); None: 1.
        keeps: whether all three vectors are kept.

    Attributes:
        keys: the pieces.
        products: their dot products and counts, by the names of `OF_PARAMETERS`, in the order of
            `keys`: one vector for each dtype and device.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        masters: Mapping[int, Tensor],
        *,
        scale: Tensor | None,
        keeps: bool,
    ) -> None:
        self._masters = masters
        self._pieces = {piece.key: piece for piece in pieces}
        self._keeps = keeps or scale is not None
        # By id of a parameter, the key of the piece that is all of it.
        self._whole = {id(x.parameter): key for key, x in self._pieces.items() if x.view is None}
        self._given = {key: x.own(gradient(x.parameter)) for key, x in self._pieces.items()}
        self._copied: Flat | None = copied(self._values(), self._given)  # γ
        if scale is not None:
            for buffer in self._copied.buffers:
                buffer.div_(scale.to(buffer.device))
        self._gamma = self._copied.views
        self.keys = self._copied.keys
        sizes = torch.tensor([self._gamma[k].numel() for k in self.keys], dtype=torch.float64)
        self.products = {"gamma_gamma": self._copied.dots(self._copied), "size": (sizes,)}
        self._before: Flat | None = None  # θ before; after the step w, if not all is kept
        self._taken: Flat | None = None  # w
        self._after: list[tuple[int, int]] = []

    def keep_parameters(self) -> None:
        """Copy the parameters before an optimizer step, over the copy of γ if it is not needed."""
        values = self._values()
        if self._keeps:
            self._before = copied(values, values)
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
        self._taken = taken = copied(values, before.views) if self._keeps else before
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
            self.products["w_gamma"], changed = w.dots(gamma), gamma.differs(self._given)
        else:
            changed = torch.tensor(self._at_first != _versions(self._given.values()))
            w.apply(torch._foreach_mul_, self._gamma)
            self.products["w_gamma"] = w.sums()
            w.apply(torch._foreach_copy_, self._gamma)
            gamma = w
        reached = gamma.nonzero()
        self.products["reached"] = gamma.counts(reached)
        self.products["changed"] = gamma.counts(map(torch.bitwise_and, reached, moved))
        self._given = {}
        return changed

    def applied(self) -> Tensor | None:
        """Take the products of a as the next forward begins, or return whether a differs from u.

        None if the products of a show it.
        """
        differs = None
        if self._keeps:
            a, w, gamma = self._before, self._taken, self._copied
            assert a is not None and w is not None and gamma is not None
            a.apply(torch._foreach_sub_, self._values())
            self.products |= {"a_a": a.dots(a), "a_w": a.dots(w), "a_gamma": a.dots(gamma)}
        else:
            differs = torch.tensor(self._after != _versions(self._values().values()))
        self._before = self._taken = self._copied = None
        self._gamma = self._given = {}
        return differs


def _versions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    return [(-1 if x.is_inference() else x._version, x.data_ptr()) for x in tensors]


# --- on the host ------------------------------------------------------------------------------


@np.errstate(all="ignore")  # terms of non-finite numbers are not needed
def add_parameters(
    sums: StepSums,
    dots: Mapping[str, Array],
    pieces: Mapping[str, Mapping[Key, float]],
    keys: Sequence[Key],
) -> None:
    """Add the numbers of the parameters of each layer.

    Args:
        sums: the numbers of the layers.
        dots: dot products, by the names of `DOTS`, of the pieces of parameters.
        pieces: by layer, by key of a piece, the share of its products that this rank counts.
        keys: the pieces.
    """
    shares, layers = [pieces[path] for path in sums.paths], sums.layers
    place = {key: i for i, key in enumerate(keys)}
    at = np.array([place[key] for of in shares for key in of], dtype=np.int64)
    counted = [share for of in shares for share in of.values()]
    layer = np.repeat(np.arange(len(shares)), [len(of) for of in shares])
    # Without an applied update of its own, a = u.
    like = {"a_a": "w_w", "a_w": "w_w", "a_gamma": "w_gamma", **ONCE}
    is_first = np.zeros(len(at))
    is_first[np.unique(at, return_index=True)[1]] = 1
    for name in OF_PARAMETERS:
        values = dots.get(name, dots.get(like.get(name, ""), np.zeros(len(keys))))
        weights = is_first * counted if name in ONCE else counted
        layers[name] = np.bincount(layer, values[at] * weights, len(shares))
    layers["terms"] = _terms(sums)


def _terms(sums: StepSums) -> Array:
    """Return `terms` of each layer, by ‖g_r φ_rᵀ‖² = (D G)_r·g_r.

    D is the diagonal of the scales. Without scales ‖J_r‖ ≥ ‖J_r γ‖ / ‖γ‖ with the Jacobian J_r of
    a row.
    """
    layers, rows = sums.layers, sums.rows
    groups, gamma_gamma = (layers[name][rows["layer"]] for name in ("groups", "gamma_gamma"))
    of_gamma = rows["G_G"] * rows["e_e"] / np.where(gamma_gamma == 0, 1.0, gamma_gamma)
    squares = np.select(
        [groups > 1, groups == 1], [rows["own_G"], rows["G_G"] * rows["scale"]], of_gamma
    )
    length = sums.total(np.sqrt(np.maximum(squares, 0.0)))
    found: Array = length * layers["total"] / np.maximum(sums.seen, 1)
    return found
