"""All planted illnesses, and all runs without one."""

from audit.ward.healthy import HEALTHY
from audit.ward.ill import initial, inputs, optimizers, published, rates, wiring
from audit.ward.run import Case

_ALL = [
    *(inputs.CASES, rates.CASES, initial.CASES),
    *(optimizers.CASES, wiring.CASES, published.CASES),
]
CASES: dict[str, Case] = {case.name: case for cases in _ALL for case in cases}
HEALTHY = {**HEALTHY, published.ONES_AND_ZEROS.name: published.ONES_AND_ZEROS}

assert len(CASES) == sum(map(len, _ALL)), "two cases have one name"
