"""The shares that the calls of layers contribute to their parameters' gradients, from autograd.

Compared with the final `.grad`, they show for any number of sampled rows whether the gradient is
that of these calls times one factor. This fails if the loss has a penalty or uses a parameter
elsewhere, if something edits a gradient, or if each parameter is clipped by itself.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.entries import lies_as, sampled_entries
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.provenance import Provenance
from adiv_monitor.capture.weights.shards import is_shard
from adiv_monitor.capture.whole_modules.graph import edges_to_leaves


class GradientShare:
    """The share of all calls of one step in one parameter's gradient. See `Accumulated`.

    As for rows, only accumulated gradients count, in the units of the present gradient.

    Args:
        parameter: the parameter.

    Attributes:
        parameter: the parameter.
        is_known: whether all calls were followed.
        has_rows: whether the rows of each call arrived in the same pass as its contribution.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.is_known = self.has_rows = True
        self._held: Tensor | None = None  # sampled entries from earlier passes
        self._arrived: Tensor | None = None  # from the last pass
        self._backward = -1  # the graph task of the last pass
        self._accumulated = -1  # the last pass in which the layer accumulated
        self._version: int | None = None  # of the parameter, when its gradient arrived

    def arrive(self, gradient: Tensor) -> None:
        """Add a call's contribution, possibly after other parameters of the layer have theirs."""
        self._version = self.parameter._version
        if gradient.layout is not torch.strided:
            self.is_known = False
            return
        if not lies_as(gradient, self.parameter):
            gradient = torch.empty_like(self.parameter, dtype=gradient.dtype).copy_(gradient)
        entries, task = sampled_entries(gradient), torch._C._current_graph_task_id()
        if self._backward != task:
            if self._arrived is not None:
                self._close()
            self._backward = task
        # Sums are in the precision of the gradient, as in autograd.
        self._arrived = entries.clone() if self._arrived is None else self._arrived + entries

    def settle(self) -> None:
        """Do nothing: no contribution is late."""

    def reset(self) -> None:
        """Drop the accumulated entries, because the gradient was reset."""
        self._held = None
        if not self._is_now:
            self._arrived = None

    def rescale(self, factor: Tensor) -> None:
        """Scale the accumulated entries by a factor."""
        if not self._is_now:
            self._close()
        if self._held is not None:
            self._held = self._held * factor.to(self._held.dtype)

    def fold(self) -> None:
        """Add the gradient of this pass, which is being accumulated."""
        task = torch._C._current_graph_task_id()
        if self._backward != task:
            self._close()
        self._accumulated = task

    def entries(self) -> Tensor | None:
        """Return sampled entries of the calls' total contribution in memory order.

        None if it is not known.
        """
        held = self.parameter.grad
        if not self.is_known or held is None or not lies_as(held, self.parameter):
            return None
        if self._accumulated < 0:  # assigned by hand, from the last pass
            return None if self._arrived is None else self._arrived.flatten()
        self._close()
        return (
            torch.zeros_like(sampled_entries(held)).flatten()
            if self._held is None
            else self._held.flatten()
        )

    @property
    def has_arrived(self) -> bool:
        """Whether any contribution arrived."""
        return self._version is not None

    @property
    def is_moved(self) -> bool:
        """Whether something wrote to the parameter since its gradient last arrived."""
        return self._version is not None and self._version != self.parameter._version

    @property
    def _is_now(self) -> bool:
        return self._backward == torch._C._current_graph_task_id()

    def _close(self) -> None:
        """Add the contributions of the last pass, which is over."""
        arrived, self._arrived = self._arrived, None
        if arrived is None or self._backward != self._accumulated:
            return
        arrived = arrived.to(self.parameter.dtype)  # a cast may follow
        self._held = arrived if self._held is None else self._held + arrived


def total_of(shares: Iterable[GradientShare]) -> Tensor | None:
    """Return the sum of the `entries` of shares in one gradient; None if any is not known."""
    total: Tensor | None = None
    for share in shares:
        entries = share.entries()
        if entries is None:
            return None
        total = entries if total is None else total + entries
    return total


