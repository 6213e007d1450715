"""The probe of alignments: the arguments that a model is called with for the first batch."""

from adiv_monitor.alignment.probe import Probe
from adiv_monitor.audit.experiments.changed_inputs import arguments
from adiv_monitor.audit.training.setup import Setup


def probe(setup: Setup) -> Probe:
    """Return the arguments that the loss calls the model with for the first batch.

    Raises:
        ValueError: The loss does not call the model itself.
    """
    given = arguments(setup.fork(), setup.batches[0])
    if not given:
        raise ValueError(
            "audit(alignment=True): the loss did not call the model itself, expected model(…) in "
            "it, whose arguments are the probe: leave alignment out"
        )
    named = all(name.isidentifier() for name in given)  # not those of *args
    return Probe(given if named else tuple(given.values()), seed=setup.seed)
