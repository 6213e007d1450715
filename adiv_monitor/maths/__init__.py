"""Formulas of the measures: sums over rows on the device, estimates from them on the host."""
