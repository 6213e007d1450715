"""Hand-made records of a healthy run; keywords override single values."""

from dataclasses import replace

from adiv_monitor.diagnosis.finding import Trial
from adiv_monitor.diagnosis.record import (
    Facts,
    InputStatistics,
    Record,
    UnitStatistics,
    WeightStatistics,
    Wiring,
)
from adiv_monitor.diagnosis.running import Running
from adiv_monitor.report import LayerReading, StepReport

STEPS = 40
FACTS = Facts(
    model="Net",
    parameters=10_000,
    trainable=10_000,
    optimizer="SGD",
    settings={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
    batch_size=64,
    batches=STEPS,
    steps=STEPS,
    every_n_steps=10,
    seed=0,
    device="cpu",
    torch="2",
    seconds_per_step=0.01,
)
INPUTS = InputStatistics(0.0, 1.0, -3.0, 3.0, 0.1, 1.5, 0.4, 64)
WELL = tuple(2.3 * 0.95**step for step in range(STEPS))
STILL = tuple(2.3 + 0.01 * (-1) ** step for step in range(STEPS))
RISING = tuple(2.3 * 1.05**step for step in range(STEPS))


def reading(**values: object) -> LayerReading:
    """Return a healthy layer's reading; keywords override its values."""
    measures: dict[str, object] = {
        "update_cosine": 0.3,
        "gradient_cosine": 0.3,
        "attainable_cosine": 0.9,
        "effective_lr": 0.1,
        "scale_mean": 65.0,
        "scale_cv": 0.3,
        "common_share": 0.2,
        "idle_share": 0.0,
        "update_ratio": 0.02,
        "descent": 0.01,
        "parameter_cosine": 0.5,
        "projection_cosine": 1.0,
        "applied_cosine": 0.5,
    }
    fixed = {"kind": "linear", "rows_seen": 64, "rows_total": 64, "rows_without_gradient": 0}
    return LayerReading(**{**fixed, "gradient_factor": 1.0, **measures, **values})  # type: ignore[arg-type]


def record(
    layers: dict[str, LayerReading] | None = None, *, facts: Facts = FACTS, **values: object
) -> Record:
    """Return the record of a healthy run of three layers; keywords override its fields."""
    layers = {name: reading() for name in "abc"} | (layers or {})
    fields: dict[str, object] = {
        "losses": WELL,
        "gradient_norms": (1.0,) * STEPS,
        "reports": tuple(StepReport(step, layers, {}, 1.0) for step in range(0, STEPS, 10)),
        "inputs": {"0": INPUTS},
        "units": {"relu": UnitStatistics("relu", 64, 2, 0.5, 20)},
        "wiring": Wiring(input_matters=0.5),
        "chance": 2.3,
        "parameter_norms": (10.0,) * STEPS,
        "weights": {name: WeightStatistics(0.6, 0.05, 0.0) for name in "abc"},
    }
    return Record(facts, **{**fields, **values})  # type: ignore[arg-type]


def adam(**settings: float) -> Facts:
    settings = {"lr": 1e-3, "weight_decay": 0.01} | settings
    return replace(FACTS, optimizer="AdamW", settings=settings)


def decayed(weight_decay: float) -> Facts:
    return replace(FACTS, settings={**FACTS.settings, "weight_decay": weight_decay})


def trials(**loss: float) -> dict[float, Trial]:
    """Return trials of other learning rates by factor: x01=… is the loss at a tenth."""
    factors = {"x01": 0.1, "x03": 0.3, "x3": 3.0, "x10": 10.0}
    own = loss.pop("own")
    error = loss.pop("error", 0.01)
    return {
        factors[name]: Trial(f"rate*{factors[name]:g}", STEPS, value, own, None, error)
        for name, value in loss.items()
    }


def by_reports(
    *steps: dict[str, LayerReading], rates: tuple[float, ...] = (), losses: tuple[float, ...] = ()
) -> Record:
    """Return a run that is known by its reports alone: one of every tenth step."""
    running = Running()
    for i, read in enumerate(steps):
        running.add(StepReport(10 * i, read, {}, 1.0, learning_rates=rates[i : i + 1]))
    running.add_losses(dict(enumerate(losses)))
    return running.record()