class Shares:
    """The shares of layers in the gradients of their parameters.

    Args:
        provenance: the provenance of tensors.
    """

    def __init__(self, provenance: Provenance) -> None:
        self._provenance = provenance
        self._of_layers: dict[Layer, list[GradientShare]] = {}
        # By the ids of a layer's first parameter and of the parameter with the gradient.
        self._led: dict[int, dict[int, GradientShare]] = defaultdict(dict)
        self._in_gradient: dict[int, list[GradientShare]] = defaultdict(list)  # by id of it

    def of(self, layer: Layer) -> list[GradientShare]:
        """Return the shares in the layer's parameter gradients, or none for sharded parameters."""
        if layer not in self._of_layers:
            self._of_layers[layer] = self._new(layer)
        return self._of_layers[layer]

    def _new(self, layer: Layer) -> list[GradientShare]:
        stands_in = self._provenance.stand_in
        if self._provenance.any_apart and any(
            is_shard(p) or stands_in(p) is not None for p in layer.parameters
        ):
            return []
        # A layer's gradients are accumulated and zeroed together with that of its first parameter.
        keys = list(map(id, layer.parameters))
        known = self._led[keys[0]]
        for key, parameter in zip(keys, layer.parameters, strict=True):
            if key not in known:
                known[key] = GradientShare(parameter)
                self._in_gradient[key].append(known[key])
        return [known[key] for key in keys]

    def in_gradients(self, shares: Iterable[GradientShare]) -> list[list[GradientShare]]:
        """Return, for each share, all that are, or may be, part of the same gradient.

        Layers with other first parameters may have some, too.
        """
        found: list[list[GradientShare]] = []
        for share in shares:
            every = self._in_gradient[id(share.parameter)]
            if every[1:]:
                every = [x for x in every if x.has_arrived or not x.is_known] or [share]
            found += (every,)
        return found

    def led_by(self, key: int) -> list[GradientShare]:
        """Return the shares of the layers whose first parameter has this id."""
        return [*self._led[key].values()]


# The contributions of one node: the share, the index of the edge to the parameter, and the nodes
# on the way that reshape it (see `Edge`).
Handed = list[tuple[GradientShare, int, Sequence[Any]]]
Arrive = Callable[[Handed, Sequence[Tensor | None], object], None]


def follow(
    outputs: Iterable[Tensor],
    inputs: Collection[Any],
    contributions: Sequence[GradientShare],
    path: str,
    arrive: Arrive,
    watched: Container[str],
) -> list[RemovableHandle]:
    """Observe a call's contributions, at each node once, since several layers may share a node.

    Args:
        outputs: the result of the call.
        inputs: the nodes that produced the call's inputs other than weights.
        contributions: the shares in its parameters' gradients; they become unknown where the
            call contributes nothing.
        path: the path of the layer.
        arrive: receives a node's contributions and gradients.
        watched: the paths of the layers whose hooks are not idle by now.
    """
    wanted = {id(found.parameter): found for found in contributions}
    nodes: dict[Any, Handed] = defaultdict(list)
    reached: dict[int, None] = {}
    for node, number, leaf, moves in edges_to_leaves(outputs, inputs):
        key = id(leaf)
        if key in wanted:
            reached[key] = None
            nodes[node] += ((wanted[key], number, moves),)
    handles = []
    for node, handed in nodes.items():
        hook = _Following(arrive, handed)  # it must not hold the node, which holds it
        hook.path, hook.watched = path, watched
        handle = node.register_hook(hook)
        hooks = handle.hooks_dict_ref()
        if len(hooks) > 1:
            for other in hooks.values():
                is_other = type(other) is _Following and other is not hook
                if is_other and other.watched is watched and other.path in watched:
                    hook.leave_to(other)
        handles.append(handle)
    for key in wanted.keys() - reached.keys():
        wanted[key].is_known = False
    return handles


class _Following(partial[None]):
    """The hook of a layer's call on a node, with the contributions that it observes."""

    path: str  # of the layer
    watched: Container[str]  # of the same step of the same monitor, see `follow`

    def leave_to(self, other: "_Following") -> None:
        """Remove contributions that another call's hook on the same node observes already."""
        mine: Handed = self.args[-1]
        observed = {(id(share.parameter), edge) for share, edge, _ in other.args[-1]}
        mine[:] = [x for x in mine if (id(x[0].parameter), x[1]) not in observed]
