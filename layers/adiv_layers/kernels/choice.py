"""The choice between kernels and plain PyTorch; Triton is imported only when needed."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

DEVICES = {"cuda"}
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def kernels_for(*tensors: Tensor | None) -> Any:
    """Return the module of kernel functions if they can run on these tensors now, else None.

    They are not used under torch.compile, export, tracing or a dispatch mode, which need plain
    expressions; under `torch.func` transforms or forward-mode derivatives, for which the kernels
    have no rule; or on subclasses (DTensor, fakes), whose data may not be read directly.
    """
    first = tensors[0]
    if first is None or first.device.type not in DEVICES:
        return None
    for tensor in tensors:
        if tensor is not None and not (
            (type(tensor) is Tensor or type(tensor) is Parameter)
            and tensor.dtype in _DTYPES
            and tensor.device == first.device
            and tensor.numel() > 0
            and not tensor.is_neg()  # then its data is not its value
        ):
            return None
    if (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state()  # torch.jit.trace
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
    ):
        return None
    return _functions()


@functools.cache
def _functions() -> Any:
    """Import and return the kernel functions; None, with one warning, if Triton does not work."""
    try:
        from adiv_layers.kernels import functions
    except Exception as cause:  # whatever the failure, the plain expressions still work
        warnings.warn(
            f"adiv_layers: no Triton kernels ({cause!r}); plain PyTorch is used instead.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return functions
