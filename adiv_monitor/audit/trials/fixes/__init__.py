"""The fixes that can be tried, by name."""

from collections.abc import Mapping
from types import MappingProxyType

from adiv_monitor.audit.trials.fixes import (
    activations,
    attention,
    code,
    inputs,
    layers,
    optimizer,
    rates,
    sequences,
    wiring,
)
from adiv_monitor.audit.trials.fixes.fix import DoesNotApply, Fix

FIXES: Mapping[str, Fix] = MappingProxyType(
    {
        fix.name: fix
        for family in (
            *(inputs, rates, layers, activations, wiring, optimizer, code, sequences),
            attention,
        )
        for fix in family.FIXES
    }
)

__all__ = ["FIXES", "DoesNotApply", "Fix"]
