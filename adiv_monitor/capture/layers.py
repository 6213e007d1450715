"""The layers found in one step, with their parameters, rows and gradients."""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor, nn

from adiv_monitor.capture.accumulation import Accumulated, Accumulation
from adiv_monitor.capture.context import Context
from adiv_monitor.capture.gradient_shares import GradientShare
from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.hook import Hook, holds_memory, trains
from adiv_monitor.capture.layer_rows import Call, Chooser, LayerRows
from adiv_monitor.capture.names import Names
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.shard_accumulation import ShardAccumulation, is_zero
from adiv_monitor.capture.weights.pieces import ConcatenatedParameters, Piece, Source, overlap
from adiv_monitor.capture.weights.provenance import Provenance
from adiv_monitor.capture.weights.shards import is_shard
from adiv_monitor.capture.world import world_size
from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.uses import Use, shape_alike
from adiv_monitor.rerun.thread import ThreadState


@dataclass(frozen=True, eq=False)
class Passing:
    """A call of a layer that is not due in this step and is not watched.

    Attributes:
        layer: the layer.
        forward: the number of the module's forward call in which it was made.
    """

    layer: Layer
    forward: int


class _Pass(threading.local):
    """The backward pass that runs in a thread.

    Attributes:
        task: the number of its graph task.
        trains: whether it belongs to a training step.
        is_alone: whether there is one rank.
        state: torch's settings in its hooks.
    """

    def __init__(self) -> None:
        self.task = -1
        self.trains = False
        self.is_alone = True
        self.state = ThreadState()

    def begins(self, task: int) -> None:
        """Read what holds for the whole pass."""
        self.trains = False
        self.is_alone = world_size() == 1
        self.task, self.state, self.trains = task, ThreadState(), trains(None)


