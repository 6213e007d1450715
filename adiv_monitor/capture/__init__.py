"""Captures a step: the rows of each layer with their gradients, and the parameters."""
