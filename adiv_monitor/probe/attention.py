"""Attention on the probe: its calls, and how a step moves their scores (spec, section 5).

Libraries differ in the operations between the projections and the scores: views, packed weights,
rotary positions, QK-norm, low-rank updates. Nothing is therefore assumed about them: a change of
all parameters of the module that holds the projections is carried to queries and keys, to first
order, through the graph of the probe's run. The module's inputs are constant, as everywhere
(*single-layer*).
"""

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from adiv_layers.autocast import without_autocast
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.capture.forwards import Forward, Forwards, FunctionToCall
from adiv_monitor.capture.selection import Selection
from adiv_monitor.features.rows import to_compute_dtype
from adiv_monitor.features.scores import Attention, Move, attention, by_head, of_heads
from adiv_monitor.features.uses import Refused
from adiv_monitor.maths.attention_sums import AttentionSums, ScaleSums, move_sums, scale_sums
from adiv_monitor.rerun.derivatives import pusher
from adiv_monitor.rerun.nested import tensors_in

# Each score's move by this many random changes of the parameters tells its scale; by a unit change
# of every parameter, exactly, if all of these moves of the queries have so few numbers.
_MOVES, _MOST_EXACT = 16, 2**20
_PRODUCTS = ("bmm", "baddbmm", "matmul", "__matmul__")
_ARGUMENTS = tuple(inspect.signature(attention).parameters)


@dataclass(eq=False)
class _Progress:
    """The progress of a module's forward."""

    module: nn.Module
    attended: int = 0
    calls: list["_Call"] = field(default_factory=list)
    product: Sequence[Tensor] = ()  # the factors of the last product: q and kᵀ perhaps


