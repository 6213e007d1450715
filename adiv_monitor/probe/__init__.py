"""The probe: a few samples on which the model runs again, in place and without side effects."""
