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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from adiv_layers.autocast import without_autocast
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from adiv_monitor.capture.forwards import Forward, Forwards, FunctionToCall
from adiv_monitor.capture.selection import Selection
from adiv_monitor.features.rows import Index, Rows, to_compute_dtype, to_device
from adiv_monitor.features.scores import Attention, Move, attention, by_head, of_heads
from adiv_monitor.features.uses import Refused, Use
from adiv_monitor.maths.attention_sums import (
    AttentionSums,
    MoveSums,
    ScaleSums,
    active_scores,
    move_sums,
    scale_sums,
)
from adiv_monitor.probe.scales import ScaledUse, scales, some_keys
from adiv_monitor.rerun.derivatives import pushed_forward
from adiv_monitor.rerun.nested import tensors_in

Tangents = Mapping[nn.Parameter, Tensor]

# The most diagonals of scores, of all heads together, whose scale is computed: each takes two
# backward passes through the functions between projections and scores.
_MOST_DIAGONALS = 32
_PRODUCTS = ("bmm", "baddbmm", "matmul", "__matmul__")
_ARGUMENTS = tuple(inspect.signature(attention).parameters)


@dataclass(eq=False)
class _Progress:
    """The progress of a module's forward."""

    module: nn.Module
    attended: int = 0
    calls: list["_Call"] = field(default_factory=list)
    product: Sequence[Tensor] = ()  # the factors of the last product: q and kᵀ perhaps
    uses: list[ScaledUse] = field(default_factory=list)


