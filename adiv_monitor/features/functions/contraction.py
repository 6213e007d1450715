"""Products of a weight with data, summed over shared dimensions, in any order of dimensions.

In einsum notation, every dimension of weight, data and result has a letter. The weight's letters
that

- the result lacks are features (φ is repeated along those that the data lacks too);
- the data lacks are outputs;
- both have are blocks, of which every row uses one (`BlockFeatures`); without outputs, groups.

The result's other letters are rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from string import ascii_letters

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.features.features import BlockFeatures, DenseFeatures, Features
from adiv_monitor.features.rows import (
    Rows,
    Whole,
    compute_dtype,
    norms,
    to_compute_dtype,
    to_device,
)
from adiv_monitor.features.uses import FunctionCall, Use


@dataclass(frozen=True)
class Operand:
    """A tensor, and a letter for each of its dimensions."""

    tensor: Tensor
    letters: str

    def squeeze(self, letters: str) -> "Operand":
        """Remove some letters of size one."""
        dims = [d for d, letter in enumerate(self.letters) if letter in letters]
        return Operand(self.tensor.squeeze(dims), _without(self.letters, letters))

    def sum(self, letters: str) -> "Operand":
        """Sum over some letters."""
        if not letters:
            return self
        dims = [self.letters.index(letter) for letter in letters]
        summed = self.tensor.sum(dims, dtype=compute_dtype(self.tensor))
        return Operand(summed, _without(self.letters, letters))

    def permute(self, letters: str) -> Tensor:
        """Return the tensor with its dimensions in the order of these letters."""
        return self.tensor.permute([self.letters.index(letter) for letter in letters])

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every letter."""
        return dict(zip(self.letters, self.tensor.shape, strict=True))


def contractions(call: FunctionCall, operands: Sequence[Operand], result: str) -> list[Use]:
    """Return one use for each trained operand, with the others fixed; none if nothing is data."""
    theirs = [call.of_model(operand.tensor) for operand in operands]
    if all(theirs):
        return []
    found = (
        contraction(operand, [*operands[:i], *operands[i + 1 :]], result)
        for i, operand in enumerate(operands)
        if call.is_weight(operand.tensor)
    )
    return [use for use in found if use is not None]


def contraction(
    weight: Operand,
    others: Sequence[Operand],
    result: str,
    *,
    bias: Tensor | None = None,
) -> Use | None:
    """Z = Σ W x₁ x₂ … + b; None if an operand has a letter twice.

    Args:
        weight: the parameter.
        others: the other operands.
        result: the letters of z.
        bias: a parameter (outputs,), if z's last letter is the weight's only output.
    """
    if any(len(set(o.letters)) < len(o.letters) for o in (weight, *others)):
        return None
    form = Form.of(weight, others, result)
    of_bias = None if bias is None else 1.0

    def features(rows: Rows) -> Features:
        phi = form.phi(rows)
        if form.blocks:
            block = to_device(form.block_of(rows), rows.device)
            return BlockFeatures(phi[:, 0], block, form.block_count)
        return DenseFeatures(phi, of_bias)

    def whole() -> Whole | None:
        found = form.whole()
        return None if found is None else Whole(found, of_bias or 0.0)

    bare = replace(form, data=())  # a step keeps layout and shape: the data would live as long
    return Use("linear", weight.tensor, bias, features, bare.layout, whole, bare.shaped)


