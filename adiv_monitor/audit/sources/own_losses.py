"""Reads the first losses that a user's own run has logged."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adiv_monitor.audit.options.usage import UsageError, one_line

# Columns of a table of metrics, best first; otherwise the first column with "loss" in its name
# that is not of an epoch, a validation or a test.
_COLUMNS = ("train_loss_step", "loss_step", "train_loss", "train/loss", "loss")
_OTHERS = ("val", "test", "eval", "epoch")


def own_losses(file: str) -> dict[int, float]:
    """Read step → loss from a JSON list, Lightning's metrics.csv, or a trainer_state.json.

    A list holds the losses of the steps 0, 1, 2, …. Hugging Face's Trainer logs the mean since its
    last log, which is used for each of these steps.

    Raises:
        UsageError: the file can't be read, or holds no losses.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--losses {file}: can't be read: {one_line(error)}") from error
    try:
        losses = _of_json(json.loads(text)) if text.lstrip()[:1] in ("[", "{") else _of_csv(text)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"--losses {file}: {one_line(error)}") from error
    if not losses:
        raise UsageError(
            f"--losses {file}: holds no loss, expected a JSON list of numbers, a metrics.csv of "
            "Lightning's CSVLogger, or a trainer_state.json of Hugging Face's Trainer"
        )
    return losses


def _of_json(found: Any) -> dict[int, float]:
    if isinstance(found, list):
        return {step: _number(loss) for step, loss in enumerate(found)}
    history = found.get("log_history") if isinstance(found, Mapping) else None
    if not isinstance(history, list):
        raise ValueError("expected a list of losses, or an object with log_history")
    losses: dict[int, float] = {}
    last = 0
    for entry in history:
        if "loss" in entry:
            step = int(entry["step"])  # number of complete steps
            losses |= dict.fromkeys(range(last, step), _number(entry["loss"]))
            last = step
    return losses


def _of_csv(text: str) -> dict[int, float]:
    rows = list(csv.DictReader(text.splitlines()))
    names = [name for name in (rows[0] if rows else {}) if name]
    usual = [name for name in _COLUMNS if name in names]
    others = [n for n in names if "loss" in n and not any(word in n for word in _OTHERS)]
    if not (usual or others):
        raise ValueError(f"no column of losses among {', '.join(names) or 'none'}")
    column = (usual or others)[0]
    seen = [(row.get("step") or str(number), row[column]) for number, row in enumerate(rows)]
    return {int(step): _number(loss) for step, loss in seen if loss}


def _number(loss: Any) -> float:
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise ValueError(f"got {loss!r}, expected a number") from None
