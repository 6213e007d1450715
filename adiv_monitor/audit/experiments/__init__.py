"""All questions: importing their files registers them."""

# ruff: noqa: F401
from adiv_monitor.audit.experiments import (
    activations,
    answers,
    axes,
    backward,
    beginning,
    data,
    exchange,
    loss_inputs,
    modules,
    places,
    state,
    terms,
)
