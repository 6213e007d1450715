"""Rules about the units of activation functions, judged over many batches."""

from collections.abc import Iterator

from adiv_monitor.audit.diagnosis.rates import suffers
from adiv_monitor.audit.diagnosis.readings import worst_first
from adiv_monitor.audit.finding import Advice, Evidence, Finding
from adiv_monitor.audit.record import Record

# Share of a layer's units that no row of any batch ever woke: half the layer is also where
# SageMaker Debugger's rule fires.
DEAD_WATCH, DEAD_ACT = 0.25, 0.5
ALL_DEAD = 0.9  # next to nothing comes through, whatever the loss does yet
# Fewer batches say little: of one batch, zeros are no illness (DeepDiagnosis took 36 % of healthy
# runs for ill, nearly all by this).
LEAST_BATCHES = 4
# Share of entries in the flat parts: SageMaker Debugger's rule fires at half the layer; healthy
# tanh nets read up to 0.35.
SATURATED_WATCH, SATURATED_ACT = 0.4, 0.5
# Functions with two flat ends; a ReLU's zeros are no saturation.
FLAT_AT_BOTH_ENDS = frozenset(
    ("tanh", "sigmoid", "hardtanh", "hardsigmoid", "softsign", "relu6", "erf")
)


def dead_share(record: Record) -> float:
    """Of the layer with most of them; 0 where too few batches were seen."""
    return max(_dead_shares(record).values(), default=0.0)


def _dead_shares(record: Record) -> dict[str, float]:
    return {
        path: units.dead / units.units
        for path, units in record.units.items()
        if units.batches >= LEAST_BATCHES and units.units
    }


def dead_units(record: Record) -> Iterator[Finding]:
    """Units that give the same for every row, and so never learn."""
    dead = {path: share for path, share in _dead_shares(record).items() if share > DEAD_WATCH}
    if dead:
        layers = worst_first(dead)
        share = dead[layers[0]]
        act = share > ALL_DEAD or (share > DEAD_ACT and suffers(record))
        yield Finding(
            "dead-units",
            layers,
            "act" if act else "watch",
            tuple(Evidence("dead share of units", dead[p], DEAD_WATCH, p) for p in layers[:5]),
            (
                Advice("initialise the weights before them anew, biases at zero", "reinitialise"),
                Advice("leaky ReLU in their place", "leaky-relu"),
                Advice("batch normalisation in front of them", "batch-norm"),
            ),
            f"{share:.0%} of the units of {layers[0]} are dead: flat for every row of "
            f"{record.units[layers[0]].batches} batches.",
            "A higher learning rate: no gradient comes through a dead unit.",
        )


def saturated_units(record: Record) -> Iterator[Finding]:
    """Entries that lie where the function is flat: no gradient passes."""
    seen = {
        path: u.saturated
        for path, u in record.units.items()
        if u.function in FLAT_AT_BOTH_ENDS and u.batches >= LEAST_BATCHES
    }
    saturated = {path: share for path, share in seen.items() if share > SATURATED_WATCH}
    if saturated:
        layers = worst_first(saturated)
        yield Finding(
            "saturated-units",
            layers,
            "act" if saturated[layers[0]] > SATURATED_ACT and suffers(record) else "watch",
            tuple(
                Evidence("saturated share", saturated[p], SATURATED_WATCH, p) for p in layers[:5]
            ),
            (
                Advice("initialise the weights before them anew", "reinitialise"),
                Advice("layer normalisation in front of them", "layer-norm"),
            ),
            f"{saturated[layers[0]]:.0%} of the entries of {layers[0]} lie where the function is "
            "flat.",
            "A higher learning rate drives them further out.",
        )
