"""Runs with a planted fault and their healthy twins, by which the audit is judged."""
