"""PatchNorm convolutions: `torch.nn.Conv1d/2d/3d` that divide every patch by its own norm."""

from typing import Any, Literal

import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_layers.forms import check_form
from adiv_layers.functional import gradient_only_conv, patch_norm_conv
from adiv_layers.gradient_only import check_gradient_form
from adiv_layers.gradient_only_conv import CONV_FORMS, ConvForm

# torch.fx does not trace into torch's own layers, and need not trace into these.
torch.fx.wrap("gradient_only_conv")
torch.fx.wrap("patch_norm_conv")

Form = Literal["affine-like", "norm-like"]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class GradientOnlyConv2d(nn.Conv2d):
    """`nn.Conv2d` in the forward pass, with corrected gradients of weight and bias.

    Their `.grad` is deliberately not the derivative: see `functional.gradient_only_conv`.

    Args:
        in_channels: as in `nn.Conv2d`, like all arguments up to dtype.
        out_channels: number of filters.
        kernel_size: size of a patch.
        stride: step between patches.
        padding: "valid", "same" or sizes.
        dilation: spacing inside a patch.
        groups: groups of channels; each has its own patches and norms.
        bias: whether to learn a bias b.
        padding_mode: kind of padding; padded values count in the norm of a patch.
        device: device of the parameters.
        dtype: dtype of the parameters.
        form: "proportional" (eqn 20) or "disproportional" (eqn 21), per patch.
        eps: smallest norm to divide by.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        form: ConvForm = "proportional",
        eps: float = 1e-12,
    ) -> None:
        check_gradient_form(form, CONV_FORMS, eps)
        twin = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups)
        super().__init__(*twin, bias, padding_mode, device, dtype)
        self.form = form
        self.eps = eps

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input, padding = padded(self, input)
        geometry = (self.stride, padding, self.dilation, self.groups)
        return gradient_only_conv(input, weight, bias, *geometry, form=self.form, eps=self.eps)

    def extra_repr(self) -> str:
        """Return the settings of the base class, then those of the correction."""
        twin: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{twin}, form={self.form!r}, eps={self.eps}"


def padded(layer: nn.modules.conv._ConvNd, input: Tensor) -> tuple[Tensor, str | tuple[int, ...]]:
    """Pad the input unless the mode is "zeros"; return it and the remaining padding."""
    if layer.padding_mode == "zeros":
        return input, layer.padding
    input = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
    return input, (0,) * len(layer.kernel_size)


class _PatchNorm(nn.modules.conv._ConvNd):
    """The part that the three dimensions share: constructor and forward of the correction."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        form: Form = "affine-like",
        alpha: float = 1.0,
        beta: float = 1.0,
        eps: float = 1e-12,
    ) -> None:
        twin: Any = super()  # the constructor of `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d`
        sizes = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups)
        twin.__init__(*sizes, bias, padding_mode, device, dtype)
        check_form(form, alpha, beta, eps)
        self.form = form
        self.alpha = alpha
        self.beta = beta
        self.eps = eps

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input, padding = padded(self, input)
        geometry = (self.stride, padding, self.dilation, self.groups)
        alpha, beta, eps = self.alpha, self.beta, self.eps
        return patch_norm_conv(
            input, weight, bias, *geometry, form=self.form, alpha=alpha, beta=beta, eps=eps
        )

    def extra_repr(self) -> str:
        """Return the settings of the base class, then those of the correction."""
        twin: str = super().extra_repr()  # type: ignore[no-untyped-call]
        own = f"form={self.form!r}, alpha={self.alpha}, beta={self.beta}, eps={self.eps}"
        return f"{twin}, {own}"


class PatchNormConv1d(_PatchNorm, nn.Conv1d):
    """`nn.Conv1d` divided by the norm of each patch's features: see `patch_norm_conv`.

    Args:
        in_channels: as in `nn.Conv1d`, like all arguments up to dtype.
        out_channels: number of filters.
        kernel_size: size of a patch.
        stride: step between patches.
        padding: "valid", "same" or sizes.
        dilation: spacing inside a patch.
        groups: groups of channels; each has its own patches and norms.
        bias: whether to learn a bias b.
        padding_mode: kind of padding; padded values count in the norm of a patch.
        device: device of the parameters.
        dtype: dtype of the parameters.
        form: "affine-like" (eqn 55, scale 1) or "norm-like" (eqn 56, scale 2).
        alpha: weight of W·patch.
        beta: weight of b.
        eps: smallest norm to divide by (norm-like).
    """


class PatchNormConv2d(_PatchNorm, nn.Conv2d):
    """`nn.Conv2d` divided by the norm of each patch's features: see `patch_norm_conv`.

    Args:
        in_channels: as in `nn.Conv2d`, like all arguments up to dtype.
        out_channels: number of filters.
        kernel_size: size of a patch.
        stride: step between patches.
        padding: "valid", "same" or sizes.
        dilation: spacing inside a patch.
        groups: groups of channels; each has its own patches and norms.
        bias: whether to learn a bias b.
        padding_mode: kind of padding; padded values count in the norm of a patch.
        device: device of the parameters.
        dtype: dtype of the parameters.
        form: "affine-like" (eqn 55, scale 1) or "norm-like" (eqn 56, scale 2).
        alpha: weight of W·patch.
        beta: weight of b.
        eps: smallest norm to divide by (norm-like).
    """


class PatchNormConv3d(_PatchNorm, nn.Conv3d):
    """`nn.Conv3d` divided by the norm of each patch's features: see `patch_norm_conv`.

    Args:
        in_channels: as in `nn.Conv3d`, like all arguments up to dtype.
        out_channels: number of filters.
        kernel_size: size of a patch.
        stride: step between patches.
        padding: "valid", "same" or sizes.
        dilation: spacing inside a patch.
        groups: groups of channels; each has its own patches and norms.
        bias: whether to learn a bias b.
        padding_mode: kind of padding; padded values count in the norm of a patch.
        device: device of the parameters.
        dtype: dtype of the parameters.
        form: "affine-like" (eqn 55, scale 1) or "norm-like" (eqn 56, scale 2).
        alpha: weight of W·patch.
        beta: weight of b.
        eps: smallest norm to divide by (norm-like).
    """
