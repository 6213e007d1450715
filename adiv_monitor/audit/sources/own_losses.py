"""Reads the first losses that a user's own run has logged."""

import csv
import json
from pathlib import Path
from typing import Any

from adiv_monitor.audit.options.usage import UsageError, one_line

_OTHERS = ("val", "test", "eval", "epoch")  # in names of columns that are no losses of steps


def own_losses(file: str) -> dict[int, float]:
    """Read step → loss from a JSON list, Lightning's metrics.csv, or a trainer_state.json.

    A list holds the losses of the steps 0, 1, 2, …. Hugging Face's Trainer logs the mean since its
    last log, which is used for each of these steps.

    Raises:
        UsageError: the file can't be read, or holds no losses.
    """
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    try:
        losses = _of_json(json.loads(text)) if text.lstrip()[:1] in ("[", "{") else _of_csv(text)
        if not losses:
            raise ValueError("it holds no loss")
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"--losses {file}: {one_line(error)}; expected a JSON list of numbers, Lightning's "
            "metrics.csv, or a trainer_state.json of Hugging Face"
        ) from error
    return losses


def _of_json(found: Any) -> dict[int, float]:
    if isinstance(found, list):
        return {step: float(loss) for step, loss in enumerate(found)}
    losses: dict[int, float] = {}
    for entry in found["log_history"]:
        if "loss" in entry:  # its step is the number of complete steps
            losses |= dict.fromkeys(range(len(losses), int(entry["step"])), float(entry["loss"]))
    return losses


def _of_csv(text: str) -> dict[int, float]:
    rows = list(csv.DictReader(text.splitlines()))
    names = [name for name in (rows[0] if rows else ()) if name]
    columns = [n for n in names if "loss" in n and not any(word in n for word in _OTHERS)]
    if not columns:
        raise ValueError(f"no column of losses among {', '.join(names) or 'none'}")
    column = min(columns, key=lambda name: "step" not in name)  # else the first
    seen = ((row.get("step") or number, row[column]) for number, row in enumerate(rows))
    return {int(step): float(loss) for step, loss in seen if loss}
