"""Gradient-only corrections: the forward map is unchanged, its parameters get other gradients.

`.grad` is already summed over rows, so a correction per row must happen in the backward pass, where
x and g = ∂L/∂z are both available and it costs almost nothing. The gradient of the input stays the
true one.

- proportional (eqn 20): ∂W = Σ g xᵀ/(‖x‖² + 1), ∂b = Σ g/(‖x‖² + 1)
- disproportional (eqn 21): ∂W = Σ g xᵀ/(2‖x‖²), ∂b = ½ Σ g
- batch: ∂[W|b] = Gᵀ(ΦΦᵀ + λI)⁻¹Φ over all rows φ = [x, 1] of the call

The first two make a row's own part of its update exactly η g; the third also removes the effect of
the rows on one another. Without a bias the features of a row are x alone, and both per-row forms
divide by ‖x‖².
"""

from contextlib import suppress
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_layers.autocast import autocast_dtype, without_autocast
from adiv_layers.forms import least_square, representable
from adiv_layers.kernels.choice import kernels_for
from adiv_layers.kernels.launch import KernelError

LinearForm = Literal["proportional", "disproportional", "batch"]
LINEAR_FORMS = get_args(LinearForm)


def gradient_only_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    form: LinearForm = "proportional",
    eps: float = 1e-12,
    damping: float = 1e-3,
) -> Tensor:
    """Apply `torch.nn.functional.linear`, with corrected gradients of the parameters.

    Args:
        input: (..., n_in).
        weight: (n_out, n_in).
        bias: (n_out,).
        form: "proportional", "disproportional" or "batch"; see the module's docstring.
        eps: smallest norm to divide by.
        damping: λ of the batch form, relative to the mean of diag(ΦΦᵀ).

    Returns:
        (..., n_out), exactly the result of `torch.nn.functional.linear`.

    Raises:
        ValueError: the form is unknown, or eps or damping is not positive.
    """
    check_gradient_form(form, LINEAR_FORMS, eps, damping)
    return gradient_only(input, weight, bias, _Linear(form, eps, damping))


def gradient_only(input: Tensor, weight: Tensor, bias: Tensor | None, linear_map: Any) -> Tensor:
    """Apply a map that says what its parameters' gradients are: `_Linear`, or one like it.

    torch.compile and `torch.func` transforms need a separate `setup_context`, which makes a call
    three times as slow.
    """
    dtype = autocast_dtype(input)
    if dtype is not None:  # cast as autocast would inside, so that the backward sees the same
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    apart = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    function: type[torch.autograd.Function] = _GradientOnly if apart else _AtOnce
    output: Tensor = function.apply(input, weight, bias, linear_map)
    return output


def check_gradient_form(
    form: str, known: tuple[str, ...], eps: float, damping: float = 1.0
) -> None:
    """Raise ValueError unless the form is known and eps and damping are positive."""
    if form not in known:
        raise ValueError(f"form is {form!r}; must be one of {', '.join(map(repr, known))}.")
    if not (eps > 0.0 and damping > 0.0):
        raise ValueError(f"eps={eps}, damping={damping}; both must be positive.")


