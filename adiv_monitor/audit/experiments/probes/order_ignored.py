"""Do the outputs depend on the order of positions?"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.changed_inputs import ChangedInputs, still
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.samples import first
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

SAMPLES = 12  # most samples of a batch
_SAME = 1e-5  # share of an output's largest entry: rounding depends on the order of sums
BAGS = -1  # instead of a patch size: inputs are summed on purpose
PATCHES = ("conv2d", "unfold")  # functions whose stride may equal their kernel size


@asks("order-ignored")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the number of positions of the first input if their order changes no output.

    Outputs that are permuted in the same way, and depend on other positions too, count as
    unchanged. Positions are the second axis of tokens and of sequences, and the patches that the
    first layer cuts images into. Dropout is off. Position parameters that begin at zero are learnt,
    so the same must hold for the trained copy.
    """
    return _asked(setup, setup.fork()) and _asked(setup, setup.fork_like(trained))


def _asked(setup: Setup, fork: Fork) -> Iterable[Fact]:
    batch = first(setup.batches[0], SAMPLES)
    fork = still(fork)
    patch = patch_size(fork, batch)
    run = ChangedInputs(fork, batch)
    if not run.inputs:
        raise Untold("no input tensor has a part for each sample")
    x = run.inputs[0]
    count = places(x, patch)
    if count < 3 or patch == BAGS:
        return ()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(x.device)
    if torch.equal(x, _permuted(x, order, patch)):
        raise Untold("all positions are equal")
    own, other = run.own, run.outputs(0, lambda x: _permuted(x, order, patch))
    if not own or len(own) != len(other):
        raise Untold("the model returns no tensor")
    if all(map(_alike, own, other)):
        return (Fact("", {"places": float(count)}),)
    by_place = [(a, b) for a, b in zip(own, other, strict=True) if a.shape[1:2] == (count,)]
    if len(by_place) < len(own) or not all(_alike(a[:, order], b) for a, b in by_place):
        return ()
    one = run.outputs(0, lambda x: _first_exchanged(x, patch))
    if all(_alike(a[:, 1:], b[:, 1:]) for a, b in zip(own, one, strict=True)):
        return ()  # each position is computed independently
    return (Fact("", {"places": float(count)}),)


def patch_size(fork: Fork, batch: Any) -> int:
    """Return the patch size of the first layer that cuts images; 0: none; BAGS: bags are summed."""
    found: list[int] = []

    def look(call: Call) -> None:
        if call.name == "embedding_bag":
            found.append(BAGS)
        if not found and call.name in PATCHES and (size := patch_of(call)):
            found.append(size)

    with torch.no_grad():
        see_calls(fork, look, batch)
    return found[0] if found else 0


def patch_of(call: Call) -> int:
    """Return the size of the patches that a call cuts images into; 0 if it cuts none."""
    x = call.argument(0, "input")
    if not isinstance(x, Tensor) or x.ndim != 4:
        return 0
    if call.name == "unfold":
        kernel, stride = call.argument(1, "kernel_size"), call.argument(4, "stride", 1)
    else:
        kernel = tuple(call.argument(1, "weight").shape[2:])
        stride = call.argument(3, "stride", 1)
    sizes = {*(_pair(kernel)), *(_pair(stride))}
    size = int(next(iter(sizes)))
    fits = not (x.shape[2] % size or x.shape[3] % size)
    return size if len(sizes) == 1 and size > 1 and fits else 0


def _pair(size: Any) -> tuple[int, ...]:
    return tuple(size) if isinstance(size, (tuple, list)) else (size,)


def places(x: Tensor, patch: int) -> int:
    """Return the number of positions of one sample; 0 if it is unknown."""
    if x.ndim == 4 and patch > 0:
        return (x.shape[2] // patch) * (x.shape[3] // patch)
    is_tokens = x.ndim == 2 and not x.is_floating_point() and x.dtype != torch.bool
    return x.shape[1] if x.ndim == 3 or is_tokens else 0


def _permuted(x: Tensor, order: Tensor, patch: int) -> Tensor:
    if x.ndim != 4:
        return x[:, order]
    cut = torch.nn.functional.unfold(x, patch, stride=patch)[:, :, order]
    return torch.nn.functional.fold(cut, x.shape[2:], patch, stride=patch)


def _first_exchanged(x: Tensor, patch: int) -> Tensor:
    """Return the input with the first position taken from another sample."""
    changed = x.clone()
    if x.ndim != 4:
        changed[:, 0] = x[:, 0].roll(1, 0)
    else:
        changed[:, :, :patch, :patch] = x[:, :, :patch, :patch].roll(1, 0)
    return changed


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return float((a - b).abs().max()) <= _SAME * max(float(a.abs().max()), 1e-12)
