"""What the calls of layers hand on to the gradients of their parameters, as autograd tells it.

Next to what `.grad` holds in the end it tells, however few rows are looked at, whether that is the
gradient of these calls times one factor: not where the loss has a penalty or uses a parameter
elsewhere, where something edits a gradient, or where each parameter's is clipped by itself.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.updates import lies_as, sampled_entries
from adiv_monitor.capture.whole_modules.graph import edges_to_leaves


class GradientShare:
    """To one parameter's gradient, of all calls of one step. See `Accumulated`.

    As for rows, only what is accumulated counts, in the units of the gradient that is held.

    Args:
        parameter: the parameter.
        whole: all entries are kept; else some.

    Attributes:
        parameter: the parameter.
        is_known: all calls were followed.
        has_rows: and the rows of each came in the same pass as what it handed on.
        is_joint: a node hands on what several layers' calls contribute together.
    """

    def __init__(self, parameter: nn.Parameter, *, whole: bool = False) -> None:
        self.parameter = parameter
        self.is_known = self.has_rows = True
        self.is_joint = False
        self._kept = _all if whole else sampled_entries
        self._held: Tensor | None = None  # some entries of what earlier passes have left
        self._arrived: Tensor | None = None  # of the last pass
        self._backward = -1  # which that was
        self._accumulated = -1  # in which pass the layer's gradients last were
        self._scaled: tuple[int, Tensor] | None = None  # in which pass by hooks, and by what factor
        self._version: int | None = None  # of the parameter, when it was handed its gradient

    def arrive(self, gradient: Tensor) -> None:
        """A call hands this on, maybe after other parameters of the layer have got theirs."""
        self._version = self.parameter._version
        if gradient.layout is not torch.strided:
            self.is_known = False
            return
        if not lies_as(gradient, self.parameter):
            gradient = torch.empty_like(self.parameter, dtype=gradient.dtype).copy_(gradient)
        entries = self._kept(gradient)
        if not self._is_now:
            self._close()
            self._backward = torch._C._current_graph_task_id()
        # As autograd does it, in the precision of the gradient.
        self._arrived = entries.clone() if self._arrived is None else self._arrived + entries

    def settle(self) -> None:
        """Nothing of it is late."""

    def reset(self) -> None:
        """What had been accumulated is gone."""
        self._held = None
        if not self._is_now:
            self._arrived = None

    def rescale(self, factor: Tensor) -> None:
        """What had been accumulated was multiplied by a factor."""
        if not self._is_now:
            self._close()
        if self._held is not None:
            self._held = _times(self._held, factor)

    def rescale_arrived(self, factor: Tensor) -> None:
        """What is about to be accumulated is multiplied by a factor."""
        self._scaled = torch._C._current_graph_task_id(), factor

    def fold(self) -> None:
        """A gradient is accumulated: that of this pass."""
        if not self._is_now:
            self._close()
        self._accumulated = torch._C._current_graph_task_id()

    def entries(self) -> Tensor | None:
        """Some entries of what all calls have contributed, as they lie in the gradient.

        None if that is not known.
        """
        held = self.parameter.grad
        if not self.is_known or held is None or not lies_as(held, self.parameter):
            return None
        if self._accumulated < 0:  # set by hand, from the last pass
            return None if self._arrived is None else self._arrived.flatten()
        self._close()
        return (
            torch.zeros_like(self._kept(held)).flatten()
            if self._held is None
            else self._held.flatten()
        )

    @property
    def is_moved(self) -> bool:
        """Whether something wrote to the parameter since it was last handed its gradient."""
        return self._version is not None and self._version != self.parameter._version

    @property
    def _is_now(self) -> bool:
        return self._backward == torch._C._current_graph_task_id()

    def _close(self) -> None:
        """The last pass is over."""
        arrived, self._arrived = self._arrived, None
        if arrived is None or self._backward != self._accumulated:
            return
        if self._scaled is not None and self._scaled[0] == self._backward:
            arrived = _times(arrived, self._scaled[1])
        arrived = arrived.to(self.parameter.dtype)  # a cast may be behind it
        self._held = arrived if self._held is None else self._held + arrived


def _all(gradient: Tensor) -> Tensor:
    return gradient


def _times(entries: Tensor, factor: Tensor) -> Tensor:
    return entries * factor.to(entries.dtype)


# What a node hands on: to the gradient of which parameter, by which of its edges, and the nodes
# that move it on the way (see `Edge`).
Handed = list[tuple[GradientShare, int, Sequence[Any]]]
Arrive = Callable[[Handed, Sequence[Tensor | None], object], None]


def follow(
    outputs: Iterable[Tensor],
    inputs: Collection[Any],
    contributions: Sequence[GradientShare],
    arrive: Arrive,
) -> list[RemovableHandle]:
    """Look at what a call hands on to parameters, at each node once: several layers may share it.

    Args:
        outputs: what the call gave.
        inputs: the nodes that made what it was given, but for weights.
        contributions: to the gradients of its parameters; they become unknown if it hands on none.
        arrive: gets what a node hands on, and to where; of its arguments the first is the layer.
    """
    wanted = {id(found.parameter): found for found in contributions}
    nodes: dict[Any, Handed] = {}
    reached = set[int]()
    for edge in edges_to_leaves(outputs, inputs):
        contribution = wanted.get(id(edge.leaf))
        if contribution is not None:
            reached.add(id(edge.leaf))
            nodes.setdefault(edge.node, []).append((contribution, edge.number, edge.moves))
    handles = []
    for node, handed in nodes.items():
        hook = _Following(arrive, handed)  # it must not hold the node, which holds it
        handle = node.register_hook(hook)
        hooks = handle.hooks_dict_ref()
        if len(hooks) > 1:
            for other in hooks.values():
                if type(other) is _Following and other is not hook:
                    hook.leave_to(other)
        handles.append(handle)
    for key, contribution in wanted.items():
        if key not in reached:
            contribution.is_known = False
    return handles


class _Following(partial[None]):
    """The hook of a call on a node: what to call, and what the node hands on."""

    def leave_to(self, other: "_Following") -> None:
        """What another call's hook on the same node looks at is looked at once."""
        mine: Handed = self.args[-1]
        theirs = [(contribution, number) for contribution, number, _ in other.args[-1]]
        for entry in [entry for entry in mine if entry[:2] in theirs]:
            mine.remove(entry)
            entry[0].is_joint |= self.args[0] != other.args[0]
