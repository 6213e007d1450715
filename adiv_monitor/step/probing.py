"""What needs a second forward pass: the realised move of a step, and attention, on the probe.

The probe is taken at the first measured step. At each measured step the model runs on it with the
parameters before the step, forward and backward, then with those half-way, which shows how far the
move is from proportional to the step, and with those after the step.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.loss_hook import LossOf
from adiv_monitor.capture.sampling import draw
from adiv_monitor.capture.selection import Selection, is_wrapper, listed, trainable
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.uses import Refused
from adiv_monitor.maths.attention_sums import AttentionSums
from adiv_monitor.maths.sums import MOVES, REALISED
from adiv_monitor.probe.attention import Attentions
from adiv_monitor.probe.batch import Batch, FirstPass, Losses
from adiv_monitor.probe.rows import LayerOnProbe, ProbeRows
from adiv_monitor.probe.run import run
from adiv_monitor.rerun.surroundings import is_plain
from adiv_monitor.rerun.twin import Waits
from adiv_monitor.step.vectors import Change

T = TypeVar("T")


class Moved(NamedTuple):
    """The realised move of a layer's rows on the probe.

    Attributes:
        total: number of all rows; some of them are sampled.
        products: the dot products of `REALISED`, each (rows,); those with G are NaN if the probe's
            loss is not known.
    """

    total: int
    products: Sequence[Tensor]


_NO_ATTENTION = (
    "No attention of trained weights was seen: only scaled_dot_product_attention and "
    "nn.MultiheadAttention are known."
)
_NO_LOSS = {
    "realised": "realised_cosine is missing: it needs the loss; pass it as `realised=`.",
    "attention": (
        "The cosines of attention are missing: they need the loss; pass it as `loss=` or "
        "`realised=`."
    ),
}


@dataclass(eq=False)
class Probing:
    """The probe of a run, and what is measured on it.

    Attributes:
        model: the model.
        loss: the loss; None: it is not known.
        measures: some of "realised" and "attention".
        max_rows: number of rows to sample per layer; None: all.
        generator: a random generator of its own, so that all other readings remain the same.
        fail: called with what failed, and the exception.
        batch: the probe; None: it was not taken yet.
    """

    model: nn.Module
    loss: LossOf | None
    measures: Sequence[str]
    max_rows: int | None
    generator: np.random.Generator
    fail: Callable[[str, Exception], None]
    batch: Batch | None = None

    def __post_init__(self) -> None:
        self.generator = copy.deepcopy(self.generator)

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the model and of the loss that are no wrappers."""
        of_loss = self.loss.modules() if isinstance(self.loss, nn.Module) else ()
        every = dict.fromkeys((*self.model.modules(), *of_loss))
        return [module for module in every if not is_wrapper(module)]

    def choose(self, shape: tuple[int, ...], device: torch.device) -> Rows:
        """Choose some of all rows."""
        return draw(shape, self.max_rows, np.inf, self.generator, device)


