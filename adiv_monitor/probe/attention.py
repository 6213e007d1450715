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

import numpy as np
import torch
from adiv_layers.autocast import without_autocast
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from adiv_monitor.capture.forwards import Forward, Forwards, FunctionToCall
from adiv_monitor.capture.selection import Selection
from adiv_monitor.features.rows import Rows, to_compute_dtype, to_device
from adiv_monitor.features.scores import Attention, Move, attention, by_head, of_heads
from adiv_monitor.features.uses import Refused, Use
from adiv_monitor.maths.attention_sums import (
    AttentionSums,
    active_scores,
    move_sums,
    scale_sums,
)
from adiv_monitor.probe.scales import ScaledUse, scales, some_keys
from adiv_monitor.rerun.derivatives import pushed_forward
from adiv_monitor.rerun.nested import tensors_in

Tangents = Mapping[nn.Parameter, Tensor]

_MOST_SAMPLES = 8
# The most scores in all samples of an attention; an error needs at least two samples.
_MOST_SCORES = 2**23
# The most diagonals of scores, of all heads together, whose scale is computed: each takes two
# backward passes through the functions between projections and scores.
_MOST_DIAGONALS = 32
_BY_HAND = ("bmm", "baddbmm", "matmul", "__matmul__", "softmax")
_ARGUMENTS = tuple(inspect.signature(attention).parameters)


