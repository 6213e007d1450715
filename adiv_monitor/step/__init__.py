"""Measured steps: their schedule, and their course from captured rows to the report."""
