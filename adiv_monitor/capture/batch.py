"""What a batch is like: sums that tell whether it comes again, and what its loss gets."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor

from adiv_monitor.capture.hook import has_data
from adiv_monitor.rerun.nested import tensors_in


@torch.no_grad()
def sums_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return Σ_i s_i, and √n times the deviation of s_i, of each tensor among the arguments.

    s_i = Σ_k √k s_ik of sample i, with s_ik its sum over an index k of the last dimension. Plain
    sums would be equal for all one-hot inputs. The second number is how far the first one differs
    between batches of n random samples; 0 for a tensor of one dimension. Only dense tensors of
    real numbers count, the integers among them.
    """
    with torch._C.DisableTorchFunction():  # a mode of the user's must not see the product
        return tuple(map(_sum, filter(_counts, tensors_in(*args, *kwargs.values()))))


def _counts(tensor: Tensor) -> bool:
    is_dense = type(tensor) is Tensor and tensor.layout is torch.strided and has_data(tensor)
    return is_dense and tensor.dtype in _NUMBERS


def _sum(tensor: Tensor) -> Tensor:
    dims = tuple(range(1, tensor.ndim - 1))
    # Summed in a wider type, the tensor would be copied as a whole.
    wide = torch.float32 if tensor.is_floating_point() and tensor.itemsize == 2 else None
    rows = tensor if tensor.ndim == 2 else tensor.reshape(1, -1)
    rows = tensor.sum(dims, dtype=wide) if dims else rows
    widest = torch.float32 if tensor.device.type == "mps" else torch.float64
    numbers = torch.arange(1, rows.shape[1] + 1, dtype=widest, device=tensor.device).sqrt()
    rows = rows if rows.is_floating_point() and rows.itemsize > 2 else rows.to(widest)
    with without_autocast(rows):
        samples = (rows @ numbers.to(rows.dtype)).to(widest)
    return torch.stack((samples.sum(), (samples - samples.mean()).norm()))


# What the outputs that a loss gets may be: those of a softmax or sigmoid, or, in part 0, of a ReLU;
# or those of a softmax, or its logarithm, over the samples.
OUTPUTS = ("probabilities", "rectified", "over samples")


@torch.no_grad()
def given_of(given: Sequence[Any]) -> dict[str, list[Tensor]]:
    """Return facts of the outputs and targets that a loss gets, by field of the report; or none.

    - "labels": how many targets there are of each class, of at most 100; of 4,096 and more, every
      so many count. Of real targets, how many are 0 and 1, or zeros if others are among them.
    - "target_moments": variance and mean of all entries of real targets.
    - "outputs": for each of `OUTPUTS`, whether the outputs are that: no probability is below 0, and
      none above 1, or those of each sample sum to 1. Of one or two dimensions, without many
      classes.
    """
    if len(given) != 2 or not all(map(_counts, given)) or not given[0].ndim or not given[0].numel():
        return {}
    outputs, targets = given
    of_classes = targets.dtype == torch.int64 and outputs.ndim == targets.ndim + 1 > 1
    if not of_classes and not (outputs.is_floating_point() and targets.is_floating_point()):
        return {}
    found = {}
    if of_classes and outputs.shape[1] <= MOST_CLASSES:
        # Not the first ones: those of pixels are of one image.
        some = targets.reshape(-1, 1)[:: 1 + targets.numel() // _MOST_SAMPLES]
        found["labels"] = [(some == torch.arange(outputs.shape[1], device=some.device)).sum(0)]
    elif not of_classes:  # all of them: every so many may be those of one column
        counts = torch.stack([(targets == number).sum() for number in (0, 1)])
        wide = targets.to(torch.promote_types(targets.dtype, torch.float32))
        found["labels"] = [counts * (counts.sum() == targets.numel())]
        found["target_moments"] = [torch.stack(torch.var_mean(wide, correction=0))]
    if outputs.ndim <= 2 and outputs.shape[1:].numel() <= MOST_CLASSES:
        found["outputs"] = [_kinds(outputs[:_MOST_SAMPLES], sums=of_classes)]
    return found


def _kinds(outputs: Tensor, *, sums: bool) -> Tensor:
    """Return for each of `OUTPUTS` whether the outputs are that; of classes, if they may sum."""
    below = -outputs.amin()
    above = (outputs.sum(1) - 1).abs() if sums else outputs - 1
    is_some = (outputs == 0).sum() > _ZEROS * outputs.numel()
    rectified = is_some & (below == 0) & (outputs.amax() > 0)
    kinds = [torch.maximum(above.amax(), below) < _ROUNDING, rectified]
    if sums and min(outputs.shape) > 1 and len(outputs) != outputs.shape[1]:
        linear = torch.maximum((outputs.sum(0) - 1).abs().amax(), below)
        kinds.append(torch.minimum(linear, outputs.logsumexp(0).abs().amax()) < _ROUNDING)
    return torch.stack(kinds)


_ROUNDING = 0.01  # of a sum of probabilities in 16 bits
_ZEROS = 0.05  # share of the outputs that a ReLU made 0
_MOST_SAMPLES, MOST_CLASSES = 4096, 100
_REALS = torch.float16, torch.bfloat16, torch.float32, torch.float64
_NUMBERS = {*_REALS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
