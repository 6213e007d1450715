"""Sees the attentions of one step: a few samples of each, and what the loss asks of those.

Of every call of `F.scaled_dot_product_attention` are kept, on samples that are chosen like the
rows of a layer: the inputs of the module around it, to run that once more; the queries, keys and
outputs, to see whether it then did the same; the output's gradient. Where `nn.MultiheadAttention`
returns its weights it makes its scores by itself: then their gradient is kept instead.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from adiv_layers.autocast import without_autocast
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.capture.attention.attention_dropout import kept
from adiv_monitor.capture.attention.score_moves import ARGUMENTS
from adiv_monitor.capture.attention.some_samples import batch_size, of_samples
from adiv_monitor.capture.forwards import Forward, Forwards, FunctionToCall
from adiv_monitor.capture.hook import trains
from adiv_monitor.capture.layer_rows import Call, Chooser, LayerRows
from adiv_monitor.capture.sampling import Draw
from adiv_monitor.capture.selection import Selection
from adiv_monitor.capture.weights.shards import is_shard
from adiv_monitor.features.rows import Rows, to_compute_dtype
from adiv_monitor.features.scores import by_head
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.thread import ThreadState

_MOST_SAMPLES = 8
# Scores of all samples of an attention together; but less than two samples tell no error.
_MOST_SCORES = 2**23
_BY_HAND = ("bmm", "baddbmm", "matmul", "__matmul__", "softmax")


@dataclass(frozen=True)
class Seen:
    """What is kept of one call's samples, which come first in all tensors.

    A sample of the module may be several of the call's: windows, or heads.

    Attributes:
        args: of the module's forward, on these samples.
        kwargs: see args.
        query: q, times the scores' scale where that comes before the product.
        key: k; fewer heads where queries are grouped.
        written: see `AttentionModule`.
        precision: rounding of the coarsest number on the way.
        output: O; None if the gradient is that of the scores.
        kept: which probabilities dropout did not zero; None without dropout.
    """

    args: Sequence[Any]
    kwargs: dict[str, Any]
    query: Float[Tensor, "samples of_each heads queries width"]
    key: Float[Tensor, "samples of_each few keys width"]
    written: Mapping[int, Tensor]
    precision: float
    output: Float[Tensor, "samples of_each heads queries value_width"] | None = None
    kept: Bool[Tensor, "samples of_each heads queries keys"] | None = None


class AttentionCall(Call):
    """One call of attention; its rows are samples of the module's batch.

    Attributes:
        seen: what is kept of it, on all samples that were gathered.
        picked: which of those are looked at in the end; None: all.
    """

    def __init__(self, rows: Rows, chosen: Draw, seen: Seen) -> None:
        super().__init__(None, rows, chosen)
        self.seen = seen
        self.picked: Tensor | None = None

    @property
    def looked_at(self) -> int:
        """How many samples are."""
        return self.rows.total if self.rows.chosen is None else len(self.rows.chosen)

    def pick(self, index: Tensor) -> None:
        """Look at no more than these; the inputs stay, for what is per sample shows but once."""
        self.picked = index


@dataclass
class Attending:
    """An attention of the model: one of those that a module calls in a forward.

    Attributes:
        module: the module.
        held: its parameters that are trained, by name.
        number: its place among these, from 1.
        rows: its calls, whose rows are samples.
    """

    module: nn.Module
    held: Mapping[str, nn.Parameter]
    number: int
    rows: LayerRows

    def finish(self) -> list[AttentionCall]:
        """The gradients are final: the calls that are part of them."""
        calls = [call for call in self.rows.finish() if isinstance(call, AttentionCall)]
        self.rows.release()
        return calls


@dataclass(eq=False)
class _Progress:
    """How far a forward of a module has got."""

    attended: int = 0
    product: Sequence[Tensor] = ()  # of what the last one was made: q and kᵀ perhaps


@dataclass(frozen=True)
class _Choice:
    """Which samples of one call are looked at: of the module's batch, and so of the queries'."""

    path: str
    attending: Attending
    rows: Rows
    draw: Draw
    index: Int[Tensor, " chosen"]
    queries: int  # samples of the queries
    shaped: Callable[[Tensor], Tensor]  # into (samples, heads, ...)

    def take(self, tensor: Tensor) -> Float[Tensor, "chosen of_each heads length width"]:
        """Those samples of what the call was given, or gave."""
        every = self.shaped(tensor.detach())
        every = every.expand(self.queries, -1, -1, -1)
        by_sample = every.reshape(self.rows.total, -1, *every.shape[1:])
        return to_compute_dtype(by_sample.index_select(0, self.index))

    @property
    def of_queries(self) -> Int[Tensor, " chosen_of_each"]:
        """Their places among the queries' samples."""
        of_each = self.queries // self.rows.total
        within = torch.arange(of_each, device=self.index.device)
        return (self.index[:, None] * of_each + within).flatten()


