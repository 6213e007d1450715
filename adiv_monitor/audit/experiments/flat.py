"""Where activation functions are flat: their slope is below 2 % of its maximum.

The numbers solve |f′(x)| = 0.02·max|f′| (differentiation and bisection); beyond them the slope only
falls. Functions without a flat end (leaky ReLU, PReLU) are not listed.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

LOG_50 = math.log(50)  # e^-x is below 2 % beyond it
LOGIT_98 = math.log(49)  # 1/(1 + e^x) is below 2 % beyond it

# A function is flat at or below the first number, and at or above the second.
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
# Class names of modules that compose these functions from others, such as tanh and sigmoid.
_GELU = re.compile(r"(quick)?gelu(activation|tanh)?$", re.IGNORECASE)
_SILU = re.compile(r"(?<!hard)(swish|silu)(activation|me)?$", re.IGNORECASE)


def ends_of_function(
    function: str, arguments: Mapping[str, Any]
) -> tuple[str, tuple[float, float]] | None:
    """Return name and flat ends of a torch function; None if it is no activation with a flat end.

    Args:
        function: The function's `__name__`; in-place variants are accepted.
        arguments: Arguments other than the input, by name.
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
    """Return name and flat ends of a module's function by its class name; None if unknown."""
    if found := _GELU.search(kind):
        name = "quick_gelu" if found[1] else "gelu"
    elif _SILU.search(kind):
        name = "silu"
    else:
        return None
    return name, ENDS[name]


def _excess(alpha: float) -> float:
    """Return how much sooner α·eˣ falls below 2 % of max(1, α) than eˣ falls below 2 %."""
    return math.log(max(1.0, alpha) / alpha)
