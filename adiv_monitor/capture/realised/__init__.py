"""The realised effect of a step: its forward passes are recorded and rerun with new weights."""
