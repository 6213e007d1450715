"""What needs a second forward pass: the realised move of a step, and attention, on the probe.

The probe is taken at the first measured step. At each measured step the model runs on it with the
parameters before the step, forward and backward, then with those half-way, which shows how far the
move is from proportional to the step, and with those after the step.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.selection import Selection, listed, trainable
from adiv_monitor.features.uses import Refused
from adiv_monitor.maths.sums import MOVES, REALISED, names_of
from adiv_monitor.probe.attention import Attentions
from adiv_monitor.probe.batch import Batch
from adiv_monitor.probe.recording import Recording, RowsOfLayer
from adiv_monitor.probe.run import run
from adiv_monitor.rerun.surroundings import is_plain
from adiv_monitor.rerun.twin import Waits
from adiv_monitor.step.training import Training
from adiv_monitor.step.transfer import Outgoing

T = TypeVar("T")


_NO_ATTENTION = (
    "No attention of trained weights was seen: only scaled_dot_product_attention is known, which "
    "nn.MultiheadAttention calls with need_weights=False."
)


class ProbeStep:
    """Measures one step on the probe.

    Args:
        training: the training, and what is measured in it.
        batch: the probe.
        generator: random numbers of its own, so that all other readings remain the same.
        fail: called with what failed, and the exception.
        selection: the parameters to measure.

    Attributes:
        notes: notes on what is missing, and why.
    """

    def __init__(
        self,
        training: Training,
        batch: Batch,
        generator: np.random.Generator,
        fail: Callable[[str, Exception], None],
        selection: Selection,
    ) -> None:
        self.notes: list[str] = []
        self._training, self._batch, self._selection = training, batch, selection
        self._generator, self._fail = generator, fail
        self._attentions: Attentions | None = None
        self._before: dict[nn.Parameter, Tensor] = {}
        self._layers: dict[str, RowsOfLayer] = {}
        self._loss: Tensor | None = None
        self._capture: Capture
        self._seed = 0

    def put_on(self) -> None:
        """Start recording the first forward pass, if there is no probe yet."""
        if not self._batch.is_fixed:
            self._batch.put_on(self._selection.modules)

    def remove(self) -> None:
        """Stop recording."""
        self._batch.remove()

    @property
    def refused(self) -> dict[str, str]:
        """Path → why an attention is not measured."""
        return {} if self._attentions is None else self._attentions.refused

    def attention(self) -> dict[str, Tensor]:
        """Return the record of each attention, by path."""
        return {} if self._attentions is None else self._attentions.records()

    def gradient_is_final(self, capture: Capture, *, updates: bool) -> None:
        """Run the model with the parameters before the step.

        Args:
            capture: the capture of the step.
            updates: whether an optimizer step follows.
        """
        self.discard()
        self._safely(self._begin, capture, updates)

    def _begin(self, capture: Capture, updates: bool) -> None:
        training, every = self._training, trainable(self._training.model)
        if not self._batch.is_fixed:
            self._batch.fix()
        self._before = {p: p.detach().clone() for p in every if is_plain(p)}
        self._capture, self._seed = capture, int(self._generator.integers(2**62))
        if training.attention:
            self._attentions = Attentions(self._selection, self._generator, self._fail)
        self._run(partial(self._before_step, updates and training.realised is not False))

    def _recording(self, attentions: Attentions | None = None) -> Recording:
        """Return what records a run; layers have the names that they have in the step."""
        training, capture = self._training, self._capture
        given = training.max_rows, self._seed, attentions
        rows = Recording(training.model, capture.selection, *given)
        rows.layers.found = dict(capture.layers.found)
        return rows

    def _before_step(self, is_realised: bool) -> None:
        rows = self._recording(self._attentions)
        # The graph outlives the step: what it holds of parameters are their values before.
        with rows, saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
            loss = self._batch.run()
        knows_loss = self._differentiate(rows, loss)
        if is_realised:
            self._layers = rows.of_layers(self._capture.layers.found)
        if self._attentions is not None:
            self._attentions.begin(knows_loss=knows_loss)
            self.notes += [] if self._attentions.saw_any else [_NO_ATTENTION]

    def _differentiate(self, rows: Recording, loss: Tensor | None) -> bool:
        """Take the gradients of the loss; return whether they are known, and note why not."""
        if loss is None:
            self.notes.append(self._batch.why_no_loss)
            return False
        self._loss = loss.detach()
        try:
            rows.differentiate(loss)
        except RuntimeError as error:  # as of a re-entrant checkpoint
            first_line = str(error).partition("\n")[0]
            self.notes.append(f"The probe's gradient is not known: {first_line}.")
            return False
        return True

    def updated(self, out: Outgoing) -> None:
        """Measure how the optimizer's step moved the scores, and what else moved; send it."""
        if self._attentions is not None and self._attentions.calls:
            calls = chain.from_iterable(self._attentions.calls.values())
            held = set(chain.from_iterable(call.held for call in calls))
            taken = {p: self._before[p] - p.detach() for p in held}
            self._safely(self._run, partial(self._attentions.updated, taken))
        if self._layers:
            self._safely(self._compare, out)
        self._layers.clear()
        self._before.clear()

    @torch.no_grad()
    def _compare(self, out: Outgoing) -> None:
        """Run the model with the parameters half-way and after the step; send what moved."""
        moves = {path: self._move(path, layer) for path, layer in self._layers.items()}
        for parameter, old in self._before.items():
            old.lerp_(parameter, 0.5)
        half = self._run(self._again)[0]
        for parameter, old in self._before.items():
            old.copy_(parameter)
        whole, loss = self._run(self._again)
        lost = []
        for path, layer in self._layers.items():
            again = [after[path] for after in (half, whole) if path in after]
            if [after.shapes for after in again] != 2 * [layer.shapes]:
                lost.append(path)
            else:
                z_half, z = (after.z for after in again)
                r = layer.z - z
                b = r - 2 * (layer.z - z_half)
                vectors = dict(zip(MOVES, (layer.G, r, moves[path], b, layer.z), strict=True))
                products = [torch.linalg.vecdot(vectors[a], vectors[b]) for a, b in REALISED]
                out.add("moves", [path], dict(zip(names_of(REALISED), products, strict=True)))
                out.add("layers", [path], {}, moved=layer.total)
        if lost:
            self.notes.append(
                f"The real change of {listed(lost)} is not known: it has other calls or rows when "
                "the probe runs again."
            )
        if self._loss is not None and loss is not None:
            out.flags["loss_change"] = [(loss - self._loss).detach()]

    def _move(self, path: str, layer: RowsOfLayer) -> Tensor:
        """Return d, the move of a layer's rows by the optimizer's step."""
        known, before = self._capture.layers.found[path], self._before
        pieces = {x.key: x.of(before[x.parameter] - x.parameter.detach()) for x in known.pieces}
        return layer.features.move(*known.change(pieces))

    def _again(self) -> tuple[dict[str, RowsOfLayer], Tensor | None]:
        with (rows := self._recording()):
            loss = self._batch.run()
        return rows.of_layers(self._capture.layers.found), loss

    def _run(self, body: Callable[[], T]) -> T:
        return run(self._batch.modules, self._batch.surroundings, self._before, body)

    def _safely(self, action: Callable[..., object], *args: object) -> None:
        """Call an action; say why nothing is known if it fails."""
        try:
            action(*args)
        except Exception as error:
            why = str(error)
            if not isinstance(error, Refused | Waits):
                why = f"the forward pass failed when it ran again: {type(error).__name__}: {why}"
                self._fail("the probe", error)
            self.notes.append(f"Nothing is known on the probe: {why}.")

    def discard(self) -> None:
        """Drop all results: the step can't be measured, or is tried again."""
        self.notes.clear()
        self._layers.clear()
        self._before.clear()
        self._attentions = self._loss = None
