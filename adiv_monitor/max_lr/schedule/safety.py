"""Detection of a diverging loss, upon which gains are reset."""

import math
from collections import deque
from statistics import median

_REMEMBERED, _ENOUGH = 100, 10
_ASTRAY = 3.0


class LossWatch:
    """Detector of a loss that is not finite, or more than three times its running median.

    The median is that of the last hundred losses; with fewer than ten there is none.
    """

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=_REMEMBERED)

    def is_astray(self, loss: float) -> bool:
        """Whether this loss has diverged; if not, it counts for the running median."""
        if not math.isfinite(loss):
            return True
        usual = median(self.losses) if len(self.losses) >= _ENOUGH else math.inf
        if loss > _ASTRAY * usual > 0:
            return True
        self.losses.append(loss)
        return False
