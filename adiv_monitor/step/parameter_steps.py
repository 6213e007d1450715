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
from adiv_monitor.features.rows import dots, squares, to_compute_dtype
from adiv_monitor.maths.sums import OF_PARAMETERS, ONCE, Array, StepSums
from adiv_monitor.step.flat import Flat


class ParameterSteps:
    """γ, u and a of all measured pieces of parameters around one optimizer step.

    Args:
        pieces: the measured pieces of parameters.
        scale: the number by which a fused optimizer divides `.grad` in its step (AMP); None: 1.
        keeps: whether all three vectors are kept.

    Attributes:
        keys: the pieces.
        products: their dot products and counts, by the names of `OF_PARAMETERS`, in the order of
            `keys`: one vector for each dtype and device.
    """

    def __init__(self, pieces: Iterable[Piece], *, scale: Tensor | None, keeps: bool) -> None:
        self._pieces = every = {piece.key: piece for piece in pieces}
        self._keeps = keeps or scale is not None
        # By id of a parameter, the key of the piece that is all of it.
        self._whole = {id(x.parameter): key for key, x in every.items() if x.view is None}
        self._given = {key: x.own(gradient(x.parameter)) for key, x in every.items()}
        self._copied: Flat | None = Flat(self._values()).copy(self._given)  # γ
        if scale is not None:
            for buffer in self._copied.buffers:
                buffer.div_(scale.to(buffer.device))
        self._gamma = self._copied.views
        self.keys = self._copied.keys
        sizes = torch.tensor([self._gamma[k].numel() for k in self.keys], dtype=torch.float64)
        lengths = self._copied.sums(("gamma_gamma",), lambda x: (squares(x),))
        self.products = lengths | {"size": (sizes,)}
        self._before: Flat | None = None  # θ before; after the step w, if not all is kept
        self._taken: Flat | None = None  # w
        self._after: list[tuple[int, int]] = []

    def keep_parameters(self) -> None:
        """Copy the parameters before an optimizer step, over the copy of γ if it is not needed."""
        values = self._values()
        if self._keeps:
            self._before = Flat(values).copy(values)
        else:
            assert self._copied is not None
            self._before, self._copied, self._gamma = self._copied, None, self._given
            self._before.copy(values)
        self._at_first = _versions(self._given.values())

    def _values(self) -> dict[Key, Tensor]:
        """Return the pieces as they are now."""
        return {key: piece.value() for key, piece in self._pieces.items()}

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
        weight = layer.change(self._values())[0]
        assert weight is not None
        return weight

    def stepped(self) -> Iterable[Tensor]:
        """Take the updates after the optimizer's step, and return whether `.grad` has changed.

        Where there is a copy of it, values are compared: version counters miss writes through
        `.data`.
        """
        before, gamma = self._before, self._copied
        assert before is not None
        values = self._values()
        self._after = _versions(values.values())
        self._taken = taken = Flat(values) if self._keeps else before
        self.products |= before.sums(_OF_UPDATE, _update, values, taken, gamma or self._given)
        if gamma is not None:
            changed = gamma.sums(("changed",), _differing, self._given)["changed"]
        else:
            changed = (torch.tensor(self._at_first != _versions(self._given.values())),)
        self._gamma = self._given = {}
        return changed

    def applied(self) -> Iterable[Tensor]:
        """Take the products of a as the next forward begins, or return whether a differs from u."""
        before, w, gamma = self._before, self._taken, self._copied
        assert before is not None and w is not None
        self._before = self._taken = self._copied = None
        if gamma is None:
            return (torch.tensor(self._after != _versions(self._values().values())),)
        self.products |= before.sums(_OF_APPLIED, _applied, self._values(), w, gamma)
        return ()


# --- sums of lines ----------------------------------------------------------------------------

_OF_UPDATE = ("theta_theta", "w_w", "w_gamma", "reached", "changed")
_OF_APPLIED = ("a_a", "a_w", "a_gamma")


def _product(a: Tensor, b: Tensor) -> Tensor:
    return dots(to_compute_dtype(a), to_compute_dtype(b))


def _update(before: Tensor, after: Tensor, w: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    """Write w, which may be in the place of θ before."""
    theta_theta = squares(before)
    torch.sub(before, after, out=w)
    # On a CPU `.bool()` takes half the time of `!= 0`, and a sum of bytes a fortieth of bools'.
    moved, reached = (x.bool().view(torch.uint8) for x in (w, gamma))
    counts = (x.sum(1, dtype=torch.uint8) for x in (reached, reached & moved))
    return (theta_theta, squares(w), _product(w, gamma), *counts)


def _applied(before: Tensor, now: Tensor, w: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    a = before.sub_(now)
    return squares(a), _product(a, w), _product(a, gamma)


def _differing(a: Tensor, b: Tensor) -> tuple[Tensor]:
    """Count the entries that differ; NaN equals itself."""
    return (((a != b) & ~(a.isnan() & b.isnan())).sum(1),)


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
        dots: dot products, by the names of `OF_PARAMETERS`, of the pieces of parameters.
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