@dataclass(eq=False)
class _Progress:
    """The progress of a module's forward."""

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
        scores: the call on the chosen samples, without a graph.
        samples: the chosen samples, (chosen,) int64.
        uses: the uses of parameters before the call.
        is_output: whether `gradient` is that of O; else it is that of scale·Y + mask.
        gradient: ∂L/∂O or ∂L/∂(scale·Y + mask); None: not known.
        keys: for every sample, head and query, the keys of the scores whose scale is computed.
        D: their scale; None: it is not known.
        no_scale: why it is not known.
        inputs: the tensors in the module's arguments that require a gradient.
        sums: the sums so far.
    """

    held: Sequence[nn.Parameter]
    query: Float[Tensor, "samples heads queries width"]
    key: Float[Tensor, "samples heads keys width"]
    scores: Attention
    samples: Tensor
    uses: Sequence[ScaledUse]
    is_output: bool
    gradient: Tensor | None = None
    keys: np.ndarray = field(init=False)
    D: Tensor | None = None
    no_scale: str = ""
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
            return self.scores.score_gradient(by_head(self.gradient).index_select(0, self.samples))
        every = to_compute_dtype(self.gradient).reshape(*self.query.shape[:3], -1)
        whole = self.scores.scale * every.index_select(0, self.samples)
        return lambda queries: whole[:, :, queries]

    @contextmanager
    def single_layer(self) -> Iterator[None]:
        """Hold the module's inputs constant: no gradient passes through them in this context."""
        with ExitStack() as hooks, torch.enable_grad(), without_autocast(self.query):
            for tensor in self.inputs:
                handle = tensor.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
                hooks.callback(handle.remove)
            yield

    def move(self, tangents: Tangents) -> Move:
        """Return the first-order moves of q and k of the chosen samples."""
        made = [x for x in (self.query, self.key) if x.requires_grad]
        found = dict.fromkeys(map(id, (self.query, self.key)), self.scores.query.new_zeros(()))
        if made and tangents:
            # Half precision cannot represent small changes.
            unit = torch.stack([t.abs().amax() for t in tangents.values()]).amax()
            unit = torch.where(unit == 0, 1, unit)
            directions = [t / unit for t in tangents.values()]
            with self.single_layer():
                moves = pushed_forward(made, [*tangents], directions, _precision(self.query))
            for x, moved in zip(made, moves, strict=True):
                found[id(x)] = to_compute_dtype(moved).index_select(0, self.samples) * unit
        of = self.scores
        return (
            found[id(self.query)].expand_as(of.query),
            found[id(self.key)].expand_as(of.key),
        )


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
        self._generator = generator
        self._fail = fail
        self._paths = selection.modules
        self._due, self._places = selection.due, selection.places
        trained = {id(p) for p in selection.trained}
        self._held: dict[nn.Module, list[nn.Parameter]] = {}
        for module in selection.modules:
            held = [p for p in module.parameters() if id(p) in trained]
            if any(p.dim() > 1 for p in held):
                self._held[module] = held
        self._progress: weakref.WeakKeyDictionary[Forward, _Progress] = weakref.WeakKeyDictionary()

    # --- while the probe runs --------------------------------------------------------------------

    def begins(self, forward: Forward) -> None:
        """Record that a module's forward begins."""
        if forward.module in self._held:
            self._progress[forward] = _Progress()

    def ends(self, forward: Forward, args: object, kwargs: object) -> None:
        """Record the inputs of a module's forward."""
        if forward in self._progress:
            given = [x for x in tensors_in(args, kwargs) if x.requires_grad]
            for call in self._progress[forward].calls:
                call.inputs = given

    def used(self, use: Use, output: Tensor, forwards: Forwards) -> None:
        """Record a use of parameters."""
        weight, bias = _is_trained(use.weight), _is_trained(use.bias)
        progress = [self._progress[f] for f in forwards.running if f in self._progress]
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
        name = getattr(call.function, "__name__", "")
        is_fused = call.function is functional.scaled_dot_product_attention
        running = [f for f in forwards.running if f in self._progress]
        if not running or not (is_fused or name in _BY_HAND):
            return
        forward, progress = running[-1], self._progress[running[-1]]
        if is_fused:
            given = {**dict(zip(_ARGUMENTS, call.args, strict=False)), **call.kwargs}
            q, k = by_head(given["query"]), by_head(given["key"])
            made = lambda samples: attention(**given, samples=samples)  # noqa: E731
            self._found(forward, q, k, made, call())
        elif name != "softmax":
            progress.product = call.args[-2:]
        elif isinstance(forward.module, nn.MultiheadAttention):
            product, progress.product = progress.product, ()
            if len(product) == 2 and call.args and min(x.dim() for x in product) > 2:
                q, k, logits = (
                    x if x.dim() == 4 else x.unflatten(0, (-1, forward.module.num_heads))
                    for x in (product[0], product[1].mT, call.args[0])
                )
                q = q * q.shape[-1] ** 0.5
                made = lambda samples: _explicit(q, k, logits, samples)  # noqa: E731
                self._found(forward, q, k, made, call.args[0], is_output=False)

    def _found(
        self,
        forward: Forward,
        q: Tensor,
        k: Tensor,
        made: Callable[[Tensor], Attention],
        asks: Tensor,
        *,
        is_output: bool = True,
    ) -> None:
        progress, path = self._progress[forward], self._paths[forward.module]
        progress.attended += 1
        if progress.attended > 1:
            path = f"{path}#{progress.attended}"
        self.saw_any = True
        if path in self.refused or not q.numel() or not self._is_due(forward.module):
            return
        with self._guarded(path):
            scores = q.shape[1] * q.shape[2] * k.shape[2]
            most = min(max(_MOST_SCORES // max(scores, 1), 2), _MOST_SAMPLES, len(q))
            chosen = np.sort(self._generator.choice(len(q), most, replace=False))
            samples = to_device(chosen, q.device)
            with torch.no_grad():
                of_samples = made(samples)
            k = of_heads(k, q.shape[1]).expand(len(q), -1, -1, -1)
            held, uses = self._held[forward.module], list(progress.uses)
            call = _Call(held, q, k, of_samples, samples, uses, is_output)
            self.ask([asks], call.arrive)
            self.calls[path].append(call)
            progress.calls.append(call)

    def _is_due(self, module: nn.Module) -> bool:
        """Return whether the module is due, as its first selected parameter is."""
        held = map(id, self._held[module])
        first = next((key for key in held if key in self._places), None)
        return self._due is None or first in self._due

    # --- afterwards ------------------------------------------------------------------------------

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose change moves the scores."""
        every = (call for calls in self.calls.values() for call in calls)
        return list(dict.fromkeys(p for call in every for p in call.held))

    def begin(self, *, knows_loss: bool) -> None:
        """Compute the scales, and the sums of a plain gradient step."""
        for path, call in self._each():
            with self._guarded(path), torch.no_grad():
                if knows_loss and call.gradient is None:
                    raise Refused("no gradient reached it in this step")
                self._take_scale(call)
                if call.gradient is None and call.D is None:
                    why = f"its scale is not known ({call.no_scale}), and neither is the loss"
                    raise Refused(why)
                self._begin(call)

    def _take_scale(self, call: _Call) -> None:
        q, k = call.query, call.key
        samples, heads, queries, _ = q.shape
        draws = max(1, _MOST_DIAGONALS // heads)
        call.keys = some_keys(samples, heads, queries, k.shape[2], draws, self._generator)
        if not (q.requires_grad or k.requires_grad):
            call.no_scale = "no trained parameter makes its queries or keys"
            return
        try:
            call.D = scales(q, k, call.uses, call.keys)
        except (RuntimeError, ValueError) as error:
            call.no_scale = str(error)

    def _begin(self, call: _Call) -> None:
        keys = to_device(call.keys, call.samples.device).index_select(0, call.samples)
        G = call.score_gradient
        active = active_scores(call.scores, G, keys)
        scale = None
        if call.D is not None:
            share = call.keys.shape[3] / max(call.scores.lengths)
            D = call.D.index_select(0, call.samples)
            scale = scale_sums(D, active, _error(call), share)
        G_G, moved = None, None
        if G is not None:
            e = call.move({p: p.grad for p in call.held if p.grad is not None})
            G_G, moved = move_sums(call.scores, G, e)
        is_finite = call.query.isfinite().all() & call.key.isfinite().all()
        call.sums = AttentionSums(
            *(len(call.query), _precision(call.query), (~is_finite).to(call.scores.query.dtype)),
            G_G=G_G,
            e=moved,
            scale=scale,
            no_scale=call.no_scale,
        )

    def updated(self, taken: Tangents) -> None:
        """Compute the sums of the optimizer's step, θ before minus θ after, by parameter."""
        for path, call in self._each():
            G = call.score_gradient
            if G is not None:
                with self._guarded(path), torch.no_grad():
                    d = call.move({p: taken[p] for p in call.held})
                    call.sums = replace(call.sums, d=move_sums(call.scores, G, d)[1])
            call.query, call.key = call.query.detach(), call.key.detach()  # releases the graph
            call.uses = call.inputs = ()

    def sums(self) -> dict[str, tuple[AttentionSums[Tensor], ...]]:
        """Return the records of the calls of each attention, by path; the graphs are released."""
        kept = {p: calls for p, calls in self.calls.items() if p not in self.refused}
        self.calls = {}
        return {path: tuple(call.sums for call in calls) for path, calls in kept.items()}

    def _each(self) -> list[tuple[str, _Call]]:
        return [(p, c) for p, calls in self.calls.items() for c in calls if p not in self.refused]

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


def _explicit(q: Tensor, k: Tensor, logits: Tensor, samples: Tensor) -> Attention:
    """Return a call whose scores are explicit; its values are not known."""
    q, k, logits = (to_compute_dtype(x).index_select(0, samples) for x in (q, k, logits))
    scale = q.shape[-1] ** -0.5
    return Attention(q, k, k, logits - q @ k.mT * scale, causal=False, scale=scale)


def _error(call: _Call) -> Tensor:
    """Return |D − ‖∂Y_ts/∂Θ‖²| / ‖∂Y_ts/∂Θ‖² of one score, by its gradient."""
    assert call.D is not None
    n, head, t, draw = np.argwhere(call.keys >= 0)[-1]
    with call.single_layer():
        score = call.query[n, head, t] @ call.key[n, head, call.keys[n, head, t, draw]]
        found = torch.autograd.grad(score, call.held, retain_graph=True, allow_unused=True)
    whole = torch.stack([to_compute_dtype(g).square().sum() for g in found if g is not None]).sum()
    return (call.D[n, head, t, draw] - whole).abs().div(whole)


def _precision(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def _is_trained(tensor: Tensor | None) -> bool:
    """Return whether it is a trained parameter or its view."""
    if tensor is None or not tensor.requires_grad:
        return False
    return tensor.is_leaf or (tensor._base is not None and tensor._base.is_leaf)
