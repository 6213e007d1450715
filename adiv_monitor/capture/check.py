"""The check of a gradient: whether γ is c·GᵀΦ of the rows that were seen, and with which c.

For a vector v in place of an output's weights, every row gives one number φ_r·v in the forward
pass, and every backward pass h = Σ_r g_r (φ_r·v), which sees all rows. At the optimizer's step
γv = c·h if γ = c·GᵀΦ (R. Freivalds 1977): one equation for each output and vector, and one for each
output from the bias alone, where h = Σ_r g_r φ_b. `step/gradient_check.py` solves them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
import torch
from adiv_layers.autocast import without_autocast
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.features import DenseFeatures, Features
from adiv_monitor.features.rows import Rows, compute_dtype, contracted, to_compute_dtype
from adiv_monitor.features.uses import Use

# A layer with few outputs gets several vectors, until it has this many equations.
_EQUATIONS = 16


# One side of the equations of weight and bias, each a vector; None: there are none.
Equations = tuple[Tensor | None, Tensor | None]


@dataclass(slots=True, eq=False)
class Products:
    """The products φ_r·v of all rows of one call.

    Attributes:
        v: the vectors, (width, m); None: the weight is not checked.
        of_weight: Φ_W v, (*rows, m); None without v.
        of_bias: φ_b of every row, (rows, 1), or one number; None: the bias is not checked.
    """

    v: Tensor | None
    of_weight: Tensor | None
    of_bias: Tensor | float | None

    def contracted(self, gradient: Float[Tensor, "*rows channels"]) -> Equations:
        """Return h of a pass."""
        of_weight = of_bias = None
        if self.of_weight is not None:
            of_weight = contracted(self.of_weight, gradient).flatten()
        if isinstance(self.of_bias, Tensor):
            of_bias = contracted(self.of_bias, gradient).flatten()
        elif self.of_bias is not None:
            rows = tuple(range(gradient.dim() - 1))
            total = gradient.sum(rows, dtype=compute_dtype(gradient)) if rows else gradient.clone()
            of_bias = to_compute_dtype(total)
            of_bias = of_bias if self.of_bias == 1 else of_bias * self.of_bias
        return of_weight, of_bias


class Check:
    """Computes products with vectors that are the same in all steps and ranks.

    Args:
        telling: returns `only`; it is asked once, in the forward pass.
    """

    def __init__(self, telling: Callable[[], str | None]) -> None:
        self._telling = telling
        self._drawn: dict[object, Tensor] = {}

    @cached_property
    def only(self) -> str | None:
        """The path of the only layer to check; None: all are checked."""
        return self._telling()

    def products(self, layer: Layer, use: Use, features: Features, rows: Rows) -> Products | None:
        """Return the products of all rows of a call; None if its layer can't be checked.

        Of several groups, only a bias is checked: there are as many products as activations.

        Args:
            layer: the layer.
            use: the use.
            features: the features of the sampled rows, untrained ones included.
            rows: the sampled rows.
        """
        if features.width is None or (isinstance(features, DenseFeatures) and features.mixes_rows):
            return None
        like = use.bias if use.weight is None else use.weight
        assert like is not None
        has_bias, v = layer.bias is not None, None
        bias = features.bias if isinstance(features, DenseFeatures) and has_bias else None
        if layer.weight is not None and features.groups == 1:
            v = self._vectors(features.width, like)
        if v is None:  # a bias that rows use with factors of their own is checked with its weight
            return None if bias is None or isinstance(bias, Tensor) else Products(None, None, bias)
        with without_autocast(like):
            if use.times is not None:
                return Products(v, use.times(v), bias)
            if not isinstance(features, DenseFeatures):
                return None
            return _of_rows(use.features(Rows(rows.shape, None, rows.device)), v, has_bias=has_bias)

    def _vectors(self, width: int, weight: Tensor) -> Tensor:
        """Return vectors (width, m) for a weight, exact in every dtype."""
        outputs = max(1, weight.numel() // max(1, width))
        m = max(1, min(width, math.ceil(_EQUATIONS / outputs)))
        dtype, device = compute_dtype(weight), weight.device
        key = width, m, dtype, device
        if key not in self._drawn:
            drawn = np.random.default_rng(0).standard_normal((width, m), np.float32)
            rounded = torch.from_numpy(drawn).bfloat16().to(dtype)
            self._drawn[key] = rounded.to(device, non_blocking=True)
        return self._drawn[key]


def _of_rows(every: Features, v: Tensor, *, has_bias: bool) -> Products:
    """Return the products of one group from the features of all rows."""
    assert isinstance(every, DenseFeatures) and every.phi is not None
    of_weight, of_bias = every.phi[:, 0] @ v, every.bias if has_bias else None
    of_weight = of_weight if every.weight_gain is None else of_weight * every.weight_gain
    if of_bias is not None and every.bias_gain is not None:
        of_bias = of_bias * every.bias_gain
    return Products(v, of_weight, of_bias)


def of_gradient(
    features: Features, weight: Tensor | None, bias: Tensor | None, v: Tensor | None
) -> Equations:
    """Return γv as `Products.contracted` returns h, for γ of weight and bias."""
    of_weight = None
    if v is not None:
        assert weight is not None
        of_weight = (features.matrix(weight).mT.to(v.dtype) @ v).flatten()
    return of_weight, None if bias is None else to_compute_dtype(bias.clone()).flatten()


def added(several: Sequence[Equations]) -> Equations:
    """Return the sum of the sides of equations."""
    of_weight, of_bias = ([x for x in each if x is not None] for each in zip(*several, strict=True))
    sums = [reduce(torch.add, tensors) if tensors else None for tensors in (of_weight, of_bias)]
    return sums[0], sums[1]
