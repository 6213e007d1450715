"""Rules for functions that use parameters, one file per family of functions."""