class _Linear(NamedTuple):
    """The linear map of every row, with its corrected gradients."""

    form: str
    eps: float
    damping: float

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def input_gradient(self, grad: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight

    def parameter_gradients(
        self, grad: Tensor, input: Tensor, weight: Tensor, has_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows, grad = input.reshape(-1, input.shape[-1]), grad.reshape(-1, grad.shape[-1])
        if self.form == "batch":
            return _batch_gradients(rows, grad, has_bias, self.damping)
        eps = representable(self.eps, rows.dtype)
        return _per_row_gradients(rows, grad, self.form, has_bias, eps)


class _GradientOnly(torch.autograd.Function):
    """The map in the forward pass, and its corrected gradients in the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, linear_map: Any) -> Tensor:
        output: Tensor = linear_map.apply(input, weight, bias)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, bias, ctx.map = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(input, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = ctx.map.input_gradient(grad, input, weight)
        if any(ctx.needs_input_grad[1:3]):
            given = grad, input, weight, ctx.has_bias
            of_weight, of_bias = ctx.map.parameter_gradients(*given)
        return of_input, of_weight, of_bias if ctx.has_bias else None, None


class _AtOnce(torch.autograd.Function):
    """`_GradientOnly` without a separate `setup_context`, for use without transforms."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, linear_map: Any
    ) -> Tensor:
        ctx.map, ctx.has_bias = linear_map, bias is not None
        ctx.save_for_backward(input, weight)
        output: Tensor = linear_map.apply(input, weight, bias)
        return output

    backward = _GradientOnly.backward


def row_factor(squares: Tensor, form: str, has_bias: bool, eps: float) -> Tensor:
    """Return the factor of a row's g xᵀ: 1/(‖x‖² + 1), 1/(2‖x‖²), or 1/‖x‖² without a bias."""
    if form == "proportional" and has_bias:
        return (squares + 1.0).reciprocal()
    share, least = 0.5 if has_bias else 1.0, least_square(eps, squares.dtype)
    # Rows of norm zero have no weight gradient; in fp16 an infinite factor would make it NaN.
    return (share / squares.clamp_min(least)).masked_fill(squares < least, 0.0)


def _per_row_gradients(
    rows: Tensor, grad: Tensor, form: str, has_bias: bool, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Return gradients of weight and bias, with every row's share multiplied by its factor."""
    by_features = form == "proportional" and has_bias
    if not torch.is_grad_enabled() and (kernels := kernels_for(rows, grad)) is not None:
        with suppress(KernelError):
            found: tuple[Tensor, Tensor | None] = kernels.row_gradients(
                rows, grad, has_bias, form == "proportional", eps
            )
            return found
    squares = rows.to(_wide(rows.dtype)).square().sum(-1, keepdim=True)
    factor = row_factor(squares, form, has_bias, eps)
    # Multiply the narrower tensor; but near x = 0 only x/‖x‖² is certain to be finite.
    if rows.shape[1] <= grad.shape[1] or not by_features:
        grad_weight = grad.t() @ (rows * factor).to(grad.dtype)
    else:
        grad_weight = (grad * factor).to(grad.dtype).t() @ rows
    if form == "disproportional":
        return grad_weight, 0.5 * grad.sum(0)
    return grad_weight, (grad.to(factor.dtype).t() @ factor).squeeze(1).to(grad.dtype)


def _batch_gradients(
    rows: Tensor, grad: Tensor, has_bias: bool, damping: float
) -> tuple[Tensor, Tensor]:
    """Return Gᵀ(ΦΦᵀ + λI)⁻¹Φ = GᵀΦ(ΦᵀΦ + λI)⁻¹ for weight and bias, by the smaller solve."""
    wide, narrow = _wide(rows.dtype), grad.dtype
    with without_autocast(rows):
        features, grad = rows.to(wide), grad.to(wide)
        if has_bias:
            features = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
        if features.shape[0] <= features.shape[1]:
            solved = _damped_solve(features @ features.t(), grad, features.shape[0], damping)
            theta = solved.t() @ features
        else:
            gram = features.t() @ features
            theta = _damped_solve(gram, features.t() @ grad, features.shape[0], damping).t()
    theta = theta.to(narrow)
    return theta[:, : rows.shape[1]], theta[:, -1]


def _damped_solve(gram: Tensor, right: Tensor, rows: int, damping: float) -> Tensor:
    """Return (gram + λI)⁻¹ right, with λ = damping · trace/rows, the mean of diag(ΦΦᵀ)."""
    if rows == 0:
        return torch.zeros_like(right)
    # With less damping, rounding could make the Gram matrix indefinite.
    damping = max(damping, rows * torch.finfo(gram.dtype).eps)
    # If all rows are zero, λ has no scale to be relative to.
    scale = (gram.diagonal().sum() / rows).clamp_min(torch.finfo(gram.dtype).tiny ** 0.5)
    damped = gram + damping * scale * torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    # Unlike cholesky, cholesky_ex does not raise on NaN: AMP skips such a step itself.
    factor, _ = torch.linalg.cholesky_ex(damped)
    return torch.cholesky_solve(right, factor)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
