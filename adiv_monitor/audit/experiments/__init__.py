"""All questions: importing their files registers them."""

# ruff: noqa: F401
from adiv_monitor.audit.experiments import (
    answers,
    attention,
    backward,
    data,
    exchange,
    loss_inputs,
    modules,
    operands,
    reference,
    reshapes,
    sequences,
    state,
    taught,
    terms,
)
