"""From numbers on the device to readings on the host, and what a reader must know about them."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.measures import quantiles, quantiles_of_numbers
from adiv_monitor.report import MEASURES, QUANTILE_LEVELS, LayerReading
from adiv_monitor.updates import Watch

Numbers = dict[str, dict[str, list[float]]]

# The quantiles that are taken: for histograms, and for p05, p50, p95.
LEVELS = (*QUANTILE_LEVELS, 0.05, 0.5, 0.95)
_DISTRIBUTIONS = {"scale_entries": quantiles, "row_cosine_entries": quantiles_of_numbers}
# A rule that does not describe its layer is wrong by much more than half precision's rounding.
_RULE_TOLERANCE = 0.05


# A key beside the layers' paths, which have no spaces.
STEP = "the step"
_REFUSED = {
    "skipped": "The optimizer skipped the step, because a gradient is not finite: not measured.",
    "moved": (
        "The optimizer moved the weights before it asked for the gradient (as SAM does), so its "
        "update does not start where the gradient was taken: not measured."
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What a measured step has to say.

    Attributes:
        layers: the readings.
        unsupported: path → why there is no reading of a layer that was watched.
        misdescribed: path → why a layer must not be watched again: its rule does not hold.
        checked: layers whose rule was seen to hold (an output of zeros shows nothing).
        notes: what else a reader must know.
    """

    layers: dict[str, LayerReading]
    unsupported: dict[str, str]
    misdescribed: dict[str, str]
    checked: set[str]
    notes: list[str]


class Looked(NamedTuple):
    """What was looked at in a layer."""

    kind: str
    rows_seen: int
    rows_total: int


def refusal(reasons: list[str]) -> Outcome:
    """The step as a whole is not measured."""
    return Outcome({}, {}, {}, set(), [_REFUSED[name] for name in reasons])


def understand(
    looked: dict[str, Looked],
    fetched: Numbers,
    unreached: dict[str, str],
    watch: Watch,
) -> Outcome:
    """Readings, and what goes with them.

    Args:
        looked: path → what was looked at there.
        fetched: path → name → numbers.
        unreached: path → why there are no numbers.
        watch: is told what happened to gradients and weights.
    """
    misdescribed = {
        path: f"its output is not what its rule says (relative error {error:.2g}): a hook "
        "or a subclass changes it, or the registered rule is wrong"
        for path, values in fetched.items()
        if (error := values.get("rule_error", [0.0])[0]) > _RULE_TOLERANCE
    }
    kept = {path: values for path, values in fetched.items() if path not in misdescribed}
    _learn(kept, watch)
    notes = _notes(kept)
    readings = {path: _reading(looked[path], values) for path, values in kept.items()}
    checked = {p for p, v in kept.items() if v.get("rule_error", [math.nan])[0] <= _RULE_TOLERANCE}
    return Outcome(readings, {**unreached, **misdescribed}, misdescribed, checked, notes)


def _learn(fetched: Numbers, watch: Watch) -> None:
    stepped = [values for values in fetched.values() if "gradient_changed" in values]
    if stepped:
        watch.learn(
            gradient_changed=any(values["gradient_changed"][0] for values in stepped),
            weights_changed=any(values["weights_changed"][0] for values in stepped),
        )


def _notes(fetched: Numbers) -> list[str]:
    notes = []
    infinite = [p for p, v in fetched.items() if not math.isfinite(v["gradient_square"][0])]
    if infinite:
        notes.append(f"The gradient is not finite in {_listed(infinite)}.")
    lost = [p for p, v in fetched.items() if v.get("gradient_lost", [0.0])[0]]
    if lost:
        notes.append(
            "The optimizer changed .grad during its step, unlike before: parameter_cosine, "
            f"applied_cosine and descent are missing for {_listed(lost)}, from the next report on "
            "they are there."
        )
    changed = [p for p, v in fetched.items() if v.get("weights_changed", [0.0])[0]]
    missing = [p for p in changed if "projection_cosine" not in fetched[p]]
    if missing:
        notes.append(
            "The weights changed after the optimizer's step, unlike before: projection_cosine and "
            f"applied_cosine are missing for {_listed(missing)}, from the next report on they are "
            "there."
        )
    return notes


def _listed(paths: list[str]) -> str:
    shown = ", ".join(paths[:3])
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"


def fetch(batches: Sequence[tuple[list[str], dict[str, Tensor]]]) -> Numbers:
    """Bring the tensors to the host, and sort them by layer; the distributions as quantiles.

    Args:
        batches: paths, and by name a tensor that holds for each of them a number or, of a
            distribution, numbers.
    """
    tensors = [tensor for _, named in batches for tensor in named.values()]
    arrays = iter(_to_host(tensors))
    fetched: Numbers = defaultdict(dict)
    for paths, named in batches:
        for name in named:
            values = next(arrays).reshape(len(paths), -1)
            if name in _DISTRIBUTIONS:
                values = _DISTRIBUTIONS[name](values, LEVELS)
            for path, numbers in zip(paths, values.tolist(), strict=True):
                fetched[path][name] = numbers
    return fetched


def _to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Many small tensors as float64 vectors, by one transfer per device."""
    places: dict[torch.device, list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        places[tensor.device].append(place)
    arrays = [np.empty(0)] * len(tensors)
    for of_device in places.values():
        packed = torch.cat([tensors[place].reshape(-1) for place in of_device]).cpu().numpy()
        ends = np.cumsum([tensors[place].numel() for place in of_device])
        parts = np.split(packed.astype(np.float64), ends[:-1])
        for place, part in zip(of_device, parts, strict=True):
            arrays[place] = part
    return arrays


def _reading(looked: Looked, fetched: dict[str, list[float]]) -> LayerReading:
    n = len(QUANTILE_LEVELS)
    distributions: dict[str, Any] = {}
    named: dict[str, Any] = {}
    for name in ("scale", "row_cosine"):
        levels = fetched.pop(f"{name}_entries", [])
        distributions[f"{name}_quantiles"] = tuple(levels[:n])
        named |= dict(zip((f"{name}_p05", f"{name}_p50", f"{name}_p95"), levels[n:], strict=False))
    values = {name: value[0] for name, value in fetched.items()}
    if values.get("gradient_lost"):  # what was read for γ is not what the optimizer saw
        for name in ("parameter_cosine", "applied_cosine", "descent"):
            values.pop(name, None)
    if values.get("weights_changed") == 0.0:  # a = u
        named["projection_cosine"] = 1.0 if values["update_square"] > 0 else math.nan
        if "parameter_cosine" in values:
            named["applied_cosine"] = values["parameter_cosine"]
    return LayerReading(
        **looked._asdict(),
        rows_without_gradient=int(values["rows_without_gradient"]),
        gradient_factor=values.get("gradient_factor", 1.0),
        **distributions,
        **{name: value for name, value in (values | named).items() if name in MEASURES},
    )
