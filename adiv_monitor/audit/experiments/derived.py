"""Which tensors of a pass derive, entry by entry, from the result of some function."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call

MULTIPLIES = ("mul", "multiply", "__mul__", "__rmul__")
# Functions that do more than move, mask or map entries one by one.
PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum", "mm", "linear")
LAYERS = ("bilinear", "embedding", "scaled_dot_product_attention", "multi_head_attention_forward",
          "lstm", "gru", "rnn_tanh", "rnn_relu")  # fmt: skip


class Derived:
    """Follows tensors through a pass, as its calls are reported in order.

    A tensor derives from a call if it is its result, or the result of a function of a tensor that
    derives from it: a part of that tensor, or one with as many entries, by a view, a permutation, a
    mask, a scaling or an activation. Products, layers and convolutions end the chain.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[Tensor, Call]] = {}  # tensors are held so that ids stay unique

    def begin(self, call: Call) -> None:
        """Let the results of a call derive from it."""
        for x in flat(call.result):
            self._of[id(x)] = x, call

    def follow(self, call: Call) -> None:
        """Note the results of a call that derive from what its arguments derive from."""
        if call.name in (*PRODUCTS, *LAYERS) or call.name.startswith("conv"):
            return
        for before in given(call):
            if (source := self.source(before)) is None:
                continue
            for x in flat(call.result):
                is_part = call.name == "__getitem__" or x.numel() == before.numel()
                if is_part and x is not before:
                    self._of.setdefault(id(x), (x, source))

    def source(self, x: object) -> Call | None:
        """Return the call that a tensor derives from; None: none."""
        found = self._of.get(id(x))
        return None if found is None else found[1]


def given(call: Call) -> list[Tensor]:
    """Return the tensors in a call's arguments."""
    return [*flat([*call.args, *call.kwargs.values()])]


def flat(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from flat([*values.values()])
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from flat(value)
