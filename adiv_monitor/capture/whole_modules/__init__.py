"""Modules that are measured as a whole because no rule describes how they use parameters."""
