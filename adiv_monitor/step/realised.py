"""The realised effect of a step on the rows, from rerunning its forward passes with new weights.

All layers move at once in the rerun, also those before a given one. Another rerun with the weights
half-way shows how far the move is from proportional to the step. Gradient recording is enabled
where it was, so that the same functions run, but no gradient is ever computed.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.realised.forward_calls import ForwardCalls, NotRepeatable
from adiv_monitor.capture.realised.losses import Losses, LossOf
from adiv_monitor.capture.realised.rows import Calls, RerunRows, run_again
from adiv_monitor.capture.selection import Selection, is_wrapper, listed, trainable
from adiv_monitor.maths import dots
from adiv_monitor.maths.sums import REALISED, Vector
from adiv_monitor.rerun.kept import may_be_written
from adiv_monitor.rerun.surroundings import devices_of, is_plain, untouched


@dataclass(frozen=True, eq=False)
class _Kept:
    """The vectors and calls of a layer's rows, when the step is taken."""

    G: Tensor
    d: Tensor
    z: Tensor
    calls: Calls


class Realised:
    """Measurement of the realised effect of one step.

    Args:
        model: the model.
        selection: the measured parameters.
        loss: the loss whose change is measured too, if any.
        fail: called with an exception.

    Attributes:
        calls: recorder of the forward passes of the step.
        products: by layer, the dot products of `REALISED` of every row.
        loss_change: see `Losses.change`.
        notes: notes on what is missing, and why.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        loss: LossOf | None,
        fail: Callable[[Exception], None],
    ) -> None:
        self._model = model
        self._selection = selection
        self._fail = fail
        own = [*model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]
        self._modules = list(dict.fromkeys(m for m in own if not is_wrapper(m)))
        self._parameters = _parameters(model, self._modules)
        self._devices = devices_of(self._modules)
        ids = {id(parameter) for parameter in self._parameters}
        self.calls = ForwardCalls(self._modules, ids, self._devices, fail)
        self.calls.refusal = _why_not(self._modules)
        self._losses = None if loss is None else Losses(loss, model, self.calls, fail)
        self._before: list[Tensor] = []
        self._kept: dict[str, _Kept] = {}
        self.products: dict[str, Tensor] = {}
        self.loss_change: tuple[Tensor, Tensor | None] | None = None
        self.notes: list[str] = []

    def put_on(self) -> None:
        """Start recording the calls of the loss, as the step begins."""
        if self._losses is not None:
            self._losses.attach()

    def remove(self) -> None:
        """Stop recording the calls of the loss, after the step's forward passes."""
        if self._losses is not None:
            self._losses.detach()

    def step_begins(self) -> None:
        """Copy the weights, as the optimizer is about to move them."""
        self._kept.clear()  # rows of an earlier attempt, which raised
        if not self.calls.refusal:
            self._before = [parameter.detach().clone() for parameter in self._parameters]

    def keep(self, path: str, G: Tensor, d: Tensor, z: Tensor, calls: Calls) -> None:
        """Keep the rows of a layer."""
        if not self.calls.refusal:
            self._kept[path] = _Kept(G, d, z, calls)

    def run(self, first: Capture) -> None:
        """Rerun the step's forward passes, when the weights are those of the next step.

        Args:
            first: the capture of the step.
        """
        try:
            if self._kept or self.calls.refusal:
                self._run(first)
        except NotRepeatable as reason:
            self.notes.append(f"The real change of the activations is not known: {reason}.")
        except Exception as error:
            self.notes.append(
                "The real change of the activations is not known: the forward pass failed when "
                f"it ran again: {type(error).__name__}: {error}"
            )
            self._fail(error)
        finally:
            self._kept.clear()
            self._before.clear()
            self.calls.calls.clear()

    def _run(self, first: Capture) -> None:
        if self.calls.refusal:
            raise NotRepeatable(self.calls.refusal)
        wanted = {path: kept.calls for path, kept in self._kept.items()}
        stand_ins = dict(zip(self._parameters, self._before, strict=True))

        def run() -> tuple[RerunRows, RerunRows]:
            with torch.no_grad():
                for parameter, old in stand_ins.items():
                    old.lerp_(parameter, 0.5)
            half = self._pass(first, wanted, stand_ins, None)
            with torch.no_grad():
                for parameter, old in stand_ins.items():
                    old.copy_(parameter)
            return half, self._pass(first, wanted, stand_ins, self._losses)

        self._measure(*untouched(self._modules, self._devices, run))
        self._read_loss()

    def _pass(
        self,
        first: Capture,
        wanted: Mapping[str, Calls],
        stand_ins: Mapping[nn.Parameter, Tensor],
        losses: Losses | None,
    ) -> RerunRows:
        """Rerun the forward passes with these values of the parameters, and return the rows."""
        rows = RerunRows(self._model, self._selection, first, wanted)
        own = {parameter: parameter.data for parameter in stand_ins}

        def put_back() -> None:
            call_all(partial(_have_data, own), rows.detach, self.remove)

        try:
            rows.attach()
            if losses is not None:
                losses.attach()
            _have_data(stand_ins)  # writes to the parameters are lost
            run_again(self.calls, rows, losses)
            put_back()
        finally:  # once more, in case an interrupt hit the first call
            put_back()
        return rows

    @torch.no_grad()
    def _measure(self, half: RerunRows, whole: RerunRows) -> None:
        lost: dict[str, list[str]] = defaultdict(list)
        for path, kept in self._kept.items():
            try:
                counts = self.calls.counts[path]
                z_half, z = (rows.gathered(path, counts) for rows in (half, whole))
            except NotRepeatable as reason:
                lost[str(reason)].append(path)
                continue
            r = kept.z - z
            b = r - 2 * (kept.z - z_half)
            vectors = {Vector.G: kept.G, Vector.D: kept.d, Vector.MOVED: r, Vector.BEYOND: b}
            self.products[path] = dots.of_rows(vectors, REALISED)
        self.notes += [
            f"The real change of {listed(paths)} is not known: {reason}."
            for reason, paths in lost.items()
        ]

    def _read_loss(self) -> None:
        if self._losses is None:
            return
        try:
            self.loss_change = self._losses.change()
        except NotRepeatable as reason:
            self.notes.append(f"The real change of the loss is not known: {reason}.")


def _parameters(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that the step or a forward pass may change."""
    renormed = [m for m in modules if getattr(m, "max_norm", None) is not None]
    written = [p for m in renormed for p in m.parameters(recurse=False)]
    frozen = [p for p in model.parameters() if not p.requires_grad and may_be_written(p)]
    return [p for p in dict.fromkeys([*trainable(model), *written, *frozen]) if is_plain(p)]


def _why_not(modules: Sequence[nn.Module]) -> str:
    """Return why the forward passes of these modules can't be rerun; "" if they can."""
    for module in modules:
        name = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            return f"{name} is scripted, so its buffers can't be restored"
        if any(type(p.data) is not Tensor for p in module._parameters.values() if p is not None):
            return f"a parameter of {name} is not a plain tensor (sharded?)"
        if isinstance(module, nn.SyncBatchNorm) and dist.is_available() and dist.is_initialized():
            return f"{name} waits for the other ranks"
        drops = isinstance(module, nn.RNNBase) and module.dropout and module.training
        if drops and any(p.is_cuda for p in module.parameters()):
            return (
                f"the dropout of {name} on a GPU can't be repeated, and its state can't be restored"
            )
    return ""


def _have_data(values: Mapping[nn.Parameter, Tensor]) -> None:
    """Set the `.data` of the parameters."""
    for parameter, value in values.items():
        parameter.data = value
