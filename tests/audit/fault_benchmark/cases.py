"""All planted faults, and all runs without one."""

from audit.fault_benchmark import once_alarming
from audit.fault_benchmark.faulty import (
    initial,
    inputs,
    optimizers,
    published,
    rates,
    unseen,
    wiring,
)
from audit.fault_benchmark.healthy import HEALTHY
from audit.fault_benchmark.run import Case

_ALL = [
    *(inputs.CASES, rates.CASES, initial.CASES),
    *(optimizers.CASES, wiring.CASES, published.CASES, unseen.CASES),
]
CASES: dict[str, Case] = {case.name: case for cases in _ALL for case in cases}
_MORE_HEALTHY = (published.ONES_AND_ZEROS, *unseen.HEALTHY, *once_alarming.HEALTHY)
HEALTHY |= {each.name: each for each in _MORE_HEALTHY}
UNSEEN = frozenset(each.name for each in (*unseen.CASES, *unseen.HEALTHY))
# What was tried as a fault and left out, and why.
DROPPED = {
    "mlp-sgd: inputs × 8": "it trains faster",
    "mlp-adam: rate of layer 2 × 300": "it trains faster",
    "vit-adamw: rate of layer 1 × 0.001": "it trains as well",
    "gpt-adamw, lstm-adam: betas 0.999": "slower by less than 8 %",
    "vit-momentum, deep-tanh-sgd: one row of 32 × 30": "LayerNorm and tanh bear it",
    "Adam with epsilon 1e-16 (TheDeepChecker)": "harmless here; it stands among the healthy",
    "Adam with gradients always clipped": "harmless; it stands among the healthy",
    "ReLU units killed by one huge step": "one in ten dies, the rest is too large weights",
    "gradients never zeroed": "an audit trains by a loop of its own, which zeroes them",
    "a flipped sign of the loss (TheDeepChecker)": "the loss falls, as it is told to",
}

assert len(CASES) == sum(map(len, _ALL)), "two cases have one name"
