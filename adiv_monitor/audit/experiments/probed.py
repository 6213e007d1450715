"""The probe of alignments: the arguments that a model is called with for the first batch."""

from typing import Any

import torch
from torch import nn

from adiv_monitor.alignment.probe import Probe
from adiv_monitor.audit.experiments.inputs import by_name
from adiv_monitor.audit.training.setup import Setup


def probe(setup: Setup) -> Probe:
    """Return the arguments that the loss calls the model with for the first batch.

    Raises:
        ValueError: The loss does not call the model itself.
    """
    fork = setup.fork()
    seen: list[Any] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(by_name(module, args, kwargs) if kwargs else args)

    fork.model.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        fork.first_loss()
    if not seen:
        raise ValueError(
            "audit(alignment=True): the loss did not call the model itself, expected model(…) in "
            "it, whose arguments are the probe: leave alignment out"
        )
    return Probe(seen[0], seed=setup.seed)
