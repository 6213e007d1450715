"""The inputs of a module on a few samples of the batch, to run it with once more."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from adiv_monitor.features.rows import floats_to_compute_dtype
from adiv_monitor.rerun.nested import mapped

# What a call may be told besides tensors, and told again: it holds no state of the first call.
_PLAIN = (str, bytes, int, float, complex, bool, slice, range)


def batch_size(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """How many samples a call is about: the first dimension of its first tensor of two or more.

    Raises:
        ValueError: no tensor has a dimension for samples.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() >= 2:
            return value.shape[_batch_dimension(module, value)]
    raise ValueError(
        f"{type(module).__name__}: got no tensor of two or more dimensions, expected one whose "
        "first dimension is the batch"
    )


def of_samples(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], samples: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of the module on those samples, as `precise`; what is not per sample as it is.

    A tensor is per sample if it is as long as the batch. Objects that may change from call to call,
    such as a cache of keys, are left out (None): whether that was right shows in the outcome.

    Args:
        module: what was called.
        args: its inputs.
        kwargs: see args.
        samples: (chosen,) int64.
    """
    if isinstance(module, nn.MultiheadAttention):
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        named = {name: value for name, value in bound.arguments.items() if value is not module}
        return (), {n: _of_torch_attention(module, n, v, samples) for n, v in named.items()}
    count = batch_size(module, args, kwargs)

    def of(tensor: Tensor) -> Tensor:
        whole = floats_to_compute_dtype(tensor.detach())
        return whole.index_select(0, samples) if tensor.dim() and len(tensor) == count else whole

    def plain(value: Any) -> Any:
        return value if isinstance(value, _PLAIN) else None

    taken, named = mapped((tuple(args), dict(kwargs)), of, plain)
    return taken, named


def _batch_dimension(module: nn.Module, value: Tensor) -> int:
    batch_second = isinstance(module, nn.MultiheadAttention) and not module.batch_first
    return 1 if batch_second and value.dim() == 3 else 0


def _of_torch_attention(
    module: nn.MultiheadAttention, name: str, value: Any, samples: Tensor
) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = floats_to_compute_dtype(value.detach())
    if name == "attn_mask" and value.dim() == 2:
        return value
    if name == "attn_mask":  # (samples · heads, queries, keys)
        by_sample = value.reshape(-1, module.num_heads, *value.shape[1:])
        return by_sample.index_select(0, samples).flatten(0, 1)
    return value.index_select(_batch_dimension(module, value), samples)
