"""Attention on the probe: its calls, and how a step moves their scores (spec, section 5).

Libraries differ in the operations between the projections and the scores: views, packed weights,
rotary positions, QK-norm, low-rank updates. Nothing is therefore assumed about them. The module
that holds the projections runs again on its inputs, which are constant, as everywhere
(*single-layer*), up to `F.scaled_dot_product_attention`, and a change of all of its parameters is
carried to the queries and keys to first order.
"""

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from adiv_layers.autocast import without_autocast
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from adiv_monitor.capture.forwards import Forward, Forwards, FunctionToCall, without_overrides
from adiv_monitor.capture.selection import Selection
from adiv_monitor.features.rows import Rows, floats_to_compute_dtype, to_compute_dtype, to_device
from adiv_monitor.features.scores import Attention, Move, attention, by_head, of_heads
from adiv_monitor.features.uses import Refused, Use
from adiv_monitor.maths.attention_sums import (
    AttentionSums,
    active_scores,
    move_sums,
    scale_sums,
)
from adiv_monitor.maths.records import replaced
from adiv_monitor.probe.scales import ScaledUse, scales, some_keys
from adiv_monitor.rerun.derivatives import Parameters, jvp_by_gradients
from adiv_monitor.rerun.nested import mapped

_MOST_SAMPLES = 8
# The most scores in all samples of an attention; an error needs at least two samples.
_MOST_SCORES = 2**23
# The most diagonals of scores, of all heads together, whose scale is computed: each takes two
# backward passes through the functions between projections and scores.
_MOST_DIAGONALS = 32
_BY_HAND = ("bmm", "baddbmm", "matmul", "__matmul__", "softmax")
# Arguments of these types hold no state of the first call, so they can be passed again.
_PLAIN = (str, bytes, int, float, complex, bool, slice, range)
_ARGUMENTS = tuple(inspect.signature(attention).parameters)
_opened = without_overrides(functional.multi_head_attention_forward)


@dataclass(eq=False)
class _Progress:
    """The progress of a module's forward."""

    attended: int = 0
    product: Sequence[Tensor] = ()  # the factors of the last product: q and kᵀ perhaps
    uses: list[ScaledUse] = field(default_factory=list)


