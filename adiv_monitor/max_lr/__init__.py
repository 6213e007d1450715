"""The largest stable learning rate of every layer: abc-parametrizations and a linear program."""

from adiv_monitor.max_lr.apply import parametrize_model
from adiv_monitor.max_lr.checkpoints import plain_state_dict
from adiv_monitor.max_lr.exponents import MFP, MUP, NTK, PARAMETRIZATIONS, SP, Parametrization
from adiv_monitor.max_lr.groups import optimizer_groups
from adiv_monitor.max_lr.multiplier import Multiplier
from adiv_monitor.max_lr.optimizers import ADAFACTOR, ADAM, MUON, SGD, UpdateRule, update_rule
from adiv_monitor.max_lr.schedule.scheduler import MaxLRReading, MaxLRScheduler
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
    "MaxLRReading",
    "MaxLRScheduler",
    "MaxLRSolution",
    "Multiplier",
    "Parametrization",
    "UpdateRule",
    "optimizer_groups",
    "parametrize_model",
    "plain_state_dict",
    "solve_max_lr",
    "update_rule",
]
