"""Is one of the input's features the target?"""

from collections.abc import Iterable

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.changed_inputs import given_inputs
from adiv_monitor.audit.experiments.probes.batches_drawn import labels_of
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

BATCHES, SAMPLES = 8, 32  # most batches that are looked at, and fewest samples in them
CLASSES = 64  # most different targets that may be classes


@asks("target-leak")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the features (of several) that determine the target of all samples, and how well.

    A feature determines a number if it is the same up to a factor and an offset, and a class if it
    has one value for each class. Tokens and images are left out.
    """
    count = min(BATCHES, len(setup.batches))
    fork = setup.fork()
    inputs: dict[str, list[Tensor]] = {}
    labels: list[Tensor] = []
    for i in range(count):
        batch = setup.batches[i * len(setup.batches) // count]
        found = labels_of(batch)
        if found is None:
            raise Untold("no label for each sample")
        labels.append(found)
        for name, x in given_inputs(fork, batch).items():
            if x.ndim == 2 and x.shape[1] > 1 and x.is_floating_point():
                inputs.setdefault(name, []).append(x.cpu().double())
    y = torch.cat(labels)
    facts = []
    for name, parts in inputs.items():
        x = torch.cat(parts) if len({part.shape[1] for part in parts}) == 1 else y[:0]
        if len(x) != len(y) or len(y) < SAMPLES or not bool(x.isfinite().all()):
            continue
        shares = explained(x, y)
        best = int(shares.argmax())
        numbers = {"feature": float(best), "share": float(shares[best]), "samples": float(len(y))}
        facts.append(Fact(f"input '{name}'", numbers))
    return tuple(facts)


def explained(x: Tensor, y: Tensor) -> Tensor:
    """Return the share of the target's variance that each feature (samples, features) explains.

    It is the square of the correlation, or 1 for a feature that has one value for each class, and
    another for each; 0 for constant features and targets.
    """
    apart, own = x - x.mean(0), y - y.mean()
    squares = apart.square().sum(0) * own.square().sum()
    shares = ((apart * own[:, None]).sum(0).square() / squares).nan_to_num(0.0, 0.0, 0.0)
    values, classes = torch.unique(y, return_inverse=True)
    if 1 < len(values) <= CLASSES:
        for feature in range(x.shape[1]):
            pairs = torch.unique(torch.stack([x[:, feature], classes.double()], 1), dim=0)
            if len(pairs) == len(values) == len(torch.unique(pairs[:, 0])):
                shares[feature] = 1.0
    return shares