@dataclass(eq=False)
class _Call:
    """One call of attention.

    Attributes:
        module: the module that holds the projections, and its arguments.
        held: its trained parameters, by name.
        number: the position among the module's attention calls, from 1.
        query: q with its graph, until the scale is known.
        key: k, which has fewer heads if queries are grouped.
        uses: the uses of parameters before the call.
        edge: of O or, where the scores are explicit, of scale·Y + mask; None: without a graph.
        is_output: whether `edge` is that of O.
        gradient: the gradient of that.
        samples: the chosen samples, (chosen,) int64.
        keys: for every sample, head and query, the keys of the scores whose scale is computed.
        D: their scale; None: it is not known.
        sums: the sums so far.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    held: Mapping[str, nn.Parameter]
    number: int
    query: Float[Tensor, "samples heads queries width"]
    key: Float[Tensor, "samples few keys width"]
    uses: Sequence[ScaledUse]
    edge: GradientEdge | None
    is_output: bool
    gradient: Tensor | None = None
    samples: Tensor = field(init=False)
    keys: np.ndarray = field(init=False)
    D: Tensor | None = None
    no_scale: str = ""
    sums: AttentionSums[Tensor] = field(init=False)
    before: Parameters = field(init=False)
    scores: Attention = field(init=False)

    @property
    def score_gradient(self) -> Callable[[slice], Tensor] | None:
        """A function that returns G of a slice of the queries; None: G is not known."""
        if self.gradient is None:
            return None
        if self.is_output:
            return self.scores.score_gradient(by_head(self.gradient).index_select(0, self.samples))
        every = to_compute_dtype(self.gradient).reshape(len(self.query), *self.query.shape[1:3], -1)
        whole = self.scores.scale * every.index_select(0, self.samples)
        return lambda queries: whole[:, :, queries]

    def reached(self, samples: Tensor, values: Parameters) -> tuple[dict[str, Any], Move]:
        """Run the module again; return the arguments of the call, and q and k of some samples."""
        state = [*self.module.named_parameters(), *self.module.named_buffers()]
        every = {n: floats_to_compute_dtype(x.detach().clone()) for n, x in state}
        seen = _Reaches(self.number)
        with suppress(_ScoresReached), sdpa_kernel(SDPBackend.MATH), seen:
            functional_call(self.module, {**every, **values}, self.args, self.kwargs)
        if seen.arguments is None:
            raise Refused("it calls no F.scaled_dot_product_attention when it runs again")
        q = by_head(seen.arguments["query"])
        k = of_heads(by_head(seen.arguments["key"]), q.shape[1]).expand(len(q), -1, -1, -1)
        return seen.arguments, (q.index_select(0, samples), k.index_select(0, samples))

    def moves(self, values: Parameters, tangents: Parameters) -> tuple[Attention, Move]:
        """Return the call on the chosen samples, and the first-order moves of its q and k."""
        given: dict[str, Any] = {}

        def run(parameters: Parameters) -> Move:
            arguments, made = self.reached(self.samples, parameters)
            given.update(mapped(arguments, Tensor.detach, lambda value: value))
            return made

        precision = torch.finfo(self.query.dtype).eps
        _, move = jvp_by_gradients(run, values, tangents, precision)
        return attention(**given, samples=self.samples), move


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
    """

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
        self._held: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for module in selection.modules:
            held = {n: p for n, p in module.named_parameters() if id(p) in trained}
            if any(p.dim() > 1 for p in held.values()):
                self._held[module] = held
        self._progress: weakref.WeakKeyDictionary[Forward, _Progress] = weakref.WeakKeyDictionary()

    # --- while the probe runs --------------------------------------------------------------------

    def begins(self, forward: Forward) -> None:
        """Record that a module's forward begins."""
        if forward.module in self._held:
            self._progress[forward] = _Progress()

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
            self._found(forward, by_head(given["query"]), by_head(given["key"]), call())
        elif name != "softmax":
            progress.product = call.args[-2:]
        elif isinstance(forward.module, nn.MultiheadAttention):
            product, progress.product = progress.product, ()
            if len(product) == 2 and call.args and min(x.dim() for x in product) > 2:
                q, k = product[0], product[1].mT
                apart = partial(_heads_apart, forward.module.num_heads)
                q = apart(q) * q.shape[-1] ** 0.5
                self._found(forward, q, apart(k), call.args[0], is_output=False)

    def _found(
        self, forward: Forward, q: Tensor, k: Tensor, asks: Tensor, *, is_output: bool = True
    ) -> None:
        progress, path = self._progress[forward], self._paths[forward.module]
        progress.attended += 1
        if progress.attended > 1:
            path = f"{path}#{progress.attended}"
        self.saw_any = True
        if path in self.refused or not q.numel() or not self._is_due(forward.module):
            return
        with self._guarded(path):
            args, kwargs = mapped(
                (tuple(forward.args), dict(forward.kwargs)),
                lambda x: floats_to_compute_dtype(x.detach().clone()),
                lambda value: value if isinstance(value, _PLAIN) else None,
            )
            # With weights to return, it does not call the function.
            if isinstance(forward.module, nn.MultiheadAttention):
                signature = inspect.signature(type(forward.module).forward)
                given = signature.bind(None, *args, **kwargs).arguments
                given.pop("self", None)
                args, kwargs = (), {**given, "need_weights": False}
            edge = get_gradient_edge(asks) if asks.requires_grad else None
            call = _Call(
                *(forward.module, args, kwargs, self._held[forward.module], progress.attended),
                *(q, k, list(progress.uses), edge, is_output),
            )
            scores = q.shape[1] * q.shape[2] * k.shape[2]
            most = min(max(_MOST_SCORES // max(scores, 1), 2), _MOST_SAMPLES, len(q))
            chosen = np.sort(self._generator.choice(len(q), most, replace=False))
            call.samples = to_device(chosen, q.device)
            self.calls[path].append(call)

    def _is_due(self, module: nn.Module) -> bool:
        """Return whether the module is due, as its first selected parameter is."""
        held = map(id, self._held[module].values())
        first = next((key for key in held if key in self._places), None)
        return self._due is None or first in self._due

    @property
    def edges(self) -> list[GradientEdge]:
        """What the loss is to be differentiated by."""
        return [edge for call in self._all() if (edge := call.edge) is not None]

    def arrive(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients by `edges`."""
        asked = [call for call in self._all() if call.edge is not None]
        for call, gradient in zip(asked, gradients, strict=True):
            call.edge, call.gradient = None, gradient

    def _all(self) -> Iterator[_Call]:
        return (call for calls in self.calls.values() for call in calls)

    # --- afterwards ------------------------------------------------------------------------------

    def take_scales(self) -> None:
        """Compute the scales, while the graph of the probe's run exists."""
        for path, call in self._each():
            with self._guarded(path), without_autocast(call.query):
                try:
                    self._take_scale(call)
                except (RuntimeError, ValueError) as error:
                    call.no_scale = str(error)

    def _take_scale(self, call: _Call) -> None:
        q, k = (
            call.query,
            of_heads(call.key, call.query.shape[1]).expand(len(call.query), -1, -1, -1),
        )
        draws = max(1, _MOST_DIAGONALS // q.shape[1])
        samples, heads, queries, _ = q.shape
        call.keys = some_keys(samples, heads, queries, k.shape[2], draws, self._generator)
        if q.requires_grad or k.requires_grad:
            call.D = scales(q, k, call.uses, call.keys)
        else:
            call.no_scale = "no trained parameter makes its queries or keys"

    def begin(self, *, knows_loss: bool) -> None:
        """Run the modules again, and compute the sums of a plain gradient step."""
        for path, call in self._each():
            with self._guarded(path), without_autocast(call.query), torch.no_grad():
                self._begin(call, knows_loss=knows_loss)

    def _begin(self, call: _Call, *, knows_loss: bool) -> None:
        if knows_loss and call.gradient is None:
            raise Refused("no gradient reached it in this step")
        if call.gradient is None and call.D is None:
            raise Refused(f"its scale is not known ({call.no_scale}), and neither is the loss")
        values = {n: floats_to_compute_dtype(p.detach()) for n, p in call.held.items()}
        gamma = {n: p.grad for n, p in call.held.items() if p.grad is not None}
        call.scores, e = call.moves(values, gamma)
        seen = call.query.detach(), of_heads(call.key.detach(), call.query.shape[1])
        pairs = zip(seen, (call.scores.query, call.scores.key), strict=True)
        away = [_away(a.expand(len(seen[0]), -1, -1, -1)[call.samples], b) for a, b in pairs]
        keys = to_device(call.keys, call.samples.device).index_select(0, call.samples)
        G = call.score_gradient
        active = active_scores(call.scores, G, keys)
        scale = None
        if call.D is not None:
            share = call.keys.shape[3] / max(call.scores.lengths)
            D = call.D.index_select(0, call.samples)
            scale = scale_sums(D, active, self._error(call, values), share)
        G_G, moved = (None, None) if G is None else move_sums(call.scores, G, e)
        precision = torch.finfo(call.query.dtype).eps
        call.sums = AttentionSums(
            *(len(call.query), precision, torch.stack(away).amax()),
            G_G=G_G,
            e=moved,
            scale=scale,
            no_scale=call.no_scale,
        )
        call.query, call.key, call.uses = call.query.detach(), call.key.detach(), ()

    @torch.enable_grad()
    def _error(self, call: _Call, values: Parameters) -> Tensor:
        """Return |D − ‖∂Y_ts/∂Θ‖²| / ‖∂Y_ts/∂Θ‖² of one score, by its gradient."""
        assert call.D is not None
        n, head, t, draw = np.argwhere(call.keys >= 0)[-1]
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        _, (q, k) = call.reached(torch.tensor([n], device=call.samples.device), leaves)
        score = q[0, head, t] @ k[0, head, call.keys[n, head, t, draw]]
        found = torch.autograd.grad(score, [*leaves.values()], allow_unused=True)
        whole = torch.stack([g.square().sum() for g in found if g is not None]).sum()
        return (call.D[n, head, t, draw] - whole).abs().div(whole).detach()

    def keep(self, before: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Keep the parameters before the step, by copies that exist already where they do."""
        for _, call in self._each():
            copies = {name: before(p) for name, p in call.held.items()}
            call.before = {
                name: call.held[name].detach().clone() if copy is None else copy
                for name, copy in copies.items()
            }

    def updated(self) -> None:
        """Compute the sums of the optimizer's step."""
        for path, call in self._each():
            G = call.score_gradient
            if G is None:
                continue
            with self._guarded(path), without_autocast(call.query), torch.no_grad():
                values = {n: floats_to_compute_dtype(p) for n, p in call.before.items()}
                taken = {n: values[n] - to_compute_dtype(p.detach()) for n, p in call.held.items()}
                _, moved = move_sums(call.scores, G, call.moves(values, taken)[1])
                call.sums = replaced(call.sums, d=moved)

    def sums(self) -> dict[str, tuple[AttentionSums[Tensor], ...]]:
        """Return the records of the calls of each attention, by path."""
        return {
            path: tuple(call.sums for call in calls)
            for path, calls in self.calls.items()
            if path not in self.refused
        }

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


class _ScoresReached(Exception):
    """Raised to end the run of a module at its scores."""


class _Reaches(TorchFunctionMode):
    """Ends a run at an attention call with a given number, and keeps its arguments."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.arguments: dict[str, Any] | None = None
        self._left = number

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            with self:
                return _opened(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            self._left -= 1
            if not self._left:
                self.arguments = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
                raise _ScoresReached
        return func(*args, **kwargs)


def _is_trained(tensor: Tensor | None) -> bool:
    """Return whether it is a trained parameter or its view."""
    if tensor is None or not tensor.requires_grad:
        return False
    return tensor.is_leaf or (tensor._base is not None and tensor._base.is_leaf)


def _heads_apart(heads: int, tensor: Tensor) -> Tensor:
    """Return the tensor of torch's own attention with samples and heads in two dimensions."""
    return tensor if tensor.dim() == 4 else tensor.unflatten(0, (-1, heads))  # type: ignore[no-untyped-call]


def _away(then: Tensor, again: Tensor) -> Tensor:
    """Return the relative difference of two tensors."""
    norm, then = torch.linalg.vector_norm, to_compute_dtype(then)
    found: Tensor = norm(again - then) / (norm(then) + torch.finfo(then.dtype).tiny)
    return found
