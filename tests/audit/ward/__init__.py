"""Runs with a planted illness and their healthy twins, by which the audit is judged."""
