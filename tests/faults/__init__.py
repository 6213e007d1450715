"""Puts faults into the monitor, and looks at what they do to a training."""
