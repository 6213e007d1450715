"""What needs a second forward pass: the realised move of a step, and attention, on the probe.

The probe is taken at the first measured step. At each measured step the model runs on it with the
parameters before the step, forward and backward, then with those half-way, which shows how far the
move is from proportional to the step, and with those after the step.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.layer_rows import Chooser
from adiv_monitor.capture.loss_hook import LossOf
from adiv_monitor.capture.selection import Selection, is_wrapper, listed, trainable
from adiv_monitor.maths.attention_sums import AttentionSums
from adiv_monitor.maths.sums import MOVES, REALISED
from adiv_monitor.probe.attention import Attentions
from adiv_monitor.probe.batch import Batch, FirstPass, Losses, Unknown
from adiv_monitor.probe.rows import LayerOnProbe, ProbeRows
from adiv_monitor.probe.run import run, why_not
from adiv_monitor.rerun.surroundings import is_plain
from adiv_monitor.rerun.twin import Waits
from adiv_monitor.step.row_moves import Change, act, added

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


class Probing:
    """The probe of a run, and what is measured on it.

    Args:
        model: the model.
        loss: the loss; None: it is not known.
        measures: some of "realised" and "attention".
        max_rows: number of rows to sample per layer; None: all.
        generator: the monitor's own random generator.
        fail: called with what failed, and the exception.

    Attributes:
        batch: the probe; None: it was not taken yet.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossOf | None,
        measures: Sequence[str],
        max_rows: int | None,
        generator: np.random.Generator,
        fail: Callable[[str, Exception], None],
    ) -> None:
        self.model, self.loss, self.measures = model, loss, measures
        self.max_rows, self.fail = max_rows, fail
        self.generator = copy.deepcopy(generator)  # so that all other readings remain the same
        self.batch: Batch | None = None


class ProbeStep:
    """Measures one step on the probe.

    Args:
        probing: the probe.
        selection: the parameters to measure.

    Attributes:
        realised: by layer, the realised move.
        loss_change: mean change of the loss, and that of each sample, (samples,).
        refused: path → why an attention is not measured.
        notes: notes on what is missing, and why.
    """

    def __init__(self, probing: Probing, selection: Selection) -> None:
        self.realised: dict[str, Moved] = {}
        self.loss_change: tuple[Tensor, Tensor | None] | None = None
        self.notes: list[str] = []
        self._probing = probing
        loss = probing.loss
        own = [*probing.model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]
        self._modules = list(dict.fromkeys(m for m in own if not is_wrapper(m)))
        self._first: FirstPass | None = None
        if probing.batch is None:
            fail = partial(probing.fail, "the probe")
            self._first = FirstPass(selection.modules, self._modules, loss, fail)
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
        self._safely(self._measure, capture, updates)

    def _measure(self, capture: Capture, updates: bool) -> None:
        probing = self._probing
        if why := why_not(self._modules):
            raise Unknown(why)
        if probing.batch is None:
            assert self._first is not None
            probing.batch = self._first.batch()
        batch, realised = probing.batch, updates and "realised" in probing.measures
        held = [p for p in trainable(probing.model) if updates and is_plain(p)]
        self._before = {p: p.detach().clone() for p in held}
        if "attention" in probing.measures:
            fail = probing.fail
            self._attentions = Attentions(
                capture.selection, probing.generator, lambda p, e: fail(f"attention of '{p}'", e)
            )
        chooser = Chooser(probing.max_rows, probing.generator) if realised else None
        rows = ProbeRows(probing.model, capture, chooser, {}, self._attentions)
        self._run(batch, self._before, partial(self._begin, rows, batch))

    def _begin(self, rows: ProbeRows, batch: Batch) -> None:
        # The graph outlives the step: what it holds of parameters are their values before.
        with rows, saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
            losses = batch.run()
        knows_loss = losses is not None
        if losses is not None:
            self._losses = Losses(losses.whole.detach(), losses.samples)
            try:
                rows.differentiate(losses.whole)
            except RuntimeError as error:  # as of a re-entrant checkpoint
                knows_loss, first_line = False, str(error).partition("\n")[0]
                self.notes.append(f"The probe's gradient is not known: {first_line}.")
        elif batch.loss is None:
            self.notes += [_NO_LOSS[measure] for measure in self._probing.measures]
        else:
            self.notes.append(f"The loss on the probe is not known: {batch.why_no_loss}.")
        self._layers = rows.of_layers(self._probing.max_rows)
        if self._attentions is not None:
            self._attentions.begin(knows_loss=knows_loss)
            if not self._attentions.saw_any:
                self.notes.append(_NO_ATTENTION)

    def attended(self) -> None:
        """Measure how the optimizer's step moved the scores, while its copies still exist."""
        batch, attentions = self._probing.batch, self._attentions
        if batch is not None and attentions is not None:
            before = self._before
            taken = {p: before[p] - p.detach() for p in attentions.parameters if p in before}
            self._safely(self._run, batch, before, partial(attentions.updated, taken))

    def take(self, path: str, change: Change) -> None:
        """Take the change of a layer's weight and bias."""
        layer = self._layers.get(path)
        if layer is not None:
            layer.d = added(*act(change, layer.features))

    def updated(self) -> None:
        """Run the model with the parameters half-way and after the step."""
        if self._layers:
            self._safely(self._compare)
        self._layers.clear()
        self._before.clear()

    @torch.no_grad()
    def _compare(self) -> None:
        batch, model = self._probing.batch, self._probing.model
        assert batch is not None

        def again() -> tuple[ProbeRows, Losses | None]:
            with (rows := ProbeRows(model, self._capture, None, self._layers)):
                return rows, batch.run()

        for parameter, old in self._before.items():
            old.lerp_(parameter, 0.5)
        half = self._run(batch, self._before, again)[0]
        for parameter, old in self._before.items():
            old.copy_(parameter)
        whole, losses = self._run(batch, self._before, again)
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

    def _run(self, batch: Batch, values: Mapping[nn.Parameter, Tensor], body: Callable[[], T]) -> T:
        return run(self._modules, batch.surroundings, values, body)

    def _safely(self, action: Callable[..., object], *args: object) -> None:
        """Call an action; say why nothing is known if it fails."""
        try:
            action(*args)
        except (Unknown, Waits) as reason:
            self.notes.append(f"Nothing is known on the probe: {reason}.")
        except Exception as error:
            self.notes.append(
                "Nothing is known on the probe: the forward pass failed when it ran again: "
                f"{type(error).__name__}: {error}"
            )
            self._probing.fail("the probe", error)

    def discard(self) -> None:
        """Drop all results: the step can't be measured, or is tried again."""
        self.realised.clear()
        self.notes.clear()
        self._layers.clear()
        self._before.clear()
        self._attentions = self._losses = self.loss_change = None