class Layers:
    """Finds the layer that a use belongs to, or creates it.

    Args:
        names: the names of layers.
        provenance: the provenance of tensors.
        chooser: chooses rows.
        context: the run around the step.
        is_due: whether a layer is due in this step; the others are found, but not watched.

    Attributes:
        found: the layers found so far, by path.
        rows: the rows of the watched layers, by path.
        replacements: path of a layer → path of the layer whose measurement replaces its own.
    """

    def __init__(
        self,
        names: Names,
        provenance: Provenance,
        chooser: Chooser,
        context: Context,
        is_due: Callable[[Layer], bool] = lambda layer: True,
    ) -> None:
        self.found: dict[str, Layer] = {}
        self.rows: dict[str, LayerRows] = {}
        self.replacements: dict[str, str] = {}
        self.names = names
        self.provenance = provenance
        self._chooser = chooser
        self.context = context
        self._guard = context.guard
        self._calls, self._attention = context.calls, context.attention
        self._is_due = is_due
        self._accumulated: dict[int, Accumulation] = {}  # by id of a parameter
        self._contributed: dict[int, dict[int, GradientShare]] = defaultdict(dict)  # by two ids
        self._in_all: dict[int, list[GradientShare]] = {}  # by id of a parameter
        self._shares: dict[Layer, list[GradientShare]] = {}
        # The share that each of several layers contributes to one parameter, by path and by id.
        self._own: dict[str, dict[int, GradientShare]] = defaultdict(dict)
        self._not_kept: set[str] = set()  # paths of layers that contributed before others were seen
        self._sharing: set[str] | None = None  # paths of layers that share parameters
        self._passing: dict[str, dict[Call | Passing, None]] = defaultdict(dict)  # by path
        # By number of a forward call; the references are weak because `rows` owns the calls.
        self._made_in: dict[int, list[weakref.ref[Call | Passing]]] = defaultdict(list)
        self._last_forward = -1
        self._led: dict[int, list[str]] = defaultdict(list)  # by id of the first parameter, paths
        self._verdict = (-1, False)
        self._verdict_of_shards = (-1, False)
        self._running = _Pass()
        self._awaited = -1  # the backward pass for whose end a callback is queued
        self._active = True  # hooks in graphs that are already built outlive their removal

    def detach(self) -> None:
        """Remove every hook; hooks in graphs that are already built become inactive."""
        self._active = False
        call_all(*(accumulated.remove for accumulated in self._accumulated.values()))
        self._accumulated.clear()  # breaks a cycle that would keep gradients alive

    # --- finding ---------------------------------------------------------------------------------

    def of(self, use: Use, known: Layer | str | None = None) -> Layer | None:
        """Return the layer that a use belongs to; None if none of its parameters is measured.

        Args:
            use: the use.
            known: the layer or its path, if already known.
        """
        if isinstance(known, Layer):
            found = self.found.get(known.path)
            if found is None:
                return self._follow(known)
            if found is known:
                return known
            known = known.path
        weight, bias = self.provenance.source(use.weight), self.provenance.source(use.bias)
        lead = weight or bias
        if lead is None:
            return None
        names = self.names.of(use, lead) if known is None else [known]
        return self._find(names, use, weight, bias)

    def of_whole(self, module: nn.Module, parameters: list[nn.Parameter]) -> Layer | None:
        """Return the layer that stands for a module as a whole with respect to these parameters."""
        source = ConcatenatedParameters([self.provenance.pieces.of(p) for p in parameters], module)
        use = Use("module", None, None, _no_features)
        return self._find(self.names.of_whole(module, parameters), use, source, None)

    def _find(
        self, names: Iterable[str], use: Use, weight: Source | None, bias: Source | None
    ) -> Layer | None:
        """Return the first named layer with the same form and sources, or create a new one."""
        path = ""
        for path in names:
            known = self.found.get(path)
            if known is None:
                return self._new(path, use, weight, bias)
            made = known.kind, known.form, _identity(known.weight, known.bias)
            alike = made == (use.kind, use.form, _identity(weight, bias))
            if alike and shape_alike(known.shaped, use.shaped, use.weight):
                return known.made_of(weight, bias)
        raise ValueError(f"'{path}' uses other parameters at every call")

    def _new(self, path: str, use: Use, weight: Source | None, bias: Source | None) -> Layer | None:
        lead = weight or bias
        assert lead is not None
        parameter = lead.pieces[0].parameter
        place = self.names.place(id(parameter))
        order, module = self.names.position[place.full_name], self.names.owner(place)
        if isinstance(weight, ConcatenatedParameters) and len(weight.pieces) > 1:
            module = weight.through
        return self._follow(
            Layer(path, module, use.kind, weight, bias, use.shaped, order, use.form)
        )

    def _follow(self, layer: Layer) -> Layer:
        """Register a layer that was found, and watch it if it is due."""
        path, parameter = layer.path, layer.pieces[0].parameter
        key = id(parameter)
        self.found[path] = layer
        self._sharing = None
        self._led[key].append(path)
        if self.is_off(path) or self.waits(layer):
            return layer
        self.rows[path] = LayerRows(self._chooser, path)
        if key not in self._accumulated:
            self._accumulated[key] = self._accumulation(parameter)
            self._accumulated[key].attach()
        return layer

    def _accumulation(self, parameter: nn.Parameter) -> Accumulation:
        stand_in = self.provenance.stand_in(parameter)
        if stand_in is None:
            return Accumulation(parameter, self)
        return ShardAccumulation(parameter, stand_in, self, self.provenance.waiting(parameter))

    # --- calls -----------------------------------------------------------------------------------

    def new_call(
        self, layer: Layer, shape: tuple[int, ...], device: torch.device, forward: int
    ) -> Call:
        """Create the next call of a watched layer and choose its rows.

        Args:
            layer: the layer.
            shape: the shape of z without its channels.
            device: the device of z.
            forward: the number of the module's forward call in which it is made.
        """
        call = Call(layer, self.rows[layer.path].choose(shape, device))
        call.place = None if self._calls is None else self._calls.place(layer.path)
        call.forward = forward
        self._was_made(call)
        return call

    def _was_made(self, call: Call | Passing) -> None:
        self._made_in[call.forward].append(weakref.ref(call))
        self._last_forward = max(self._last_forward, call.forward)

    def pass_by(self, layer: Layer, forward: int) -> None:
        """Record a call of a layer that is not due, in the forward call with this number."""
        if self.waits(layer):
            passing = Passing(layer, forward)
            self._passing[layer.path][passing] = None
            self._was_made(passing)

    def waits(self, layer: Layer) -> bool:
        """Return whether a layer is unwatched because it is not due in this step."""
        return not self._is_due(layer)

    def calls_since(self, forward: int) -> list[Call | Passing]:
        """Return the calls made in the forward call with this number and in later ones."""
        made = (self._made_in.get(number, ()) for number in range(forward, self._last_forward + 1))
        calls = (reference() for references in made for reference in references)
        return [call for call in calls if call is not None and self._stands(call)]

    def _stands(self, call: Call | Passing) -> bool:
        """Return whether a call has not been withdrawn."""
        path = call.layer.path
        if isinstance(call, Passing):
            return call in self._passing.get(path, ())
        return path in self.rows and call in self.rows[path].calls

    def replace(self, calls: Sequence[Call | Passing], path: str) -> None:
        """Replace the calls by the measurement of another layer."""
        for replaced in self.withdraw(calls):
            later = {p: path for p, by in self.replacements.items() if by == replaced}
            self.replacements |= {**later, replaced: path}

    def withdraw(self, calls: Sequence[Call | Passing]) -> list[str]:
        """Remove calls that turned out not to be uses, and return the paths of their layers."""
        by_path: dict[str, list[Call | Passing]] = defaultdict(list)
        for call in calls:
            by_path[call.layer.path].append(call)
        for path, of_layer in by_path.items():
            rows = self.rows.get(path)
            if rows is not None:
                rows.withdraw(call for call in of_layer if isinstance(call, Call))
                if not rows.calls:
                    self.forget(path)
                    if self._calls is not None:
                        self._calls.forget(path)
            elif path in self.found:
                for call in of_layer:
                    self._passing[path].pop(call, None)
                if not self._passing[path]:
                    self.forget(path)
        return list(by_path)

    def forget(self, path: str) -> None:
        """Remove a layer that turned out not to exist."""
        lead = self.found.pop(path).pieces[0].parameter
        self._sharing = None
        self._led[id(lead)].remove(path)
        self.rows.pop(path, None)

    # --- gradients -------------------------------------------------------------------------------

    def accumulation_of(self, layer: Layer) -> Accumulation:
        """Return the gradient accumulation of the layer's first parameter."""
        return self._accumulated[id(layer.parameters[0])]

    def contributions_of(self, layer: Layer) -> list[GradientShare]:
        """Return the shares in the layer's parameter gradients, or none for sharded parameters."""
        if layer not in self._shares:
            self._shares[layer] = self._new_shares(layer)
        return self._shares[layer]

    def _new_shares(self, layer: Layer) -> list[GradientShare]:
        if self.provenance.any_apart and any(
            is_shard(p) or self.provenance.stand_in(p) is not None for p in layer.parameters
        ):
            return []
        # A layer's gradients are accumulated and zeroed together with that of its first parameter.
        keys = list(map(id, layer.parameters))
        known = self._contributed[keys[0]]
        for key, parameter in zip(keys, layer.parameters, strict=True):
            if key not in known:
                share = known[key] = GradientShare(parameter)
                if key not in self._in_all:
                    self._in_all[key] = [share]
                else:
                    self._in_all[key].append(share)
                    for other in self._in_all[key]:
                        other.is_only = False
        return [known[key] for key in keys]

    def in_gradient_of(self, share: GradientShare) -> list[GradientShare]:
        """Return the shares that are, or may be, part of the same gradient as this one.

        Layers with other first parameters may have some, too.
        """
        every = self._in_all[id(share.parameter)]
        return [x for x in every if x.has_arrived or not x.is_known] or [share]

    def keeps_own_contributions(self, path: str) -> bool:
        """Return whether to keep a layer's own contributions: others use its parameters, too.

        If not, this is recorded, for contributions that were not kept can't be had later.
        """
        if self._sharing is None:
            self._sharing = self.shared(set(self.found.values()), ())
        if path in self._sharing:
            return True
        self._not_kept.add(path)
        return False

    def own_contribution(self, path: str, parameter: nn.Parameter) -> GradientShare:
        """Return the share of one of several layers that use a parameter.

        The share has all entries, so it takes as much memory as a gradient.
        """
        own = self._own[path]
        if id(parameter) not in own:
            own[id(parameter)] = GradientShare(parameter, whole=True)
        return own[id(parameter)]

    def own_gradient(self, layer: Layer) -> dict[int, Tensor] | None:
        """Return the layer's own contributions to its pieces by key, or None if unknown."""
        every, own = self.contributions_of(layer), self._own.get(layer.path, {})
        is_known = all(
            contribution.is_known and not contribution.is_joint for contribution in every
        )
        if not (every and is_known and layer.is_direct) or layer.path in self._not_kept:
            return None
        found: dict[int, Tensor] = {}
        for piece in layer.pieces:
            contribution = own.get(id(piece.parameter))
            entries = None if contribution is None else contribution.entries()
            if entries is None:
                return None
            found[piece.key] = piece.of(entries.view(piece.parameter.shape))
        return found

    def users(self, parameter: nn.Parameter) -> list[Accumulated]:
        """Return the rows, shares and attention rows that depend on a parameter's gradient."""
        key = id(parameter)
        led = self._led[key]
        found: list[Accumulated] = [self.rows[path] for path in led if path in self.rows]
        found += self._contributed[key].values()
        for path in led if self._own else ():
            found += self._own.get(path, {}).values()
        if self._attention is not None:
            found += self._attention.rows_of(parameter)
        return found

    def hook(self, parameter: nn.Parameter, function: Callable[..., None], *args: Any) -> Hook:
        """Return a hook on a parameter; see `Owner.hook`."""
        return Hook(Layers.guarded, self, self._led[id(parameter)], function, *args)

    def guarded(self, paths: Sequence[str], function: Callable[..., None], *args: Any) -> None:
        """Run a hook's body for some layers. If it fails, they are not watched any more.

        The last argument is None where the loss does not depend on this output of a function.
        """
        if not self._active or args[-1] is None or self._guard.broken:
            return
        running, task = self._running, torch._C._current_graph_task_id()
        if task < 0 or task != running.task:
            self._guard(running.begins, task)
        if running.trains:
            self._guard.within(running.state, self._run, paths, function, *args)

    def _run(self, paths: Sequence[str], function: Callable[..., None], *args: Any) -> None:
        for path in paths:
            if path in self.rows:
                break
        else:
            return
        if not holds_memory(args[-1]):
            return
        gradients = torch.is_grad_enabled()
        try:
            if gradients:
                torch._C._set_grad_enabled(False)
            with torch._C.DisableTorchFunction():
                if torch._C._is_any_autocast_enabled():
                    with without_autocast(self.found[path].parameters[0]):
                        function(*args)
                else:
                    function(*args)
        except Exception as error:
            for path in [path for path in paths if path in self.rows]:
                self.failed(path, error)
        finally:
            if gradients:
                torch._C._set_grad_enabled(True)

    @property
    def is_alone(self) -> bool:
        """Whether there was one rank when the running backward pass began."""
        return self._running.is_alone

    def accumulates(self) -> None:
        """Queue sampling of gradients for the end of this pass, after ranks have averaged them."""
        task = torch._C._current_graph_task_id()
        if self.is_alone or self._awaited == task:
            return
        self._awaited = task
        engine = torch.autograd.Variable._execution_engine
        # Averaging hooks queue such callbacks too; a callback that queues another one runs last.
        engine.queue_callback(lambda: engine.queue_callback(self._pass_ended))

    def _pass_ended(self) -> None:
        for key, accumulation in self._accumulated.items():
            self.guarded(self._led[key], accumulation.pass_ended, accumulation.held)

    def was_zeroed(self, now: Tensor, left: Tensor) -> bool:
        """Return whether `.grad` was zeroed in place since the last pass.

        The device is read at one parameter per pass: the first whose last gradient was not zero.
        """
        task = torch._C._current_graph_task_id()
        if self._verdict[0] != task:
            is_zero, was_zero = torch.stack([now == 0, left == 0]).tolist()
            if was_zero:
                return False
            self._verdict = task, is_zero
        return self._verdict[1]

    def shards_were_zeroed(self) -> bool:
        """Return whether `.grad` of all sharded parameters was zeroed in place before this pass."""
        task = torch._C._current_graph_task_id()
        if self._verdict_of_shards[0] != task:
            parts = list(self.provenance.sharded)
            self._verdict_of_shards = task, is_zero(parts)
        return self._verdict_of_shards[1]

    # --- layers that are not watched -------------------------------------------------------------

    @property
    def any_off(self) -> bool:
        """Whether any layer must not be watched."""
        return bool(self.context.switched_off)

    def is_off(self, path: str) -> bool:
        """Return whether the layer or parameter at this path must not be watched."""
        return path in self.context.switched_off

    def failed(self, path: str, error: Exception) -> None:
        """Stop watching a layer whose hook raised an exception."""
        self.rows.pop(path, None)
        self.context.fail(path, error)

    # --- results ---------------------------------------------------------------------------------

    def in_order(self) -> list[Layer]:
        """Return the layers that were seen, in the model's order."""
        return sorted(self.found.values(), key=lambda layer: layer.place)

    def of_parts(self, parameter: Tensor) -> list[str]:
        """Return the paths of the layers that a parameter, or a part of it, belongs to."""
        layers = self.found.items()
        return [path for path, x in layers if any(p is parameter for p in x.parameters)]

    def shared(self, reached: Container[Layer], elsewhere: Collection[int]) -> set[str]:
        """Return the paths of the layers that share at least one parameter entry with another use.

        Args:
            reached: the layers that a gradient reached; other uses do not count.
            elsewhere: ids of the parameters that have a use outside of all layers.
        """
        uses: dict[int, list[tuple[Layer, Piece]]] = defaultdict(list)
        for layer in self.found.values():
            if layer in reached:
                for piece in layer.pieces:
                    uses[id(piece.parameter)] += ((layer, piece),)
        found = set()
        for key, users in uses.items():
            is_elsewhere = key in elsewhere
            if is_elsewhere or users[1:]:
                pieces = [piece for _, piece in users]
                if is_elsewhere or overlap(pieces[0].parameter, pieces):
                    found |= {layer.path for layer, _ in users}
        return found


def _no_features(rows: Rows) -> Features:
    raise NotImplementedError("the effect of a module as a whole on its rows is known from a rerun")


def _identity(weight: Source | None, bias: Source | None) -> tuple[object, ...]:
    return weight and weight.identity, bias and bias.identity
