"""The corrected maps as modules: subclasses of `torch.nn` layers with another forward.

Constructor arguments are those of the base class, followed by keywords of the correction. The
parameters, their initialisation and state dicts are also those of the base class, so checkpoints
load both ways.
"""

from typing import Any

import torch.fx
from torch import Tensor, nn

from adiv_layers.forms import affine_like_constants, norm_like_gain, representable
from adiv_layers.functional import (
    affine_like_linear,
    gradient_only_linear,
    l2_norm,
    norm_like_linear,
)
from adiv_layers.gradient_only import LINEAR_FORMS, LinearForm, check_gradient_form

# torch.fx does not trace into torch's own layers, and need not trace into these.
torch.fx.wrap("affine_like_linear")
torch.fx.wrap("gradient_only_linear")
torch.fx.wrap("l2_norm")
torch.fx.wrap("norm_like_linear")


class AffineLikeLinear(nn.Linear):
    """`nn.Linear` with every row divided by the norm of its features: (Wx + b)/√(‖x‖² + 1).

    In general (αWx + βb)/√(α²‖x‖² + β²): see `functional.affine_like_linear`.

    Args:
        in_features: as in `nn.Linear`.
        out_features: as in `nn.Linear`.
        bias: as in `nn.Linear`.
        device: as in `nn.Linear`.
        dtype: as in `nn.Linear`.
        alpha: weight of Wx.
        beta: weight of b.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> None:
        affine_like_constants(alpha, beta)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.alpha = alpha
        self.beta = beta

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return affine_like_linear(input, self.weight, self.bias, alpha=self.alpha, beta=self.beta)

    def extra_repr(self) -> str:
        """Return the settings of the base class, then those of the correction."""
        return f"{super().extra_repr()}, alpha={self.alpha}, beta={self.beta}"


class NormLikeLinear(nn.Linear):
    """`nn.Linear` of each row's direction only: Wx/‖x‖ + b.

    In general αWx/s + βb: see `functional.norm_like_linear`. With the defaults the scale is 2:
    halve the learning rate, or pass alpha=beta=√½.

    Args:
        in_features: as in `nn.Linear`.
        out_features: as in `nn.Linear`.
        bias: as in `nn.Linear`.
        device: as in `nn.Linear`.
        dtype: as in `nn.Linear`.
        alpha: weight of Wx.
        beta: weight of b, in [−1, 1].
        eps: smallest norm to divide by.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        eps: float = 1e-12,
    ) -> None:
        norm_like_gain(alpha, beta)
        super().__init__(in_features, out_features, bias, device, dtype)
        representable(eps, self.weight.dtype)
        self.alpha = alpha
        self.beta = beta
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return norm_like_linear(
            input, self.weight, self.bias, alpha=self.alpha, beta=self.beta, eps=self.eps
        )

    def extra_repr(self) -> str:
        """Return the settings of the base class, then those of the correction."""
        return f"{super().extra_repr()}, alpha={self.alpha}, beta={self.beta}, eps={self.eps}"


class GradientOnlyLinear(nn.Linear):
    """`nn.Linear` in the forward pass, with corrected gradients of weight and bias.

    Their `.grad` is deliberately not the derivative: see `functional.gradient_only_linear`. The
    batch form uses the rows of one call, not those of other micro-batches or ranks.

    Args:
        in_features: as in `nn.Linear`.
        out_features: as in `nn.Linear`.
        bias: as in `nn.Linear`.
        device: as in `nn.Linear`.
        dtype: as in `nn.Linear`.
        form: "proportional" (eqn 20), "disproportional" (eqn 21) or "batch".
        eps: smallest norm to divide by.
        damping: λ of the batch form, relative to the rows' mean scale.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        form: LinearForm = "proportional",
        eps: float = 1e-12,
        damping: float = 1e-3,
    ) -> None:
        check_gradient_form(form, LINEAR_FORMS, eps, damping)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.form = form
        self.eps = eps
        self.damping = damping

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return gradient_only_linear(
            input, self.weight, self.bias, form=self.form, eps=self.eps, damping=self.damping
        )

    def extra_repr(self) -> str:
        """Return the settings of the base class, then those of the correction."""
        twin = super().extra_repr()
        return f"{twin}, form={self.form!r}, eps={self.eps}, damping={self.damping}"


class L2Norm(nn.Module):
    """A normaliser without parameters that scales rows to norm one: x/‖x‖.

    Args:
        dim: the dimension that holds a row (1 for channels of images).
        eps: smallest norm to divide by.

    Raises:
        ValueError: eps is not positive.
    """

    def __init__(self, dim: int = -1, *, eps: float = 1e-12) -> None:
        super().__init__()
        representable(eps, torch.float32)
        self.dim = dim
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        """Return the input with every row scaled to norm one."""
        return l2_norm(input, self.dim, self.eps)

    def extra_repr(self) -> str:
        """Return the dimension and eps."""
        return f"dim={self.dim}, eps={self.eps}"
