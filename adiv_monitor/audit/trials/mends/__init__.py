"""What can be tried: every mend by its name."""

from collections.abc import Mapping
from types import MappingProxyType

from adiv_monitor.audit.trials.mends import (
    activations,
    code,
    inputs,
    layers,
    optimizer,
    rates,
    wiring,
)
from adiv_monitor.audit.trials.mends.mend import DoesNotApply, Mend

MENDS: Mapping[str, Mend] = MappingProxyType(
    {
        mend.name: mend
        for family in (inputs, rates, layers, activations, wiring, optimizer, code)
        for mend in family.MENDS
    }
)

__all__ = ["MENDS", "DoesNotApply", "Mend"]
