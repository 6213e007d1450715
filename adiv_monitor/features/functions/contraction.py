"""Products of a weight with data, summed over shared dimensions, in any order of dimensions.

In einsum notation, every dimension of weight, data and result has a letter. The weight's letters
that

- the result lacks are features;
- the data lacks are outputs;
- both have are blocks, of which every row uses one (`BlockFeatures`); without outputs, groups.

The result's other letters are rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from torch import Tensor

from adiv_monitor.features.features import BlockFeatures, DenseFeatures, Features
from adiv_monitor.features.rows import Rows, Whole, norms, to_compute_dtype, to_device
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

    def permute(self, letters: str) -> Tensor:
        """Return the tensor with its dimensions in the order of these letters."""
        return self.tensor.permute([self.letters.index(letter) for letter in letters])

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every letter."""
        return dict(zip(self.letters, self.tensor.shape, strict=True))


def contractions(call: FunctionCall, operands: Sequence[Operand], result: str) -> list[Use]:
    """Return one use for each trained one of two operands, if the other is fixed.

    There is none if nothing is data.
    """
    if len(operands) != 2 or all(call.of_model(operand.tensor) for operand in operands):
        return []
    pairs = (operands, operands[::-1])
    found = (contraction(w, x, result) for w, x in pairs if call.is_weight(w.tensor))
    return [use for use in found if use is not None]


def contraction(
    weight: Operand, data: Operand, result: str, *, bias: Tensor | None = None
) -> Use | None:
    """Z = Σ W x + b; None if an operand has a letter twice, or one that nothing else has.

    Args:
        weight: the parameter.
        data: x.
        result: the letters of z.
        bias: a parameter (outputs,), if z's last letter is the weight's only output.
    """
    if any(len(set(operand.letters)) < len(operand.letters) for operand in (weight, data)):
        return None
    broadcast = (c for c, n in data.sizes.items() if n == 1 < weight.sizes.get(c, 1))
    data = data.squeeze("".join(broadcast))
    form = Form.of(weight, data, result)
    if set(form.inner) != (set(weight.letters) | set(data.letters)) - set(result):
        return None
    of_bias = None if bias is None else 1.0
    x = data.permute(form.rows + form.groups + form.inner)

    def features(rows: Rows) -> Features:
        sizes = form.volume(form.groups), form.volume(form.inner)
        phi = rows.take(x).reshape(rows.count, *sizes)
        if form.blocks:
            places = [rows.positions[form.rows.index(letter)] for letter in form.blocks]
            block = np.ravel_multi_index(places, [form.sizes[letter] for letter in form.blocks])
            return BlockFeatures(phi[:, 0], to_device(block, rows.device), form.volume(form.blocks))
        return DenseFeatures(phi, of_bias)

    def whole(rows: Rows) -> Whole | None:
        if form.groups:
            return None
        norm = norms(x.flatten(len(form.rows)) if form.inner else x[..., None])
        return Whole(norm.reshape(-1), of_bias or 0.0)

    def times(v: Tensor) -> Tensor:
        every = x.flatten(len(form.rows)) if form.inner else x[..., None]
        return to_compute_dtype(every) @ v

    made = Use("linear", weight.tensor, bias, features, form.layout, whole, form.shaped)
    read = form.weight, form.dropped, form.blocks, form.channels, form.inner
    return replace(made, form=read, times=None if form.blocks or form.groups else times)


@dataclass(frozen=True)
class Form:
    """The roles of the letters of a contraction.

    Attributes:
        weight: the letters of the weight.
        dropped: letters of the weight, of size one, that the data has.
        result: the letters of z.
        sizes: the size of every letter.
        rows: z's letters that are rows, with those of blocks, in z's order.
        blocks: letters of the weight that determine which block a row uses.
        channels: z's other letters.
        groups: the same, if they are groups instead of outputs.
        inner: letters that are summed over.
    """

    weight: str
    dropped: str
    result: str
    sizes: dict[str, int]
    rows: str
    blocks: str
    channels: str
    groups: str
    inner: str

    @classmethod
    def of(cls, weight: Operand, data: Operand, result: str) -> "Form":
        """Determine the roles of the letters."""
        sizes = {c: max(weight.sizes.get(c, 1), n) for c, n in data.sizes.items()}
        theirs = data.letters
        dropped = "".join(c for c, n in weight.sizes.items() if n == 1 and c in theirs)
        own = _without(weight.letters, dropped)
        both = [c for c in own if c in theirs and c in result]
        free = [c for c in own if c not in theirs and c in result]
        channels = "".join(c for c in result if c in (free or both))
        return cls(
            weight=weight.letters,
            dropped=dropped,
            result=result,
            sizes={**weight.sizes, **sizes},
            rows=_without(result, channels),
            blocks="".join(both if free else ()),
            channels=channels,
            groups="" if free else channels,
            inner="".join(c for c in theirs if c in own and c not in result),
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
        blocks = [self.volume(self.blocks)] if self.blocks else []
        return weight.reshape(*blocks, self.volume(self.channels), self.volume(self.inner))

    def volume(self, letters: str) -> int:
        """Return the number of entries along some letters."""
        return prod(self.sizes[letter] for letter in letters)


def _without(letters: str, others: str) -> str:
    return "".join(letter for letter in letters if letter not in others)
