"""The largest stable learning rate of every layer: abc-parametrizations and a linear program."""

from adiv_monitor.max_lr.exponents import (
    MFP,
    MUP,
    NTK,
    PARAMETRIZATIONS,
    SP,
    Parametrization,
)
from adiv_monitor.max_lr.optimizers import ADAFACTOR, ADAM, MUON, SGD, UpdateRule, update_rule
from adiv_monitor.max_lr.solver import MaxLRSolution, solve_max_lr

__all__ = [
    "ADAFACTOR",
    "ADAM",
    "MFP",
    "MUON",
    "MUP",
    "NTK",
    "PARAMETRIZATIONS",
    "SGD",
    "SP",
    "MaxLRSolution",
    "Parametrization",
    "UpdateRule",
    "solve_max_lr",
    "update_rule",
]