@dataclass(eq=False)
class _Call:
    """One call of attention.

    Attributes:
        held: the trained parameters of the module that holds the projections.
        query: q with its graph.
        key: k with its graph, repeated for every query's head.
        scores: the call, without a graph.
        uses: the uses of parameters before the call.
        is_output: whether `gradient` is that of O; else it is that of scale·Y + mask.
        gradient: ∂L/∂O or ∂L/∂(scale·Y + mask); None: not known.
        inputs: the tensors in the module's arguments that require a gradient.
        sums: the sums so far.
    """

    held: Sequence[nn.Parameter]
    query: Float[Tensor, "samples heads queries width"]
    key: Float[Tensor, "samples heads keys width"]
    scores: Attention
    uses: Sequence[ScaledUse]
    is_output: bool
    gradient: Tensor | None = None
    inputs: Sequence[Tensor] = ()
    sums: AttentionSums[Tensor] = field(init=False)

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

    @contextmanager
    def single_layer(self) -> Iterator[None]:
        """Hold the module's inputs constant: no gradient passes through them in this context."""
        with ExitStack() as hooks, torch.enable_grad(), without_autocast(self.query):
            for tensor in self.inputs:
                handle = tensor.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
                hooks.callback(handle.remove)
            yield

    def moved(self, tangents: Tangents) -> tuple[Tensor, MoveSums[Tensor]] | tuple[None, None]:
        """Return ‖g‖², and the sums of a first-order move of q and k, where G is known."""
        G, of = self.score_gradient, self.scores
        if G is None:
            return None, None
        found = dict.fromkeys(map(id, (self.query, self.key)), of.query.new_zeros(()))
        made = [x for x in (self.query, self.key) if x.requires_grad]
        if made and tangents:
            # Half precision cannot represent small changes.
            unit = torch.stack([t.abs().amax() for t in tangents.values()]).amax()
            unit = torch.where(unit == 0, 1, unit)
            directions = [t / unit for t in tangents.values()]
            with self.single_layer():
                moves = pushed_forward(made, [*tangents], directions, _precision(self.query))
            for x, moved in zip(made, moves, strict=True):
                found[id(x)] = to_compute_dtype(moved) * unit
        move: Move = (
            found[id(self.query)].expand_as(of.query),
            found[id(self.key)].expand_as(of.key),
        )
        return move_sums(of, G, move)

    def scale(self, keys: Index) -> ScaleSums[Tensor]:
        """Return the sums of the scales of the scores with these keys. See `some_keys`."""
        D = scales(self.query, self.key, self.uses, keys)
        # Mixed tokens have other rows, too, of which the first token's are lost.
        n, head, t, draw = np.argwhere(keys >= 0)[0]
        with self.single_layer():
            score = self.query[n, head, t] @ self.key[n, head, keys[n, head, t, draw]]
            parts = torch.autograd.grad(score, self.held, retain_graph=True, allow_unused=True)
        squares = [to_compute_dtype(g).square().sum() for g in parts if g is not None]
        whole = torch.stack(squares).sum()
        error = (D[n, head, t, draw] - whole).abs().div(whole)
        active = active_scores(self.scores, self.score_gradient, to_device(keys, D.device))
        return scale_sums(D, active, error, keys.shape[3] / max(self.scores.lengths))


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

    def _progress(self, forwards: Forwards) -> list[_Progress]:
        """Return the progress of the running forwards that hold projections, outermost first."""
        running = (forward for forward in forwards.running if forward.module in self._held)
        return [self._all.setdefault(x, _Progress(x.module)) for x in running]

    def ends(self, forward: Forward, args: object, kwargs: object) -> None:
        """Record the inputs of a module's forward."""
        if forward in self._all:
            given = [x for x in tensors_in(args, kwargs) if x.requires_grad]
            for call in self._all[forward].calls:
                call.inputs = given

    def used(self, use: Use, output: Tensor, forwards: Forwards) -> None:
        """Record a use of parameters."""
        weight, bias = _is_trained(use.weight), _is_trained(use.bias)
        progress = self._progress(forwards)
        if not progress or not output.requires_grad or not (weight or bias):
            return
        every = Rows(tuple(use.layout(output).shape[:-1]), None, output.device)
        with torch.no_grad():
            scale = use.features(every).restrict(weight=weight, bias=bias).scale()
        if scale is not None:
            for each in progress:
                each.uses.append(ScaledUse(get_gradient_edge(output), scale, use.layout))

    def look(self, call: FunctionToCall, forwards: Forwards) -> None:
        """Look at a function that may compute attention, scores or their weights."""
        name, every = getattr(call.function, "__name__", ""), self._progress(forwards)
        if not every:
            return
        progress, module = every[-1], every[-1].module
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
            call = _Call(held, q, k, scores, list(progress.uses), is_output)
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
        scale, why = self._scale(call)
        if call.gradient is None and scale is None:
            raise Refused(f"its scale is not known ({why}), and neither is the loss")
        G_G, e = call.moved({p: p.grad for p in call.held if p.grad is not None})
        is_finite = call.query.isfinite().all() & call.key.isfinite().all()
        given = _precision(call.query), (~is_finite).to(call.scores.query.dtype)
        call.sums = AttentionSums(*given, G_G, e, scale=scale, no_scale=why)

    def _scale(self, call: _Call) -> tuple[ScaleSums[Tensor] | None, str]:
        """Return the sums of the scales, or why they are not known."""
        samples, heads, queries, _ = call.query.shape
        if not (call.query.requires_grad or call.key.requires_grad):
            return None, "no trained parameter makes its queries or keys"
        given = samples, heads, queries, call.key.shape[2], max(1, _MOST_DIAGONALS // heads)
        try:
            return call.scale(some_keys(*given, self._generator)), ""
        except (RuntimeError, ValueError) as error:
            return None, str(error)

    def updated(self, taken: Tangents) -> None:
        """Compute the sums of the optimizer's step, θ before minus θ after, by parameter."""
        self._each(partial(self._updated, taken))

    def _updated(self, taken: Tangents, call: _Call) -> None:
        d = call.moved({p: taken[p] for p in call.held})[1]
        call.sums = replace(call.sums, d=d)
        call.query, call.key = call.query.detach(), call.key.detach()  # releases the graph
        call.uses = call.inputs = ()

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


def _precision(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def _is_trained(tensor: Tensor | None) -> bool:
    """Return whether it is a trained parameter or its view."""
    if tensor is None or not tensor.requires_grad:
        return False
    return tensor.is_leaf or (tensor._base is not None and tensor._base.is_leaf)
