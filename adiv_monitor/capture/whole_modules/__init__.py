"""Modules that are measured as a whole, since no rule says how they use parameters."""