class ProbeStep:
    """Measures one step on the probe.

    Args:
        probing: the probe.
        selection: the parameters to measure.

    Attributes:
        realised: by layer, the realised move.
        loss_change: mean change of the loss, and that of each sample, (samples,).
        notes: notes on what is missing, and why.
    """

    def __init__(self, probing: Probing, selection: Selection) -> None:
        self.realised: dict[str, Moved] = {}
        self.loss_change: tuple[Tensor, Tensor | None] | None = None
        self.notes: list[str] = []
        self._probing, self._modules = probing, probing.modules
        self._first: FirstPass | None = None
        if probing.batch is None:
            fail = partial(probing.fail, "the probe")
            self._first = FirstPass(selection.modules, self._modules, probing.loss, fail)
        self._attentions: Attentions | None = None
        self._before: dict[nn.Parameter, Tensor] = {}
        self._layers: dict[str, LayerOnProbe] = {}
        self._losses: Losses | None = None
        self._capture: Capture

    def put_on(self) -> None:
        """Start recording the first forward pass, if there is no probe yet."""
        if self._first is not None:
            self._first.put_on()

    def remove(self) -> None:
        """Stop recording."""
        if self._first is not None:
            self._first.remove()

    @property
    def refused(self) -> dict[str, str]:
        """Path → why an attention is not measured."""
        return {} if self._attentions is None else self._attentions.refused

    def attention(self) -> dict[str, tuple[AttentionSums[Tensor], ...]]:
        """Return the records of the calls of each attention, by path."""
        return {} if self._attentions is None else self._attentions.sums()

    def gradient_is_final(self, capture: Capture, *, updates: bool) -> None:
        """Run the model with the parameters before the step.

        Args:
            capture: the capture of the step.
            updates: whether an optimizer step follows.
        """
        self.discard()
        self._capture = capture
        self._safely(self._begin, updates)

    def _begin(self, updates: bool) -> None:
        probing, capture = self._probing, self._capture
        if probing.batch is None:
            assert self._first is not None
            probing.batch = self._first.batch()
        self._before = {p: p.detach().clone() for p in trainable(probing.model) if is_plain(p)}
        if "attention" in probing.measures:
            self._attentions = Attentions(
                capture.selection,
                probing.generator,
                lambda path, error: probing.fail(f"attention of '{path}'", error),
            )
        choose = probing.choose if updates and "realised" in probing.measures else None
        rows = ProbeRows(probing.model, capture, choose, {}, self._attentions)

        def begin() -> None:
            # The graph outlives the step: what it holds of parameters are their values before.
            with rows, saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
                losses = self._batch.run()
            knows_loss = self._differentiate(rows, losses)
            self._layers = rows.of_layers(probing.max_rows)
            if self._attentions is not None:
                self._attentions.begin(knows_loss=knows_loss)
                self.notes += [] if self._attentions.saw_any else [_NO_ATTENTION]

        self._run(begin)

    def _differentiate(self, rows: ProbeRows, losses: Losses | None) -> bool:
        """Take the gradients of the loss; return whether they are known, and note why not."""
        if losses is None and self._batch.loss is None:
            self.notes += [_NO_LOSS[measure] for measure in self._probing.measures]
        elif losses is None:
            self.notes.append(f"The loss on the probe is not known: {self._batch.why_no_loss}.")
        else:
            self._losses = Losses(losses.whole.detach(), losses.samples)
            try:
                rows.differentiate(losses.whole)
            except RuntimeError as error:  # as of a re-entrant checkpoint
                first_line = str(error).partition("\n")[0]
                self.notes.append(f"The probe's gradient is not known: {first_line}.")
            else:
                return True
        return False

    def attended(self) -> None:
        """Measure how the optimizer's step moved the scores, while its copies still exist."""
        if self._attentions is not None and self._attentions.calls:
            moved = [p for p in self._attentions.parameters if p in self._before]
            taken = {p: self._before[p] - p.detach() for p in moved}
            self._safely(self._run, partial(self._attentions.updated, taken))

    def take(self, path: str, change: Change) -> None:
        """Take the change of a layer's weight and bias."""
        layer = self._layers.get(path)
        if layer is not None:
            layer.d = layer.features.move(*change)

    def updated(self) -> None:
        """Run the model with the parameters half-way and after the step."""
        if self._layers:
            self._safely(self._compare)
        self._layers.clear()
        self._before.clear()

    @torch.no_grad()
    def _compare(self) -> None:
        for parameter, old in self._before.items():
            old.lerp_(parameter, 0.5)
        half = self._run(self._again)[0]
        for parameter, old in self._before.items():
            old.copy_(parameter)
        whole, losses = self._run(self._again)
        lost = []
        for path, layer in self._layers.items():
            z_half, z = half.z(path), whole.z(path)
            if z_half is None or z is None:
                lost.append(path)
            elif layer.d is not None:
                r = layer.z - z
                b = r - 2 * (layer.z - z_half)
                vectors = dict(zip(MOVES, (layer.G, r, layer.d, b, layer.z), strict=True))
                products = [torch.linalg.vecdot(vectors[a], vectors[b]) for a, b in REALISED]
                self.realised[path] = Moved(layer.total, products)
        if lost:
            self.notes.append(
                f"The real change of {listed(lost)} is not known: it has other calls or rows when "
                "the probe runs again."
            )
        before = self._losses
        if before is not None and losses is not None:
            pair = losses.samples, before.samples
            each = None if pair[0] is None or pair[1] is None else pair[0] - pair[1]
            self.loss_change = (losses.whole - before.whole).detach(), each

    def _again(self) -> tuple[ProbeRows, Losses | None]:
        known = {path: layer.rows for path, layer in self._layers.items()}
        with (rows := ProbeRows(self._probing.model, self._capture, None, known)):
            return rows, self._batch.run()

    @property
    def _batch(self) -> Batch:
        assert self._probing.batch is not None
        return self._probing.batch

    def _run(self, body: Callable[[], T]) -> T:
        return run(self._modules, self._batch.surroundings, self._before, body)

    def _safely(self, action: Callable[..., object], *args: object) -> None:
        """Call an action; say why nothing is known if it fails."""
        try:
            action(*args)
        except Exception as error:
            why = str(error)
            if not isinstance(error, Refused | Waits):
                why = f"the forward pass failed when it ran again: {type(error).__name__}: {why}"
                self._probing.fail("the probe", error)
            self.notes.append(f"Nothing is known on the probe: {why}.")

    def discard(self) -> None:
        """Drop all results: the step can't be measured, or is tried again."""
        self.realised.clear()
        self.notes.clear()
        self._layers.clear()
        self._before.clear()
        self._attentions = self._losses = self.loss_change = None