@dataclass(eq=False)
class _Call:
    """One call of attention.

    Attributes:
        held: the trained parameters of the module that holds the projections.
        query: q with its graph.
        key: k with its graph, repeated for every query's head.
        scores: the call, without a graph.
        is_output: whether `gradient` is that of O; else it is that of scale·Y + mask.
        gradient: ∂L/∂O or ∂L/∂(scale·Y + mask); None: not known.
        inputs: the tensors in the module's arguments that require a gradient.
        sums: the sums so far.
    """

    held: Sequence[nn.Parameter]
    query: Float[Tensor, "samples heads queries width"]
    key: Float[Tensor, "samples heads keys width"]
    scores: Attention
    is_output: bool
    gradient: Tensor | None = None
    inputs: Sequence[Tensor] = ()
    sums: AttentionSums[Tensor] = field(init=False)

    def release(self) -> None:
        """Release the graph."""
        self.query, self.key, self.inputs = self.query.detach(), self.key.detach(), ()
        vars(self).pop("_push", None)

    def arrive(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradient."""
        [self.gradient] = gradients

    @property
    def score_gradient(self) -> Callable[[slice], Tensor] | None:
        """A function that returns G of a slice of the queries; None: G is not known."""
        if self.gradient is None:
            return None
        if self.is_output:
            return self.scores.score_gradient(self.gradient)
        every = to_compute_dtype(self.gradient).reshape(*self.query.shape[:3], -1)
        whole = self.scores.scale * every
        return lambda queries: whole[:, :, queries]

    @cached_property
    def _push(self) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """The map from changes of the parameters to the first-order moves of q and k."""
        made = [x for x in (self.query, self.key) if x.requires_grad]
        if not made:
            raise Refused("no trained parameter makes its queries or keys")
        with ExitStack() as hooks, torch.enable_grad(), without_autocast(self.query):
            for tensor in self.inputs:  # they are constant: no gradient passes through them
                handle = tensor.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
                hooks.callback(handle.remove)
            return pusher(made, self.held, torch.finfo(self.query.dtype).eps)

    def _move(self, tangents: Sequence[Tensor]) -> Move:
        """Return the first-order moves of q and k for changes of the parameters."""
        push, of = self._push, self.scores
        with without_autocast(self.query):
            moves = map(to_compute_dtype, push(tangents))
        dq = next(moves) if self.query.requires_grad else torch.zeros_like(of.query)
        return dq, next(moves) if self.key.requires_grad else torch.zeros_like(of.key)

    def moved(self, tangents: Sequence[Tensor]) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return ‖g‖², and the sums of a first-order move of the scores, where g is known."""
        G = self.score_gradient
        if G is None:
            return None, None
        unit = torch.stack([t.abs().amax() for t in tangents]).amax()
        unit = torch.where(unit == 0, 1, unit)  # half precision cannot represent small changes
        dq, dk = (x * unit for x in self._move([t / unit for t in tangents]))
        return move_sums(self.scores, G, (dq, dk))

    def scale(self, generator: np.random.Generator) -> ScaleSums[Tensor]:
        """Return the sums of the scales."""
        like, sizes = self.query, [p.numel() for p in self.held]
        active = self.score_gradient or self.scores.probabilities
        several: Iterable[Sequence[Move]]
        if sum(sizes) * like.numel() <= _MOST_EXACT:
            units = torch.eye(sum(sizes), dtype=like.dtype, device=like.device)
            shaped = (
                [t.view_as(p) for t, p in zip(row.split(sizes), self.held, strict=True)]
                for row in units
            )
            several, moment = [[*map(self._move, shaped)]], 1.0
        else:
            random = torch.Generator(like.device).manual_seed(int(generator.integers(2**62)))
            given: dict[str, Any] = {"generator": random, "device": like.device}
            several = (
                [self._move([torch.randn(p.shape, **given) for p in self.held])]
                for _ in range(_MOVES)
            )
            moment = 3.0
        found = [scale_sums(self.scores, active, moves, moment) for moves in several]
        counts, *sums = zip(*found, strict=True)
        return ScaleSums(counts[0], *(torch.stack(several, -1) for several in sums))


class Attentions:
    """Finds the calls of attention while the probe runs, and measures them. See `step/probing.py`.

    Args:
        selection: the parameters to measure.
        generator: the monitor's own random number generator.
        fail: called with a path and an unexpected exception; exceptions that state why an attention
            can't be measured are kept in `refused`.

    Attributes:
        calls: the calls that were seen, by path.
        refused: path → the reason why an attention is not measured.
        saw_any: whether any was seen.
        ask: called with tensors and a function that gets their gradients, if the loss is known.
    """

    ask: Callable[[Sequence[Tensor], Callable[[Sequence[Tensor | None]], None]], None]

    def __init__(
        self,
        selection: Selection,
        generator: np.random.Generator,
        fail: Callable[[str, Exception], None],
    ) -> None:
        self.calls: dict[str, list[_Call]] = defaultdict(list)
        self.refused: dict[str, str] = {}
        self.saw_any = False
        self._generator, self._fail = generator, fail
        self._paths, self._due = selection.modules, selection.due
        trained = {id(p) for p in selection.trained}
        self._held: dict[nn.Module, list[nn.Parameter]] = {}
        for module in selection.modules:
            held = [p for p in module.parameters() if id(p) in trained]
            if any(p.dim() > 1 for p in held):
                self._held[module] = held
        self._all: weakref.WeakKeyDictionary[Forward, _Progress] = weakref.WeakKeyDictionary()

    # --- while the probe runs --------------------------------------------------------------------

    def ends(self, forward: Forward, args: object, kwargs: object) -> None:
        """Record the inputs of a module's forward."""
        if forward in self._all:
            given = [x for x in tensors_in(args, kwargs) if x.requires_grad]
            for call in self._all[forward].calls:
                call.inputs = given

    def look(self, call: FunctionToCall, forwards: Forwards) -> None:
        """Look at a function that may compute attention, scores or their weights."""
        name = getattr(call.function, "__name__", "")
        running = [forward for forward in forwards.running if forward.module in self._held]
        if not running:
            return
        module = running[-1].module
        progress = self._all.setdefault(running[-1], _Progress(module))
        if call.function is functional.scaled_dot_product_attention:
            given = {**dict(zip(_ARGUMENTS, call.args, strict=False)), **call.kwargs}
            q, k = by_head(given["query"]), by_head(given["key"])
            self._found(progress, q, k, partial(attention, **given), call())
        elif name in _PRODUCTS:
            progress.product = call.args[-2:]
        elif name == "softmax" and isinstance(module, nn.MultiheadAttention):
            product, progress.product = progress.product, ()
            if len(product) == 2 and call.args and min(x.dim() for x in product) > 2:
                q, k, logits = (
                    x if x.dim() == 4 else x.unflatten(0, (-1, module.num_heads))
                    for x in (product[0], product[1].mT, call.args[0])
                )
                q = q * q.shape[-1] ** 0.5
                made = partial(_explicit, q, k, logits)
                self._found(progress, q, k, made, call.args[0], is_output=False)

    def _found(
        self,
        progress: _Progress,
        q: Tensor,
        k: Tensor,
        made: Callable[[], Attention],
        asks: Tensor,
        *,
        is_output: bool = True,
    ) -> None:
        held, path = self._held[progress.module], self._paths[progress.module]
        progress.attended += 1
        if progress.attended > 1:
            path = f"{path}#{progress.attended}"
        self.saw_any = True
        is_due = self._due is None or not set(self._due).isdisjoint(map(id, held))
        if path in self.refused or not q.numel() or not is_due:
            return
        with self._guarded(path):
            with torch.no_grad():
                scores = made()
            k = of_heads(k, q.shape[1]).expand(len(q), -1, -1, -1)
            call = _Call(held, q, k, scores, is_output)
            self.ask([asks], call.arrive)
            self.calls[path].append(call)
            progress.calls.append(call)

    # --- afterwards ------------------------------------------------------------------------------

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose change moves the scores."""
        every = (call for calls in self.calls.values() for call in calls)
        return list(dict.fromkeys(p for call in every for p in call.held))

    def begin(self, *, knows_loss: bool) -> None:
        """Compute the scales, and the sums of a plain gradient step."""
        self._each(partial(self._begin, knows_loss))

    def _begin(self, knows_loss: bool, call: _Call) -> None:
        if knows_loss and call.gradient is None:
            raise Refused("no gradient reached it in this step")
        e = [torch.zeros_like(p) if p.grad is None else p.grad for p in call.held]
        is_finite = call.query.isfinite().all() & call.key.isfinite().all()
        broken = (~is_finite).to(call.scores.query.dtype)
        call.sums = AttentionSums(broken, call.scale(self._generator), *call.moved(e))
        del call._push  # its graph holds the parameters, which the step changes in place

    def updated(self, taken: Mapping[nn.Parameter, Tensor]) -> None:
        """Compute the sums of the optimizer's step, θ before minus θ after, by parameter."""
        self._each(partial(self._updated, taken))

    def _updated(self, taken: Mapping[nn.Parameter, Tensor], call: _Call) -> None:
        call.sums = replace(call.sums, d=call.moved([taken[p] for p in call.held])[1])
        call.release()

    def sums(self) -> dict[str, tuple[AttentionSums[Tensor], ...]]:
        """Return the records of the calls of each attention, by path; the graphs are released."""
        kept = {p: calls for p, calls in self.calls.items() if p not in self.refused}
        self.calls = {}
        return {path: tuple(call.sums for call in calls) for path, calls in kept.items()}

    def _each(self, body: Callable[[_Call], None]) -> None:
        """Handle all calls; the attention of one with which the body fails is refused."""
        for path, calls in self.calls.items():
            for call in calls:
                if path not in self.refused:
                    with self._guarded(path), torch.no_grad():
                        body(call)

    @contextmanager
    def _guarded(self, path: str) -> Iterator[None]:
        """Refuse the attention if the body fails."""
        try:
            yield
        except (Refused, RuntimeError, ValueError) as error:
            self.refused[path] = str(error).partition("\n")[0]
        except Exception as error:
            self.refused[path] = f"measuring it failed: {type(error).__name__}: {error}"
            self._fail(path, error)


def _explicit(q: Tensor, k: Tensor, logits: Tensor) -> Attention:
    """Return a call whose scores are explicit; its values are not known."""
    q, k, logits = (to_compute_dtype(x) for x in (q, k, logits))
    scale = q.shape[-1] ** -0.5
    return Attention(q, k, k, logits - q @ k.mT * scale, causal=False, scale=scale)
