"""The training whose steps are measured, what is measured in it, and whose turn it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from adiv_monitor.capture.loss_hook import LossOf
from adiv_monitor.capture.selection import LayerChoice, Selection, select, structure, trainable
from adiv_monitor.report import Turn
from adiv_monitor.step.own_measures import SPECTRAL, OwnMeasure

if TYPE_CHECKING:
    from adiv_monitor.alignment.probe import Probe

# Momenta of running statistics: at most the last batch's, or hardly any batch's.
ONE_BATCH, SLOW = 0.9, 0.005


@dataclass(eq=False)
class Training:
    """A training, and the `Monitor` options that say what is measured in it.

    Attributes:
        optimizer: the optimizer whose steps are measured; None: only gradients are measured.
    """

    model: nn.Module
    optimizer: Optimizer | None
    layers: LayerChoice
    layers_per_step: int | None
    max_rows: int | None
    attainable: bool
    attention: bool
    realised: bool | LossOf
    loss: LossOf | None
    alignment: "Probe | None"
    own_measures: Mapping[str, OwnMeasure] | None
    spectral: bool
    watch: Literal["loss", "norms"] | None
    # The selection so far, with the structure of the model.
    _found: tuple[object, Selection] | None = field(default=None, init=False)

    def trained(self) -> Sequence[Tensor]:
        """Return the parameters that are trained, or would be if they were not frozen."""
        if self.optimizer is None:
            return list(trainable(self.model))
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def name(self) -> str:
        """What tells it from others in a line."""
        optimizer, model = self.optimizer, type(self.model).__name__
        return model if optimizer is None else f"{type(optimizer).__name__} of {model}"

    @property
    def on_rows(self) -> Mapping[str, OwnMeasure]:
        """What is measured on the rows of each layer, by name."""
        return {**(self.own_measures or {}), **(SPECTRAL if self.spectral else {})}

    @property
    def seen_loss(self) -> LossOf | None:
        """The loss that reports hold, if it is known."""
        return self.probe_loss if self.loss is None else self.loss

    @property
    def probe_loss(self) -> LossOf | None:
        """The loss on the probe, if it is known."""
        return self.loss if isinstance(self.realised, bool) else self.realised

    def selection(self) -> Selection:
        """Return all parameters to measure; modules and parameters may have been added."""
        held = None if self.optimizer is None else {id(p): p for p in self.trained()}
        now = structure(self.model, held or {})
        if self._found is None or now is None or now != self._found[0]:
            self._found = now, select(self.model, held, self.layers)
        return self._found[1]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, whose model has other parameters."""
        return {**vars(self), "_found": None}

    @property
    def dropout(self) -> float:
        """The largest rate of the model's dropout modules; 0 without any."""
        drops = (m.p for m in self.model.modules() if isinstance(m, _DropoutNd))
        return float(max(drops, default=0))

    def norm_passes(self) -> list[Tensor]:
        """Return the training passes so far of the first norm that counts them; []: none does."""
        norms = (m for m in self.model.modules() if isinstance(m, _NormBase) and m.training)
        counts = (norm.num_batches_tracked for norm in norms)
        first = next((count for count in counts if count is not None), None)
        return [] if first is None else [first.clone()]

    def due(self, number: int) -> tuple[Selection, Turn | None]:
        """Return the selection with the parameters that are due in a turn, and the turn.

        The order is the model's, the same in all ranks, whatever a forward pass calls. Modules that
        share a parameter count as one; parameters that torch moved into other modules
        (`parametrize`) belong to their original module.

        Args:
            number: number of the turn, from 0.
        """
        selection, several = self.selection(), self.layers_per_step
        if several is None:
            return selection, None
        held: dict[str, list[int]] = {}  # ids of parameters by module
        for key, places in selection.places.items():
            homes = [place.home[0] for place in places]
            mine = next((held[home] for home in homes if home in held), [])
            mine.append(key)
            held |= dict.fromkeys(homes, mine)
        modules = list({id(keys): keys for keys in held.values()}.values())
        first = number % max(1, -(-len(modules) // several)) * several
        due = modules[first : first + several]
        turn = Turn(first + bool(due), first + len(due), len(modules))
        return replace(selection, due=frozenset(chain(*due))), turn


def norm_momenta(selection: Selection) -> dict[str, float]:
    """Return path → momentum of the training norms whose running statistics are no average."""
    norms = [(p, m) for m, p in selection.modules.items() if isinstance(m, _NormBase)]
    kept = {p: m.momentum for p, m in norms if m.training and m.running_mean is not None}
    # 0 is meant: SAM sets it for the second of its passes.
    return {p: x for p, x in kept.items() if x and not SLOW <= x < ONE_BATCH}
