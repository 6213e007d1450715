"""Where activation functions are flat: their slope is below 2 % of its maximum.

The numbers solve |f′(x)| = 0.02·max|f′| (differentiation and bisection); beyond them the slope only
falls. They are those of the default α and β. Functions without a flat end (leaky ReLU, PReLU) are
not listed.
"""

import math
from collections.abc import Mapping
from typing import Any

_LOG_50 = math.log(50)  # e^-x is below 2 % beyond it
_LOGIT_98 = math.log(49)  # 1/(1 + e^x) is below 2 % beyond it

# A function is flat at or below the first number, and at or above the second.
ENDS: Mapping[str, tuple[float, float]] = {
    "relu": (0.0, math.inf),
    "relu6": (0.0, 6.0),
    "gelu": (-2.7392, math.inf),
    "silu": (-5.2528, math.inf),
    "mish": (-5.2741, math.inf),
    "elu": (-_LOG_50, math.inf),
    "celu": (-_LOG_50, math.inf),
    "selu": (-_LOG_50, math.inf),
    "softplus": (-_LOGIT_98, math.inf),
    "tanh": (-2.6442, 2.6442),
    "sigmoid": (-5.2883, 5.2883),
    "softsign": (-6.0711, 6.0711),
    "hardsigmoid": (-3.0, 3.0),
    "hardswish": (-3.0, math.inf),
    "log_sigmoid": (-math.inf, _LOGIT_98),
}
_SAME = {"special_expit": "sigmoid", "logsigmoid": "log_sigmoid"}


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
    if name == "hardtanh":
        ends = arguments.get("min_val", -1.0), arguments.get("max_val", 1.0)
        return ("relu6" if ends == (0.0, 6.0) else name), ends
    is_clamped = name in ("clamp", "clip", "clamp_min") and arguments.get("min") == 0
    if is_clamped and arguments.get("max") is None:
        name = "relu"
    return (name, ENDS[name]) if name in ENDS else None
