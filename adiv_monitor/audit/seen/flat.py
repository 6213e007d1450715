"""Where activation functions are flat: their slope is below 2 % of the largest that they have.

The numbers solve |f′(x)| = 0.02·max|f′| (differentiation and bisection); beyond them the slope only
falls. What has no flat end (leaky ReLU, PReLU) is missing.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

LOG_50 = math.log(50)  # e^-x is below 2 % beyond it
LOGIT_98 = math.log(49)  # and 1/(1 + e^x) there

# Flat at or below the first, and at or above the second.
ENDS: Mapping[str, tuple[float, float]] = {
    "relu": (0.0, math.inf),
    "relu6": (0.0, 6.0),
    "gelu": (-2.7392, math.inf),
    "quick_gelu": (-3.0862, math.inf),
    "silu": (-5.2528, math.inf),
    "mish": (-5.2741, math.inf),
    "selu": (-LOG_50, math.inf),
    "tanh": (-2.6442, 2.6442),
    "sigmoid": (-5.2883, 5.2883),
    "softsign": (-6.0711, 6.0711),
    "hardsigmoid": (-3.0, 3.0),
    "hardswish": (-3.0, math.inf),
    "log_sigmoid": (-math.inf, LOGIT_98),
}
_SAME = {"special_expit": "sigmoid", "logsigmoid": "log_sigmoid"}
# Modules that are put together from other functions (tanh, sigmoid) but are none of these.
_GELU = re.compile(r"(quick)?gelu(activation|tanh)?$", re.IGNORECASE)
_SILU = re.compile(r"(?<!hard)(swish|silu)(activation|me)?$", re.IGNORECASE)


def ends_of_function(
    function: str, arguments: Mapping[str, Any]
) -> tuple[str, tuple[float, float]] | None:
    """Name and ends of a function of torch; None if it is no activation function with a flat end.

    Args:
        function: its `__name__`, also of one that writes in place.
        arguments: by name, those that may be given besides the input.
    """
    name = function.strip("_")
    name = _SAME.get(name, name)
    if name in ENDS:
        return name, ENDS[name]
    if name == "hardtanh":
        low, high = arguments.get("min_val", -1.0), arguments.get("max_val", 1.0)
        return ("relu6" if (low, high) == (0.0, 6.0) else "hardtanh"), (low, high)
    if name in ("elu", "celu"):
        # elu'(x) = α·eˣ below 0 and 1 above; celu'(x) = e^(x/α) and 1.
        alpha = abs(arguments.get("alpha", 1.0))
        if alpha == 0:
            return name, (0.0, math.inf)
        low = -alpha * LOG_50 if name == "celu" else min(0.0, -LOG_50 + _excess(alpha))
        return name, (low, math.inf)
    if name == "softplus":
        return name, (-LOGIT_98 / arguments.get("beta", 1.0), math.inf)
    if name == "threshold":
        return name, (arguments["threshold"], math.inf)
    if name in ("clamp", "clip", "clamp_min") and arguments.get("min") == 0:
        return ("relu", (0.0, math.inf)) if arguments.get("max") is None else None
    return None


def ends_of_module(kind: str) -> tuple[str, tuple[float, float]] | None:
    """The same of a module, by the name of its class, that makes one of several functions."""
    if found := _GELU.search(kind):
        name = "quick_gelu" if found[1] else "gelu"
    elif _SILU.search(kind):
        name = "silu"
    else:
        return None
    return name, ENDS[name]


def _excess(alpha: float) -> float:
    """How much sooner α·eˣ falls below 2 % of max(1, α) than eˣ below 2 %."""
    return math.log(max(1.0, alpha) / alpha)
