"""The inputs of a module on some samples of the batch, for running the module again."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from adiv_monitor.features.rows import floats_to_compute_dtype
from adiv_monitor.rerun.nested import mapped

# Arguments of these types hold no state of the first call, so they can be passed again.
_PLAIN = (str, bytes, int, float, complex, bool, slice, range)


def batch_size(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the batch size: the first dimension of the first tensor of two or more dimensions.

    Raises:
        ValueError: no tensor has a batch dimension.
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
    """Return the inputs of the module on some samples, in compute precision.

    A tensor is reduced to the samples if its first dimension is the batch size; others stay whole.
    Objects that may change from call to call, such as a cache of keys, are replaced by None; the
    result shows whether that was right.

    Args:
        module: the module that was called.
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
