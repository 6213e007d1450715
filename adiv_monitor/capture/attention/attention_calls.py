"""Captures the attention calls of one step: sampled inputs, scores' factors and gradients.

For each call of `F.scaled_dot_product_attention`, samples are chosen like the rows of a layer. The
record holds the inputs of the surrounding module, to run it again; queries, keys and outputs, to
check whether the rerun reproduces them; and the output's gradient. `nn.MultiheadAttention` computes
its scores by itself if it returns its weights: then the scores' gradient is recorded instead.
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
from adiv_monitor.capture.selection import Selection
from adiv_monitor.capture.weights.shards import is_shard
from adiv_monitor.features.rows import Rows, to_compute_dtype
from adiv_monitor.features.scores import by_head
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.thread import ThreadState

_MOST_SAMPLES = 8
# The most scores in all samples of an attention; an error needs at least two samples.
_MOST_SCORES = 2**23
_BY_HAND = ("bmm", "baddbmm", "matmul", "__matmul__", "softmax")


@dataclass(frozen=True)
class CallRecord:
    """The record of one call's samples; the sample dimension comes first in all tensors.

    One sample of the module may be several of the call: windows or heads.

    Attributes:
        args: the arguments of the module's forward on these samples.
        kwargs: see args.
        query: q, including the scores' scale if that is applied before the product.
        key: k; it has fewer heads if queries are grouped.
        written: see `twin_of`.
        precision: the machine epsilon of the coarsest tensor involved.
        output: O; None if the gradient is that of the scores.
        kept: the probabilities that dropout did not zero; None without dropout.
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
        seen: the record of all samples that were gathered.
        picked: the samples that are used in the end; None: all.
    """

    def __init__(self, rows: Rows, seen: CallRecord) -> None:
        super().__init__(None, rows)
        self.seen = seen
        self.picked: Tensor | None = None

    def pick(self, index: Tensor) -> None:
        """Use only these samples; the recorded inputs stay, since they can't be split again."""
        self.picked = index


@dataclass
class Attending:
    """One of the attention calls that a module makes in its forward.

    Attributes:
        module: the module.
        held: its trained parameters, by name.
        number: the position among the module's attention calls, from 1.
        rows: the calls, whose rows are samples.
    """

    module: nn.Module
    held: Mapping[str, nn.Parameter]
    number: int
    rows: LayerRows

    def finish(self) -> list[AttentionCall]:
        """Return the calls that are part of the final gradient."""
        calls = [call for call in self.rows.finish() if isinstance(call, AttentionCall)]
        self.rows.release()
        return calls


@dataclass(eq=False)
class _Progress:
    """The progress of a module's forward."""

    attended: int = 0
    product: Sequence[Tensor] = ()  # the factors of the last product: q and kᵀ perhaps


@dataclass(frozen=True)
class _Choice:
    """The chosen samples of one call, as indices into the module's batch."""

    path: str
    attending: Attending
    rows: Rows
    index: Int[Tensor, " chosen"]
    queries: int  # the number of samples of the queries
    shaped: Callable[[Tensor], Tensor]  # into (samples, heads, ...)

    def take(self, tensor: Tensor) -> Float[Tensor, "chosen of_each heads length width"]:
        """Return the chosen samples of an input or output of the call."""
        every = self.shaped(tensor.detach())
        every = every.expand(self.queries, -1, -1, -1)
        by_sample = every.reshape(self.rows.total, -1, *every.shape[1:])
        return to_compute_dtype(by_sample.index_select(0, self.index))

    @property
    def of_queries(self) -> Int[Tensor, " chosen_of_each"]:
        """The positions of the chosen samples among the queries' samples."""
        of_each = self.queries // self.rows.total
        within = torch.arange(of_each, device=self.index.device)
        return (self.index[:, None] * of_each + within).flatten()


