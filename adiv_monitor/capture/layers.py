"""The layers of one step, as they are seen: what they train, their rows, and their gradients."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor, nn

from adiv_monitor.capture.accumulation import Accumulated, Accumulation
from adiv_monitor.capture.attention.attention_calls import AttentionCalls
from adiv_monitor.capture.gradient_shares import GradientShare
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import Hook, has_data, trains
from adiv_monitor.capture.layer_rows import Call, Chooser, LayerRows
from adiv_monitor.capture.names import Names
from adiv_monitor.capture.realised.forward_calls import ForwardCalls
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.shard_accumulation import ShardAccumulation, is_zero
from adiv_monitor.capture.weights.pieces import ConcatenatedParameters, Piece, Source, overlap
from adiv_monitor.capture.weights.provenance import Provenance
from adiv_monitor.capture.weights.shards import is_shard
from adiv_monitor.capture.world import world_size
from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.uses import Use, shape_alike


@dataclass(frozen=True, eq=False)
class Passing:
    """A call of a layer whose turn it is not, of which nothing is looked at.

    Attributes:
        layer: the layer.
        forward: the number of the module's forward in which it was made.
    """

    layer: Layer
    forward: int


class Layers:
    """Finds the layer that a use belongs to, or makes it.

    Args:
        names: what layers are called.
        provenance: what tensors are made of.
        chooser: chooses rows.
        switched_off: paths of the layers that must not be watched.
        fail: called with a layer's path and the exception that its hook met; from then on the layer
            is not watched any more.
        guard: is told of what else fails.
        calls: notes the forward passes, so that they can be run again.
        attention: gathers samples of attentions, if that is asked for.
        is_due: whether it is a layer's turn; the others are found, but not watched.

    Attributes:
        found: by path, the layers that were seen so far.
        rows: by path, the rows of those that are watched.
        replacements: path of a layer → path of the one whose reading stands for it.
        guard: is told of what fails, but for what belongs to one layer.
    """

    def __init__(
        self,
        names: Names,
        provenance: Provenance,
        chooser: Chooser,
        switched_off: Iterable[str],
        fail: Callable[[str, Exception], None],
        guard: Guard,
        calls: ForwardCalls | None = None,
        attention: AttentionCalls | None = None,
        is_due: Callable[[Layer], bool] = lambda layer: True,
    ) -> None:
        self.found: dict[str, Layer] = {}
        self.rows: dict[str, LayerRows] = {}
        self.replacements: dict[str, str] = {}
        self.names = names
        self._provenance = provenance
        self._chooser = chooser
        self._off = set(switched_off)
        self._fail = fail
        self.guard = guard
        self._calls = calls
        self._attention = attention
        self._is_due = is_due
        self._accumulated: dict[int, Accumulation] = {}  # by id of a parameter
        self._contributed: dict[int, dict[int, GradientShare]] = defaultdict(dict)  # likewise
        # What each of several layers that use one parameter contributes to it, by path and by id.
        self._own: dict[str, dict[int, GradientShare]] = defaultdict(dict)
        self._not_kept: set[str] = set()  # paths of layers that contributed before others were seen
        self._sharing: set[str] | None = None  # paths of those that share parameters, among `found`
        self._passing: dict[str, dict[Call | Passing, None]] = defaultdict(dict)  # by path
        # By number of a forward; rows are let go of elsewhere.
        self._made_in: dict[int, list[weakref.ref[Call | Passing]]] = defaultdict(list)
        self._last_forward = -1
        self._led: dict[int, list[str]] = defaultdict(list)  # by its id, paths of layers
        self._verdict = (-1, False)
        self._verdict_of_shards = (-1, False)
        self._of_pass = -1, False  # a backward pass, and whether it belongs to a training step
        self._awaited = -1  # the backward pass whose end is waited for
        self._active = True  # hooks in graphs that are already built outlive their removal

    def detach(self) -> None:
        """Remove every hook; those in graphs that are already built fall silent."""
        self._active = False
        call_all(*(accumulated.remove for accumulated in self._accumulated.values()))
        self._accumulated.clear()  # they refer to this: a cycle that would hold gradients back

    # --- finding ---------------------------------------------------------------------------------

    def of(self, use: Use, known: Layer | str | None = None) -> Layer | None:
        """The layer that a use belongs to; None if none of its parameters is measured.

        Args:
            use: the use.
            known: the layer, or its path, if that is known.
        """
        if isinstance(known, Layer):
            found = self.found.get(known.path)
            if found is None:
                return self._follow(known)
            if found is known:
                return known
            known = known.path
        weight, bias = self._provenance.source(use.weight), self._provenance.source(use.bias)
        lead = weight or bias
        if lead is None:
            return None
        names = self.names.of(use, lead) if known is None else [known]
        return self._find(names, use, weight, bias)

    def of_whole(self, module: nn.Module, parameters: list[nn.Parameter]) -> Layer | None:
        """The layer that a module as a whole is, as far as these parameters are concerned."""
        source = ConcatenatedParameters([self._provenance.pieces.of(p) for p in parameters], module)
        use = Use("module", None, None, _no_features)
        return self._find(self.names.of_whole(module, parameters), use, source, None)

    def _find(
        self, names: Iterable[str], use: Use, weight: Source | None, bias: Source | None
    ) -> Layer | None:
        """The layer of one of these names that is made alike, or a new one."""
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
        place, order = self.names.place(id(parameter)), self.names.order[id(parameter)]
        module = self.names.owner(place)
        if isinstance(weight, ConcatenatedParameters) and len(weight.pieces) > 1:
            module = weight.through
        return self._follow(
            Layer(path, module, use.kind, weight, bias, use.shaped, order, use.form)
        )

    def _follow(self, layer: Layer) -> Layer:
        """From now on, watch a layer that was found."""
        path, parameter = layer.path, layer.pieces[0].parameter
        self.found[path] = layer
        self._sharing = None
        self._led[id(parameter)].append(path)
        if path in self._off or self.waits(layer):
            return layer
        self.rows[path] = LayerRows(self._chooser, path)
        if id(parameter) not in self._accumulated:
            self._accumulated[id(parameter)] = self._accumulation(parameter)
            self._accumulated[id(parameter)].attach()
        return layer

    def _accumulation(self, parameter: nn.Parameter) -> Accumulation:
        stand_in = self._provenance.stand_in(parameter)
        if stand_in is None:
            return Accumulation(parameter, self)
        return ShardAccumulation(parameter, stand_in, self, self._provenance.waiting(parameter))

    # --- calls -----------------------------------------------------------------------------------

    def new_call(
        self, layer: Layer, shape: tuple[int, ...], device: torch.device, forward: int
    ) -> Call:
        """A further call of a layer that is watched, in which rows are chosen.

        Args:
            layer: the layer.
            shape: of z without its channels.
            device: of z.
            forward: the number of the module's forward in which it is made.
        """
        call = Call(layer, *self.rows[layer.path].choose(shape, device))
        call.place = None if self._calls is None else self._calls.place(layer.path)
        call.forward = forward
        self._was_made(call)
        return call

    def _was_made(self, call: Call | Passing) -> None:
        self._made_in[call.forward].append(weakref.ref(call))
        self._last_forward = max(self._last_forward, call.forward)

    def pass_by(self, layer: Layer, forward: int) -> None:
        """A call of a layer that is not watched, in a forward of this number."""
        if self.waits(layer):
            passing = Passing(layer, forward)
            self._passing[layer.path][passing] = None
            self._was_made(passing)

    def waits(self, layer: Layer) -> bool:
        """Whether a layer is not watched because it is not its turn."""
        return not self._is_due(layer)

    def calls_since(self, forward: int) -> list[Call | Passing]:
        """Those made in a forward of this number, and in the later ones."""
        made = (self._made_in.get(number, ()) for number in range(forward, self._last_forward + 1))
        calls = (reference() for references in made for reference in references)
        return [call for call in calls if call is not None and self._stands(call)]

    def _stands(self, call: Call | Passing) -> bool:
        """Whether a call was not withdrawn since."""
        path = call.layer.path
        if isinstance(call, Passing):
            return call in self._passing.get(path, ())
        return path in self.rows and call in self.rows[path].calls

    def replace(self, calls: Sequence[Call | Passing], path: str) -> None:
        """Another layer's reading stands for these calls."""
        for replaced in self.withdraw(calls):
            later = {p: path for p, by in self.replacements.items() if by == replaced}
            self.replacements |= {**later, replaced: path}

    def withdraw(self, calls: Sequence[Call | Passing]) -> list[str]:
        """These calls are no uses after all; the paths of their layers."""
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
        """There is no such layer after all."""
        lead = self.found.pop(path).pieces[0].parameter
        self._sharing = None
        self._led[id(lead)].remove(path)
        self.rows.pop(path, None)

    # --- gradients -------------------------------------------------------------------------------

    def accumulation_of(self, layer: Layer) -> Accumulation:
        """What happened to the gradient of the layer's first parameter."""
        return self._accumulated[id(layer.parameters[0])]

    def contributions_of(self, layer: Layer) -> list[GradientShare]:
        """To the gradients of the layer's parameters; none where ranks have parts of them."""
        if self._provenance.any_apart and any(
            is_shard(p) or self._provenance.stand_in(p) is not None for p in layer.parameters
        ):
            return []
        # They are accumulated, and zeroed, as that of the first one is.
        known = self._contributed[id(layer.parameters[0])]
        for parameter in layer.parameters:
            if id(parameter) not in known:
                known[id(parameter)] = GradientShare(parameter)
        return [known[id(parameter)] for parameter in layer.parameters]

    def own_contribution(self, path: str, parameter: nn.Parameter) -> GradientShare | None:
        """Of one of several layers that use a parameter; None where no other does, as far as seen.

        It has all entries: as much memory as a gradient.
        """
        if self._sharing is None:
            self._sharing = self.shared(set(self.found.values()), lambda key: False)
        if path not in self._sharing:
            self._not_kept.add(path)
            return None
        own = self._own[path]
        if id(parameter) not in own:
            own[id(parameter)] = GradientShare(parameter, whole=True)
        return own[id(parameter)]

    def own_gradient(self, layer: Layer) -> dict[int, Tensor] | None:
        """By a piece's key, what the layer's own calls have contributed; None: not known."""
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
        """What follows a parameter's gradient: rows of layers, and what their calls hand on."""
        found: list[Accumulated] = [
            self.rows[path] for path in self._led[id(parameter)] if path in self.rows
        ]
        found += self._contributed[id(parameter)].values()
        for path in self._led[id(parameter)] if self._own else ():
            found += self._own.get(path, {}).values()
        if self._attention is not None:
            found += self._attention.rows_of(parameter)
        return found

    def hook(self, parameter: nn.Parameter, function: Callable[..., None]) -> Hook:
        """See `Owner`."""
        return Hook(self.guarded, self._led[id(parameter)], function)

    def guarded(self, paths: Sequence[str], function: Callable[..., None], *args: Any) -> None:
        """Run a hook's body for some layers, which are not watched any more if it fails.

        It is given no gradient where the loss leaves this output of a function out.
        """
        self.guard(self._run, paths, function, *args)

    def _run(self, paths: Sequence[str], function: Callable[..., None], *args: Any) -> None:
        if not self._active or args[-1] is None or not self._trains(args[-1]):
            return
        watched = [path for path in paths if path in self.rows]
        if not watched:
            return
        gradients = torch.is_grad_enabled()
        try:
            if gradients:
                torch._C._set_grad_enabled(False)
            with torch._C.DisableTorchFunction():
                if torch._C._is_any_autocast_enabled():
                    with without_autocast(self.found[watched[0]].parameters[0]):
                        function(*args)
                else:
                    function(*args)
        except Exception as error:
            for path in watched:
                self.failed(path, error)
        finally:
            if gradients:
                torch._C._set_grad_enabled(True)

    def _trains(self, value: object) -> bool:
        """As `trains`; what is so of a backward pass is asked once."""
        task = torch._C._current_graph_task_id()
        if task < 0 or task != self._of_pass[0]:
            self._of_pass = task, trains(None)
        return self._of_pass[1] and has_data(value)

    def accumulates(self) -> None:
        """A pass accumulates gradients: look at them once ranks have averaged them in it."""
        task = torch._C._current_graph_task_id()
        if world_size() == 1 or self._awaited == task:
            return
        self._awaited = task
        engine = torch.autograd.Variable._execution_engine
        # Those who average wait for the pass to end, too: come after whoever does so later.
        engine.queue_callback(lambda: engine.queue_callback(self._pass_ended))

    def _pass_ended(self) -> None:
        for key, accumulation in self._accumulated.items():
            self.guarded(self._led[key], accumulation.pass_ended, accumulation.held)

    def was_zeroed(self, now: Tensor, left: Tensor) -> bool:
        """Whether `.grad` was zeroed in place: at one parameter of every pass, the device tells.

        At the first whose gradient was not zero anyway.
        """
        task = torch._C._current_graph_task_id()
        if self._verdict[0] != task:
            is_zero, was_zero = torch.stack([now == 0, left == 0]).tolist()
            if was_zero:
                return False
            self._verdict = task, is_zero
        return self._verdict[1]

    def shards_were_zeroed(self) -> bool:
        """Whether `.grad` of all sharded parameters was zeroed in place, before this pass."""
        task = torch._C._current_graph_task_id()
        if self._verdict_of_shards[0] != task:
            parts = list(self._provenance.sharded)
            self._verdict_of_shards = task, is_zero(parts)
        return self._verdict_of_shards[1]

    # --- what is not watched ---------------------------------------------------------------------

    @property
    def any_off(self) -> bool:
        """Whether there are any that are not to be watched."""
        return bool(self._off)

    def is_off(self, path: str) -> bool:
        """Whether this layer, or parameter, is not to be watched."""
        return path in self._off

    def failed(self, path: str, error: Exception) -> None:
        """Watching a layer met an exception: it is not watched any more."""
        self._off.add(path)
        self.rows.pop(path, None)
        self._fail(path, error)

    # --- what there is in the end ----------------------------------------------------------------

    def in_order(self) -> list[Layer]:
        """The layers that were seen, in the model's order."""
        return sorted(self.found.values(), key=lambda layer: layer.place)

    def have(self, parameter: Tensor) -> bool:
        """Whether any of a parameter is part of a layer."""
        return any(piece.parameter is parameter for x in self.found.values() for piece in x.pieces)

    def shared(self, reached: Container[Layer], elsewhere: Callable[[int], bool]) -> set[str]:
        """Paths of the layers whose parameters are used by others too, entry by entry.

        Args:
            reached: the layers that a gradient reached: no other use counts.
            elsewhere: whether the parameter of this id has a use that no layer is.
        """
        uses: dict[int, list[tuple[Layer, Piece]]] = defaultdict(list)
        for layer in (layer for layer in self.found.values() if layer in reached):
            for piece in layer.pieces:
                uses[id(piece.parameter)].append((layer, piece))
        found = set()
        for key, users in uses.items():
            pieces = [piece for _, piece in users]
            if elsewhere(key) or overlap(pieces[0].parameter, pieces):
                found |= {layer.path for layer, _ in users}
        return found


def _no_features(rows: Rows) -> Features:
    raise NotImplementedError("what a module as a whole does to its rows is told by a replay")


def _identity(weight: Source | None, bias: Source | None) -> tuple[object, ...]:
    return weight and weight.identity, bias and bias.identity
