"""The solver's time, and that of its linear program, in milliseconds of processor time.

python tests/benchmarks/max_lr.py
"""

import random
import time
from collections.abc import Callable
from statistics import median
from typing import get_args

from adiv_monitor.max_lr import solve_max_lr
from adiv_monitor.max_lr.solver import Objective

REPEATS = 40


def milliseconds(function: Callable[[], object]) -> tuple[float, float]:
    """Return the median and the minimum processor time of a call."""
    function()
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        function()
        times.append(1e3 * (time.process_time() - start))
    return median(times), min(times)


def main() -> None:
    rng = random.Random(0)
    print(f"{'layers':>6}  {'objective':<8}  {'optimizer':<9}  median ms  least ms")
    for layers in (5, 20, 50, 100, 200):
        for optimizer in ("adam", "sgd"):
            for objective in get_args(Objective):
                given = {
                    "alpha": [rng.uniform(0.5, 1) for _ in range(layers)],
                    "omega": [rng.uniform(0.45, 0.6) for _ in range(layers)],
                    "u": [rng.uniform(0.5, 1) for _ in range(layers)],
                }

                def solve(
                    given: dict[str, list[float]] = given,
                    optimizer: str = optimizer,
                    objective: Objective = objective,
                ) -> None:
                    found = solve_max_lr(
                        parametrization="mup", optimizer=optimizer, objective=objective, **given
                    )
                    assert found.status == "optimal", found

                middle, least = milliseconds(solve)
                print(f"{layers:6d}  {objective:<8}  {optimizer:<9}  {middle:9.2f}  {least:8.2f}")


if __name__ == "__main__":
    main()