class AttentionCalls:
    """Gathers samples of every attention in one step.

    Args:
        selection: the parameters to measure.
        generator: the monitor's own random number generator.
        fail: called with a path and an unexpected exception; exceptions that state why an attention
            can't be measured are kept in `refused`.

    Attributes:
        attending: the attentions that were seen, by path.
        refused: path → the reason why an attention is not measured.
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
        self._some_left_out = False
        trained = {id(p) for p in selection.trained}
        self._held: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for module in selection.modules:
            held = {n: p for n, p in module.named_parameters() if id(p) in trained}
            if any(p.dim() > 1 for p in held.values()):
                self._held[module] = held
        self._progress: weakref.WeakKeyDictionary[Forward, _Progress] = weakref.WeakKeyDictionary()
        # id of a parameter → attentions whose gradient is complete when the parameter's arrives.
        self._led_by: dict[int, dict[str, Attending]] = defaultdict(dict)

    def detach(self) -> None:
        """Make hooks in graphs that are already built inactive."""
        self._active = False

    def saw_none(self) -> bool:
        """Return whether no attention was measured, refused or left out."""
        return not self.attending and not self.refused and not self._some_left_out

    def rows_of(self, parameter: nn.Parameter) -> list[LayerRows]:
        """Return the samples whose gradient is complete when this parameter's gradient arrives."""
        return [attending.rows for attending in self._led_by.get(id(parameter), {}).values()]

    def begins(self, forward: Forward) -> None:
        """Record that a module's forward begins."""
        if forward.module in self._held:
            self._progress[forward] = _Progress()

    def look(self, call: FunctionToCall, forwards: Forwards) -> None:
        """Inspect a function that may compute attention, scores or their weights."""
        if call.function is functional.scaled_dot_product_attention:
            self._attend(forwards.running, call)
        name = getattr(call.function, "__name__", "")
        if name in _BY_HAND and isinstance(forwards.innermost, nn.MultiheadAttention):
            self._weigh(forwards.running, name, call.args)

    def _attend(self, running: Sequence[Forward], call: FunctionToCall) -> None:
        """Call the fused attention function and record its samples."""
        given = {**dict(zip(ARGUMENTS, call.args, strict=False)), **call.kwargs}
        forward = self._around(running)
        choice = random = None
        if forward is not None:
            path = self._next_path(forward)
            with self.guarded(path):
                choice = self._choose(path, forward, given["query"], given["key"], by_head)
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
        """Inspect a function by which `nn.MultiheadAttention` computes scores or their weights."""
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
                    heads_apart = partial(_heads_apart, forward.module)
                    choice = self._choose(path, forward, query, key, heads_apart)
                    if choice is not None:
                        self._keep(choice, forward, query, key, args[0])

    def _is_due(self, module: nn.Module) -> bool:
        """Return whether the module is due, as its first selected parameter is."""
        if self._due is None:
            return True
        held = map(id, self._held[module].values())
        return next((key in self._due for key in held if key in self._selected), False)

    def _around(self, running: Sequence[Forward]) -> Forward | None:
        """Return the innermost forward of a module that holds trained matrices."""
        return next((forward for forward in reversed(running) if forward in self._progress), None)

    def _next_path(self, forward: Forward) -> str:
        """Return the path of the next attention call in the forward."""
        progress, path = self._progress[forward], self._paths[forward.module]
        progress.attended += 1
        return path if progress.attended == 1 else f"{path}#{progress.attended}"

    def _choose(
        self,
        path: str,
        forward: Forward,
        query: Tensor,
        key: Tensor,
        shaped: Callable[[Tensor], Tensor],
    ) -> _Choice | None:
        """Return the samples of a call to record, or None if it is not measured."""
        if path in self.refused or not trains(query):
            return None
        if not query.numel() or not self._is_due(forward.module):
            self._some_left_out = True
            return None
        if not forward.random.is_still(forward.random.now()):
            raise Refused(
                "random numbers are drawn before its scores are made (dropout of what queries and "
                "keys are made of?), which can't be repeated on some samples"
            )
        module = forward.module
        count = batch_size(module, forward.args, forward.kwargs)
        samples, heads = shaped(query).shape[:2]
        if not count or samples % count:
            raise Refused(
                f"got queries of {samples} samples from inputs of {count}, expected a multiple"
            )
        scores = samples // count * heads * query.shape[-2] * key.shape[-2]
        attending = self._attending(path, module, self._progress[forward].attended, scores)
        rows = attending.rows.choose((count,), query.device)
        every = torch.arange(count, device=query.device)
        index = every if rows.chosen is None else rows.flat
        return _Choice(path, attending, rows, index, samples, shaped)

    def _attending(self, path: str, module: nn.Module, number: int, scores: int) -> Attending:
        """Return the attention of this path; a new one samples as much as its scores allow."""
        if path not in self.attending:
            most = min(max(_MOST_SCORES // max(scores, 1), 2), _MOST_SAMPLES)
            chooser = self._choosers.setdefault(most, Chooser(most, self._generator))
            held = self._held[module]
            if any(map(is_shard, held.values())):
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
        """Record the samples of a call, and hook the tensor whose gradient is needed."""
        with torch.no_grad(), without_autocast(asks):
            args, kwargs = of_samples(forward.module, forward.args, forward.kwargs, choice.index)
            seen = CallRecord(
                args,
                kwargs,
                choice.take(query),
                choice.take(key),
                forward.written,
                max(torch.finfo(tensor.dtype).eps for tensor in (query, asks)),
                None if output is None else choice.take(output),
                dropped,
            )
        call, attending = AttentionCall(choice.rows, seen), choice.attending
        attending.rows.add(call)
        # The parameter used last before the scores gets its gradient after them.
        if any(parameter is self.last_used for parameter in attending.held.values()):
            self._led_by[id(self.last_used)][choice.path] = attending
        arrive = partial(self._arrives, choice, call)
        call.hook = weakref.ref(arrive)
        asks.register_hook(arrive)  # type: ignore[no-untyped-call]

    def _arrives(self, choice: _Choice, call: AttentionCall, gradient: Tensor) -> None:
        """Take the gradient of a call's output or scores."""
        state = ThreadState()
        with state, self.guarded(choice.path), torch.no_grad(), torch._C.DisableTorchFunction():
            if not self._active or not trains(gradient) or choice.path in self.refused:
                return
            with without_autocast(gradient):
                taken = choice.take(gradient)
                precision = torch.finfo(gradient.dtype).eps
                choice.attending.rows.arrive(call, taken, taken.new_empty(0), precision)

    def guarded(self, path: str) -> "_Guard":
        """Return a context that refuses the attention if its body fails."""
        return _Guard(self, path)

    def failed(self, path: str, error: Exception) -> None:
        """Refuse the attention in this step because of an exception."""
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


def _heads_apart(module: nn.Module, tensor: Tensor) -> Tensor:
    """Return the tensor of torch's own attention with samples and heads in two dimensions."""
    return tensor if tensor.dim() == 4 else tensor.unflatten(0, (-1, module.num_heads))  # type: ignore[no-untyped-call]
