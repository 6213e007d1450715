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

assert len(CASES) == sum(map(len, _ALL)), "two cases have one name"
