"""Calls of dropout functions, and what they drop."""

import math

from adiv_monitor.audit.experiments.calls import Call

FUNCTIONS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d",
             "dropout3d", "feature_dropout")  # fmt: skip


def rate_of(call: Call) -> float:
    """Return the share that a call of a dropout function drops; 0 for other functions."""
    if call.name not in FUNCTIONS or not call.argument(2, "training", True):
        return 0.0
    rate = call.argument(1, "p", 0.5)
    return float(rate) if isinstance(rate, (int, float)) else math.nan


def with_rate(call: Call, rate: float) -> object:
    """Return the result of the same function at another rate."""
    x = call.argument(0, "input")
    others = {k: v for k, v in call.kwargs.items() if k not in ("input", "p")}
    return call.function(x, rate, *call.args[2:], **others)


def undropped(call: Call) -> object:
    """Return the result of a dropout that drops nothing; `NotImplemented` for other functions."""
    return with_rate(call, 0.0) if rate_of(call) > 0 else NotImplemented
