"""Alignment of weights, their updates and their inputs: A(W, z), alpha, omega and u."""

from adiv_monitor.alignment.instrument import Alignment
from adiv_monitor.alignment.layers import AlignedLayer, Role
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.alignment.ratio import effective_rank, kappa, log_alignment
from adiv_monitor.report import AlignmentReading

__all__ = [
    "AlignedLayer",
    "Alignment",
    "AlignmentReading",
    "Probe",
    "Role",
    "effective_rank",
    "kappa",
    "log_alignment",
]
