"""Attention on the probe: its calls, and how a step moves their scores (spec, section 5).

Libraries differ in the operations between the projections and the scores: views, packed weights,
rotary positions, QK-norm, low-rank updates. Nothing is therefore assumed about them: a change of
all parameters of the module that holds the projections is carried to queries and keys, to first
order, through the graph of the probe's run. The module's inputs are constant, as everywhere
(*single-layer*).
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.capture.forwards import Called, Forward
from adiv_monitor.capture.selection import Selection
from adiv_monitor.features.rows import to_compute_dtype
from adiv_monitor.features.uses import Refused
from adiv_monitor.maths.scores import ESTIMATES, RECORD, Attention, attention, by_head, of_heads
from adiv_monitor.rerun.derivatives import pusher
from adiv_monitor.rerun.nested import tensors_in

# Each score's move by some random changes of the parameters tells its scale; by a unit change of
# every parameter, exactly, if all of these moves of the queries have so few numbers.
_MOST_EXACT = 2**20
_ARGUMENTS = tuple(inspect.signature(attention).parameters)


@dataclass(eq=False)
class _Call:
    """One call of attention.

    Attributes:
        held: the trained parameters of the module that holds the projections.
        made: q and k, repeated for every query's head, with their graph.
        scores: the call, without a graph.
        inputs: the tensors in the module's arguments that require a gradient.
        parts: the numbers so far, by part of `RECORD`.
    """

    held: Sequence[nn.Parameter]
    made: Sequence[Float[Tensor, "samples heads length width"]]
    scores: Attention
    inputs: Sequence[Tensor] = ()
    parts: dict[str, Float[Tensor, "samples heads numbers"]] = field(default_factory=dict)

    def take(self, gradient: Tensor) -> None:
        """Take ∂L/∂O."""
        self.scores = replace(self.scores, gradient=to_compute_dtype(by_head(gradient)))

    @cached_property
    def _push(self) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """The map from changes of the parameters to the first-order moves of q and k."""
        with ExitStack() as hooks, torch.enable_grad():
            for tensor in self.inputs:  # they are constant: no gradient passes through them
                handle = tensor.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
                hooks.callback(handle.remove)
            return pusher(self.made, self.held, torch.finfo(self.made[0].dtype).eps)

    def moved(self, tangents: Sequence[Tensor], move: str) -> None:
        """Add ‖g‖², and the sums of a first-order move of the scores; NaN if g is not known."""
        if self.scores.gradient is None:
            found = self.scores.query.new_full((*self.scores.query.shape[:2], 3), torch.nan)
        else:
            dq, dk = self._push(tangents)
            found = self.scores.moves((dq, dk))
        self.parts |= {"G_G": found[..., :1], move: found[..., 1:]}

    def looks(self, generator: np.random.Generator) -> None:
        """Add the sums of the scales, and where it looks."""
        like, sizes = self.made[0], [p.numel() for p in self.held]
        spread = self.scores.spread(torch.finfo(like.dtype).eps)
        if not spread[..., 2:4].isfinite().all():
            raise Refused("its queries or keys are not finite")
        count = sum(sizes)
        given: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        is_exact = count * like.numel() <= _MOST_EXACT
        random = torch.Generator(like.device).manual_seed(int(generator.integers(2**62)))
        drawn = (torch.randn(count, generator=random, **given) for _ in range(ESTIMATES))
        moves: Iterator[Any] = (
            self._push([t.view_as(p) for t, p in zip(row.split(sizes), self.held, strict=True)])
            for row in (torch.eye(count, **given) if is_exact else drawn)
        )
        if is_exact:
            found = [self.scores.scales([*moves], 1)] * ESTIMATES
        else:
            found = [self.scores.scales([move], 3) for move in moves]
        counts, scale, square = torch.stack(found, -1).unbind(2)
        self.parts |= {"count": counts[..., :1], "scale": scale, "square": square, "spread": spread}

    def record(self) -> Tensor:
        """Return all numbers."""
        unknown = torch.full_like(self.parts["e"], torch.nan)
        return torch.cat([self.parts.get(name, unknown) for name in RECORD], -1)


class Attentions:
    """Finds the calls of attention while the probe runs, and measures them. See `step/probing.py`.

    Args:
        selection: the parameters to measure.
        generator: the monitor's own random number generator.
        fail: called with what failed and an unexpected exception; exceptions that state why an
            attention can't be measured are kept in `refused`.

    Attributes:
        calls: the calls that were seen, by path.
        refused: path → the reason why an attention is not measured.
        saw_any: whether any was seen.
        ask: called with a tensor and a function that gets its gradient, if there is one.
    """

    ask: Callable[[Tensor, Callable[[Tensor], None]], None]

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
        self._running: dict[Forward, list[_Call]] = {}

    # --- while the probe runs --------------------------------------------------------------------

    def ends(self, forward: Forward, args: object, kwargs: object) -> None:
        """Record the inputs of a module's forward."""
        for call in self._running.pop(forward, ()):
            call.inputs = [x for x in tensors_in(args, kwargs) if x.requires_grad]

    def look(self, call: Called, running: Sequence[Forward]) -> None:
        """Look at a function that may compute attention."""
        forward = next((x for x in reversed(running) if x.module in self._held), None)
        if call.function is not functional.scaled_dot_product_attention or forward is None:
            return
        self.saw_any = True
        held, path = self._held[forward.module], self._paths[forward.module]
        before = self._running.setdefault(forward, [])
        path += f"#{len(before) + 1}" if before else ""
        given = {**dict(zip(_ARGUMENTS, call.args, strict=False)), **call.kwargs}
        q = by_head(given["query"])
        is_due = self._due is None or any(id(p) in self._due for p in held)
        if path in self.refused or not q.numel() or not is_due:
            return
        with self._guarded(path):
            with torch.no_grad():
                scores = attention(**given)
            k = of_heads(by_head(given["key"]), q.shape[1]).expand(len(q), -1, -1, -1)
            if not (q.requires_grad or k.requires_grad):
                raise Refused("no trained parameter makes its queries or keys")
            made = [x if x.requires_grad else x.detach().requires_grad_() for x in (q, k)]
            taken = _Call(held, made, scores)
            self.ask(call.result, taken.take)
            self.calls[path].append(taken)
            before.append(taken)

    # --- afterwards ------------------------------------------------------------------------------

    def begin(self, *, knows_loss: bool) -> None:
        """Compute the scales, and the sums of a plain gradient step."""
        self._each(partial(self._begin, knows_loss))

    def _begin(self, knows_loss: bool, call: _Call) -> None:
        if knows_loss and call.scores.gradient is None:
            raise Refused("no gradient reached it in this step")
        call.moved([torch.zeros_like(p) if p.grad is None else p.grad for p in call.held], "e")
        call.looks(self._generator)
        del call._push  # its graph holds the parameters, which the step changes in place

    def updated(self, taken: Mapping[nn.Parameter, Tensor]) -> None:
        """Compute the sums of the optimizer's step, θ before minus θ after, by parameter."""
        self._each(partial(self._updated, taken))

    def _updated(self, taken: Mapping[nn.Parameter, Tensor], call: _Call) -> None:
        call.moved([taken[p] for p in call.held], "d")
        call.made = call.inputs = ()  # the graph is not needed any more
        vars(call).pop("_push", None)

    def records(self) -> dict[str, Tensor]:
        """Return the record of each attention, of all of its calls."""
        kept = {p: calls for p, calls in self.calls.items() if p not in self.refused}
        self.calls = {}
        return {path: torch.cat([call.record() for call in calls]) for path, calls in kept.items()}

    def _each(self, body: Callable[[_Call], None]) -> None:
        """Handle all calls; the attention of one with which the body fails is refused."""
        for path, calls in self.calls.items():
            for call in calls:
                if path not in self.refused:
                    with self._guarded(path), torch.no_grad(), torch._C._DisableAutocast():
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
            self._fail(f"attention of '{path}'", error)
