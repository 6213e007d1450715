"""Faults by where they are planted."""