class AttentionCalls:
    """Gathers samples of every attention in one step.

    Args:
        selection: what is measured.
        generator: the monitor's own source of chance.
        fail: called with a path and the exception that was met there, if it is not of a kind that
            says why an attention can't be measured.

    Attributes:
        attending: by path, what was seen.
        refused: path → why an attention is not measured.
        last_used: the parameter whose use was seen last.
    """

    def __init__(
        self,
        selection: Selection,
        generator: np.random.Generator,
        fail: Callable[[str, Exception], None],
    ) -> None:
        self.attending: dict[str, Attending] = {}
        self.refused: dict[str, str] = {}
        self.last_used: nn.Parameter | None = None
        self._generator = generator
        self._fail = fail
        self._active = True
        self._choosers: dict[int, Chooser] = {}
        self._paths = selection.modules
        self._due, self._selected = selection.due, selection.places
        self._some_wait, self._in_parts = False, selection.peers is not None
        trained = {id(p) for p in selection.trained}
        self._held: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for module in selection.modules:
            held = {n: p for n, p in module.named_parameters() if id(p) in trained}
            if any(p.dim() > 1 for p in held.values()):
                self._held[module] = held
        self._progress: weakref.WeakKeyDictionary[Forward, _Progress] = weakref.WeakKeyDictionary()
        # id of a parameter → attentions whose samples have their gradient when it has its own.
        self._led_by: dict[int, dict[str, Attending]] = defaultdict(dict)

    def detach(self) -> None:
        """Hooks in graphs that are already built fall silent."""
        self._active = False

    def saw_none(self) -> bool:
        """Whether there was nothing to be measured, or to be refused."""
        return not self.attending and not self.refused and not self._some_wait

    def rows_of(self, parameter: nn.Parameter) -> list[LayerRows]:
        """The samples whose gradient is told by this parameter's."""
        return [attending.rows for attending in self._led_by.get(id(parameter), {}).values()]

    def begins(self, forward: Forward) -> None:
        """A module's forward begins."""
        if forward.module in self._held:
            self._progress[forward] = _Progress()

    def look(self, call: FunctionToCall, forwards: Forwards) -> None:
        """Look at what makes scores, or weights of them."""
        if call.function is functional.scaled_dot_product_attention:
            self._attend(forwards.running, call)
        name = getattr(call.function, "__name__", "")
        if name in _BY_HAND and isinstance(forwards.innermost, nn.MultiheadAttention):
            self._weigh(forwards.running, name, call.args)

    def _attend(self, running: Sequence[Forward], call: FunctionToCall) -> None:
        """The fused function."""
        given = {**dict(zip(ARGUMENTS, call.args, strict=False)), **call.kwargs}
        forward = self._around(running)
        choice = random = None
        if forward is not None:
            path = self._next_path(forward)
            with self.guarded(path):
                choice = self._choose(path, forward, given["query"], given["key"], _by_head)
                if choice is not None and given.get("dropout_p", 0.0) > 0:
                    random = Randomness([given["query"].device])
        output = call()
        if forward is not None and choice is not None and output.requires_grad:
            with self.guarded(choice.path):
                dropped = None
                if random is not None:
                    of_queries = kept(random, choice.of_queries, **given)
                    dropped = of_queries.view(len(choice.index), -1, *of_queries.shape[1:])
                self._keep(choice, forward, given["query"], given["key"], output, output, dropped)

    def _weigh(self, running: Sequence[Forward], name: str, args: tuple[Any, ...]) -> None:
        """One of the functions by which scores are made, and weights of them."""
        forward = self._around(running)
        if forward is not None:
            progress = self._progress[forward]
            product, progress.product = progress.product, ()
            if name != "softmax":
                progress.product = args[-2:]
            elif len(product) == 2 and args and args[0].requires_grad:
                path = self._next_path(forward)
                with self.guarded(path):
                    query, key = product[0], product[1].mT
                    choice = self._choose(path, forward, query, key, _heads_apart)
                    if choice is not None:
                        self._keep(choice, forward, query, key, args[0])

    def _is_due(self, module: nn.Module) -> bool:
        """Whether it is the turn of its first parameter that has one."""
        if self._due is None:
            return True
        held = map(id, self._held[module].values())
        return next((key in self._due for key in held if key in self._selected), False)

    def _around(self, running: Sequence[Forward]) -> Forward | None:
        """The innermost forward of a module that holds matrices that are trained."""
        return next((forward for forward in reversed(running) if forward in self._progress), None)

    def _next_path(self, forward: Forward) -> str:
        """What the attention that the forward now calls is named."""
        progress, path = self._progress[forward], self._paths[forward.module]
        progress.attended += 1
        return path if progress.attended == 1 else f"{path}#{progress.attended}"

    def _choose(
        self,
        path: str,
        forward: Forward,
        query: Tensor,
        key: Tensor,
        shaped: Callable[[nn.Module, Tensor], Tensor],
    ) -> _Choice | None:
        """Which samples of a call to look at; None: it is not to be measured."""
        if path in self.refused or not trains(query):
            return None
        if not self._is_due(forward.module):
            self._some_wait = True
            return None
        if not forward.random.is_still(forward.random.now()):
            raise Refused(
                "random numbers are drawn before its scores are made (dropout of what queries and "
                "keys are made of?), which can't be repeated on some samples"
            )
        module = forward.module
        count = batch_size(module, forward.args, forward.kwargs)
        samples, heads = shaped(module, query).shape[:2]
        if not count or samples % count:
            raise Refused(
                f"got queries of {samples} samples from inputs of {count}, expected a multiple"
            )
        scores = samples // count * heads * query.shape[-2] * key.shape[-2]
        attending = self._attending(path, module, self._progress[forward].attended, scores)
        rows, drawn = attending.rows.choose((count,), query.device)
        every = torch.arange(count, device=query.device)
        index = every if rows.chosen is None else rows.flat
        return _Choice(path, attending, rows, drawn, index, samples, partial(shaped, module))

    def _attending(self, path: str, module: nn.Module, number: int, scores: int) -> Attending:
        """The attention of this path; new if need be, with as many samples as its scores allow."""
        if path not in self.attending:
            most = min(max(_MOST_SCORES // max(scores, 1), 2), _MOST_SAMPLES)
            chooser = self._choosers.setdefault(most, Chooser(most, self._generator))
            held = self._held[module]
            if self._in_parts or any(map(is_shard, held.values())):
                raise Refused("each rank holds but a part of its parameters, or of the model's")
            self.attending[path] = Attending(module, held, number, LayerRows(chooser, path))
        return self.attending[path]

    def _keep(
        self,
        choice: _Choice,
        forward: Forward,
        query: Tensor,
        key: Tensor,
        asks: Tensor,
        output: Tensor | None = None,
        dropped: Tensor | None = None,
    ) -> None:
        """Keep the samples of a call, and wait for the gradient of what asks for one."""
        with torch.no_grad(), without_autocast(asks):
            args, kwargs = of_samples(forward.module, forward.args, forward.kwargs, choice.index)
            seen = Seen(
                args,
                kwargs,
                choice.take(query),
                choice.take(key),
                forward.written,
                max(torch.finfo(tensor.dtype).eps for tensor in (query, asks)),
                None if output is None else choice.take(output),
                dropped,
            )
        call, attending = AttentionCall(choice.rows, choice.draw, seen), choice.attending
        attending.rows.add(call)
        # What was used last before the scores has its gradient after them.
        if any(parameter is self.last_used for parameter in attending.held.values()):
            self._led_by[id(self.last_used)][choice.path] = attending
        arrive = partial(self._arrives, choice, call)
        call.hook = weakref.ref(arrive)
        asks.register_hook(arrive)  # type: ignore[no-untyped-call]

    def _arrives(self, choice: _Choice, call: AttentionCall, gradient: Tensor) -> None:
        """The gradient of a call's output, or of its scores."""
        state = ThreadState()
        with state, self.guarded(choice.path), torch.no_grad(), torch._C.DisableTorchFunction():
            if not self._active or not trains(gradient) or choice.path in self.refused:
                return
            with without_autocast(gradient):
                taken = choice.take(gradient)
                precision = torch.finfo(gradient.dtype).eps
                choice.attending.rows.arrive(call, taken, taken.new_empty(0), precision)

    def guarded(self, path: str) -> "_Guard":
        """What fails inside of it does not reach the training loop: the attention is refused."""
        return _Guard(self, path)

    def failed(self, path: str, error: Exception) -> None:
        """The attention is not measured in this step."""
        self.attending.pop(path, None)
        if isinstance(error, (Refused, RuntimeError, ValueError)):
            self.refused[path] = str(error)
            return
        self.refused[path] = f"measuring it failed: {type(error).__name__}: {error}"
        self._fail(path, error)


@dataclass(frozen=True)
class _Guard:
    calls: AttentionCalls
    path: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):
            self.calls.failed(self.path, error)
        return isinstance(error, Exception)


def _by_head(module: nn.Module, tensor: Tensor) -> Tensor:
    return by_head(tensor)


def _heads_apart(module: nn.Module, tensor: Tensor) -> Tensor:
    """Torch's own attention has samples and heads in one dimension."""
    return tensor if tensor.dim() == 4 else tensor.unflatten(0, (-1, module.num_heads))  # type: ignore[no-untyped-call]
