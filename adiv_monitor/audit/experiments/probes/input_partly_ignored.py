"""Are there inputs, or positions, features or patches of them, that no output depends on?"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.changed_inputs import ChangedInputs, still
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.samples import first
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

SAMPLES = 12  # most samples of a batch
PARTS = 16  # most parts of an axis
GRID = 4  # number of parts along each side of images
VARIES = 0.25  # share of the samples in which a part must differ from the next one's
# Functions with a boolean mask → position and name of that argument.
MASKS = {
    "masked_fill": (1, "mask"),
    "scaled_dot_product_attention": (3, "attn_mask"),
    "multi_head_attention_forward": (14, "key_padding_mask"),
}
_AXES = {2: ("features",), 3: ("places", "features"), 4: ("channels",)}


class Part(NamedTuple):
    """A part of an input that is exchanged at once.

    Attributes:
        name: name of its axis, or of the patch.
        along: entries along the axis; None: a patch.
        entries: entries of the whole input.
    """

    name: str
    along: slice | None
    entries: tuple[slice, ...]


@asks("input-partly-ignored")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the parts whose exchange between samples changes no output, before and after training.

    Parts that are equal in nearly all samples, such as padding, are left out, and so is an input
    that is ignored as a whole, unless another is not.
    """
    batch = first(setup.batches[0], SAMPLES)
    runs = [ChangedInputs(still(fork), batch, fewest=1)
            for fork in (setup.fork_like(trained), setup.fork())]  # fmt: skip
    ignored = _ignored(runs)
    masks = {"masked": "True"} if any(_is_masked(setup.fork(), batch)) else {}
    found = []
    for number, x in enumerate(runs[0].inputs):
        parts = [part for part in _parts(x) if _varies(x[part.entries])]
        silent = [p for p in parts if all(_is_silent(run, number, p) for run in runs)]
        if len(silent) < len(parts):
            share = len(silent) / max(len(parts), 1)
            of = f"input {number}" if len(runs[0].inputs) > 1 else "the input"
            found += [
                Fact(f"{words} of {of}", {"share": share, "parts": float(len(silent))},
                     {"shape": str(tuple(x.shape)), **masks})
                for words in _joined(silent)
            ]  # fmt: skip
    return (*found, *ignored)


def _ignored(runs: list[ChangedInputs]) -> list[Fact]:
    """Return the inputs that no output depends on, if outputs depend on another one."""
    inputs = dict(enumerate(runs[0].inputs))
    varied = [number for number, x in inputs.items() if _varies(x)]
    if len(varied) < 2:
        return []
    whole = Part("", None, (slice(None),))
    silent = [n for n in varied if all(_is_silent(run, n, whole) for run in runs)]
    if len(silent) == len(varied):
        return []
    return [
        Fact(f"input '{runs[0].names[number]}'", {"share": 1.0, "parts": 1.0},
             {"shape": str(tuple(inputs[number].shape)), "whole": "True"})
        for number in silent
    ]  # fmt: skip


def _parts(x: Tensor) -> Iterator[Part]:
    names = _AXES.get(x.ndim, ())
    if x.ndim == 2 and not x.is_floating_point():
        names = ("places",)
    whole = slice(None)
    for axis, name in enumerate(names, start=1):
        for some in _ranges(x.shape[axis], PARTS):
            yield Part(name, some, (*[whole] * axis, some))
    if x.ndim == 4:
        for rows in _ranges(x.shape[2], GRID):
            for columns in _ranges(x.shape[3], GRID):
                name = f"rows {_said(rows)}, columns {_said(columns)}"
                yield Part(name, None, (whole, whole, rows, columns))


def _ranges(length: int, most: int) -> list[slice]:
    """Return the parts of an axis; none for an axis of one entry."""
    count = min(length, most)
    edges = [i * length // count for i in range(count + 1)] if length > 1 else []
    return [slice(a, b) for a, b in pairwise(edges)]


def _said(some: slice) -> str:
    last = some.stop - 1
    return f"{some.start}" if last == some.start else f"{some.start} to {last}"


def _joined(parts: list[Part]) -> list[str]:
    """Return words for the parts, with neighbours along an axis joined."""
    joined: list[tuple[str, slice | None]] = []
    for name, along, _ in parts:
        last, before = joined[-1] if joined else ("", None)
        if along is not None and before is not None and (last, before.stop) == (name, along.start):
            joined[-1] = name, slice(before.start, along.stop)
        else:
            joined.append((name, along))
    return [name if along is None else f"{name} {_said(along)}" for name, along in joined]


def _varies(part: Tensor) -> bool:
    """Return whether the part differs between samples."""
    differs = (part != part.roll(1, 0)).reshape(len(part), -1).any(1)
    return len(part) > 1 and float(differs.float().mean()) >= VARIES


def _is_silent(run: ChangedInputs, number: int, part: Part) -> bool:
    def exchanged(x: Tensor) -> Tensor:
        changed = x.clone()
        changed[part.entries] = x[part.entries].roll(1, 0)
        return changed

    own, other = run.own, run.outputs(number, exchanged)
    fitting = bool(own) and len(own) == len(other)
    return fitting and all(torch.equal(a, b) for a, b in zip(own, other, strict=True))


def _is_masked(fork: Fork, batch: Any) -> list[bool]:
    """Return for each call whether it receives a boolean mask."""
    found: list[bool] = []
    with torch.no_grad():
        see_calls(fork, lambda call: found.append(mask_of(call) is not None), batch)
    return found


def mask_of(call: Call) -> tuple[int, str, Tensor] | None:
    """Return the boolean mask that a call receives, with its position and name."""
    place, name = MASKS.get(call.name, (0, ""))
    mask = call.argument(place, name) if name else None
    return (place, name, mask) if isinstance(mask, Tensor) and mask.dtype == torch.bool else None
