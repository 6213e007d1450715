"""Example reports of a training run, made without running one."""

import random

from adiv_monitor.diagnosis.running import Running
from adiv_monitor.report import (
    ATTENTION_MEASURES,
    MEASURES,
    AttentionReading,
    LayerReading,
    StepReport,
)

LAYERS = ("stem.conv", "block.0.attention.q_proj", "block.0.mlp[wide]", "head")


def reading(seed: int = 0, **values: object) -> LayerReading:
    """Return a reading with every measure in a plausible range; keywords override its values."""
    draw = random.Random(seed)
    measures: dict[str, object] = {name: draw.uniform(0.1, 0.95) for name in MEASURES}
    measures |= {"scale_mean": 10 ** draw.uniform(0, 3), "effective_lr": 10 ** draw.uniform(-4, 0)}
    fixed: dict[str, object] = {
        "kind": "linear",
        "rows_seen": 1024,
        "rows_total": 65536,
        "rows_without_gradient": 24,
        "gradient_factor": 1.0,
    }
    return LayerReading(**{**fixed, **measures, **values})  # type: ignore[arg-type]


def attention(seed: int = 0, **values: object) -> AttentionReading:
    """Return a reading of two heads in a plausible range; keywords override its values."""
    draw = random.Random(seed)
    heads = {name: (draw.uniform(0.1, 0.5), draw.uniform(0.5, 0.9)) for name in ATTENTION_MEASURES}
    fixed: dict[str, object] = {
        "samples_seen": 4,
        "standard_error": {"attention_scale_mean": 0.01},
        "heads": heads,
        "heads_standard_error": {"attention_scale_mean": (0.02, 0.03)},
    }
    measures = {name: sum(of_heads) / 2 for name, of_heads in heads.items()}
    return AttentionReading(**{**fixed, **measures, **values})  # type: ignore[arg-type]


def report(step: int = 0, **values: object) -> StepReport:
    """Return a report of four layers, one unsupported module and a note; keywords override."""
    fields: dict[str, object] = {
        "step": step,
        "layers": {path: reading(1000 * i + step) for i, path in enumerate(LAYERS)},
        "unsupported": {
            "decoder.lstm": "torch.nn.modules.rnn.LSTM: no rule for this type of module"
        },
        "unmeasured": {
            "decoder.lstm.weight_ih_l0": 8192,
            "decoder.lstm.weight_hh_l0": 4096,
            "decoder.lstm.bias_ih_l0": 128,
            "decoder.lstm.bias_hh_l0": 128,
        },
        "coverage": 0.875,
        "notes": ("The gradient was clipped to 0.5 of its length.",),
    }
    return StepReport(**{**fields, **values})  # type: ignore[arg-type]


def running(*reports: StepReport) -> Running:
    """Return the history of these reports."""
    found = Running()
    for each in reports:
        found.add(each)
    return found
