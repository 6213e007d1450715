"""Observations of a run: one fork is trained under a monitor, and examined before and after."""