@dataclass(frozen=True)
class Form:
    """The roles of the letters of a contraction.

    Attributes:
        weight: the letters of the weight.
        dropped: letters of the weight, of size one, that other operands have.
        data: the other operands, already summed over letters that nothing else has.
        result: the letters of z.
        sizes: the size of every letter.
        rows: z's letters that are rows, with those of blocks, in z's order.
        blocks: letters of the weight that determine which block a row uses.
        channels: z's other letters.
        grouped: whether the channels are groups instead of outputs.
        inner: letters of the weight that are summed over.
        absent: the letters at the end of `inner` that the data lacks.
    """

    weight: str
    dropped: str
    data: tuple[Operand, ...]
    result: str
    sizes: dict[str, int]
    rows: str
    blocks: str
    channels: str
    grouped: bool
    inner: str
    absent: str

    @classmethod
    def of(cls, weight: Operand, others: Sequence[Operand], result: str) -> "Form":
        """Determine the roles of the letters."""
        sizes: dict[str, int] = {}
        for operand in (weight, *others):
            for letter, size in operand.sizes.items():
                sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
        theirs = _letters(others)
        dropped = "".join(c for c, n in weight.sizes.items() if n == 1 and c in theirs)
        own = _without(weight.letters, dropped)
        data = tuple(_alone(own, others, result))
        theirs = _letters(data)
        both = [c for c in own if c in theirs and c in result]
        free = [c for c in own if c not in theirs and c in result]
        blocks = "".join(both if free else ())
        channels = "".join(c for c in result if c in (free or both))
        absent = "".join(c for c in own if c not in result and c not in theirs)
        inner = "".join(dict.fromkeys(c for c in theirs if c in own and c not in result))
        return cls(
            weight=weight.letters,
            dropped=dropped,
            data=data,
            result=result,
            sizes=sizes,
            rows=_without(result, channels),
            blocks=blocks,
            channels=channels,
            grouped=not free,
            inner=inner + absent,
            absent=absent,
        )

    def layout(self, tensor: Tensor) -> Tensor:
        """Return a tensor shaped like z with its rows first and its channels last."""
        if self.rows + self.channels != self.result:
            tensor = Operand(tensor, self.result).permute(self.rows + self.channels)
        if not self.channels:
            return tensor[..., None]
        return tensor.flatten(len(self.rows)) if len(self.channels) > 1 else tensor

    def shaped(self, weight: Tensor) -> Tensor:
        """Return the weight as (blocks, outputs, features), or (outputs or groups, features)."""
        operand = Operand(weight, self.weight).squeeze(self.dropped)
        weight = operand.permute(self.blocks + self.channels + self.inner)
        outputs, width = self._volume(self.channels), self._volume(self.inner)
        if self.blocks:
            return weight.reshape(self.block_count, outputs, width)
        return weight.reshape(outputs, width)

    def _volume(self, letters: str) -> int:
        return prod(self.sizes[letter] for letter in letters)

    @property
    def block_count(self) -> int:
        """Number of blocks."""
        return self._volume(self.blocks)

    def block_of(self, rows: Rows) -> np.ndarray:
        """Return the index of the block that every row uses."""
        places = [rows.positions[self.rows.index(letter)] for letter in self.blocks]
        return np.ravel_multi_index(places, [self.sizes[letter] for letter in self.blocks])

    # --- the data --------------------------------------------------------------------------------

    @property
    def _groups(self) -> str:
        return self.channels if self.grouped else ""

    @property
    def _present(self) -> str:
        return self._groups + _without(self.inner, self.absent)

    def phi(self, rows: Rows) -> Tensor:
        """Return Φ of some rows, (rows, groups, features)."""
        r = _another(self.weight + self.result + _letters(self.data))
        taken = [self._take(rows, operand, r) for operand in self.data]
        if len(taken) == 1:
            phi = taken[0].permute(r + self._present)
        else:
            terms = ",".join(operand.letters for operand in taken)
            phi = torch.einsum(f"{terms}->{r}{self._present}", [o.tensor for o in taken])
        groups = self._volume(self._groups)
        return self._repeated(phi).reshape(rows.count, groups, self._volume(self.inner))

    def _take(self, rows: Rows, operand: Operand, r: str) -> Operand:
        """Gather the operand's part of each row; r is the letter of rows."""
        places = [c for c in self.rows if c in operand.letters]
        rest = _without(operand.letters, "".join(places))
        tensor = operand.permute("".join(places) + rest)
        if len(places) == len(self.rows):
            return Operand(rows.take(tensor), r + rest)
        if not places:
            return Operand(to_compute_dtype(tensor), rest)
        index = np.stack([rows.positions[self.rows.index(c)] for c in places])
        return Operand(to_compute_dtype(tensor[tuple(to_device(index, rows.device))]), r + rest)

    def _repeated(self, tensor: Tensor) -> Tensor:
        """Repeat a tensor along the features that the data lacks, which are all equal."""
        if not self.absent:
            return tensor
        sizes = [self.sizes[letter] for letter in self.absent]
        whole = tensor[(..., *(None for _ in sizes))]
        return whole.expand(*tensor.shape, *sizes)

    def whole(self) -> Tensor | None:
        """Return ‖φ‖ of all rows, (rows,); None with groups, or sums inside the data."""
        summed_inside = set(_letters(self.data)) - set(self.rows + self._present)
        if self._groups or summed_inside:
            return None
        if len(self.data) == 1:
            x = self.data[0].permute(self.rows + self._present)
            norm = norms(x.flatten(len(self.rows)) if self._present else x[..., None])
        else:
            terms = ",".join(operand.letters for operand in self.data)
            each = [to_compute_dtype(operand.tensor).square() for operand in self.data]
            norm = torch.einsum(f"{terms}->{self.rows}", each).sqrt_()
        found: Tensor = norm.reshape(-1) * float(self._volume(self.absent)) ** 0.5
        return found


def _alone(own: str, others: Sequence[Operand], result: str) -> Iterator[Operand]:
    """Yield the data without shared letters of size one, summed over letters of its own."""
    others = list(others)
    for i, operand in enumerate(others):
        elsewhere = own + _letters(others[:i] + others[i + 1 :])
        small = (c for c, n in operand.sizes.items() if n == 1 and c in elsewhere)
        others[i] = operand.squeeze("".join(small))
    for i, operand in enumerate(others):
        elsewhere = own + result + _letters(others[:i] + others[i + 1 :])
        yield operand.sum("".join(c for c in operand.letters if c not in elsewhere))


def _letters(operands: Sequence[Operand]) -> str:
    return "".join(operand.letters for operand in operands)


def _without(letters: str, others: str) -> str:
    return "".join(letter for letter in letters if letter not in others)


def _another(letters: str) -> str:
    """Return an unused letter."""
    return next(letter for letter in ascii_letters if letter not in letters)
