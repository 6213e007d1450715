"""W&B and MLflow as real clients, offline: their own files contain scalars and pictures."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adiv_monitor import Monitor
from adiv_monitor.huggingface import DivergenceTrainerCallback
from adiv_monitor.lightning import DivergenceCallback
from adiv_monitor.sinks import MemorySink, TrackerSink
from adiv_monitor.sinks.scalars import board_scalars

STEPS, EVERY = 8, 2
# Warnings of the products and of their dependencies, which no user of the monitor can fix.
OF_PRODUCTS = ("DeprecationWarning", "FutureWarning", "pydantic.warnings.PydanticDeprecatedSince20")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{name}") for name in OF_PRODUCTS]


Scalars = Mapping[str, Mapping[int, float]]  # tag → step → value


def by_lightning(folder: Path, logger: Any) -> MemorySink:
    from lightning_setups import loader, module, trainer

    memory = MemorySink()
    callback = DivergenceCallback(EVERY, sinks=[memory], on_error="raise")
    options = {"default_root_dir": folder, "log_every_n_steps": EVERY}
    trainer(callbacks=callback, logger=logger, **options).fit(module(), loader())
    return memory


def by_trainer(folder: Path, product: str) -> MemorySink:
    from huggingface_setups import trainer_in

    memory = MemorySink()
    callback = DivergenceTrainerCallback(EVERY, sinks=[memory], on_error="raise")
    trainer_in(folder, callback, report_to=product, logging_steps=EVERY).train()
    return memory


# --- reading the products' files -----------------------------------------------------------------


def _records(file: Path) -> Iterator[Any]:
    """Yield the records of W&B's transaction log, made of blocks of 32 KiB with records or parts.

    Each has a header: checksum (4 bytes), length (2), and kind (1): whole (1), first part (2),
    middle part (3) or last part (4). The file begins with seven bytes of its own.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if left < 7 or kind == 0:
            at += left
            continue
        record = (record if kind in (3, 4) else b"") + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(record)


def _finished(file: Path) -> list[Any]:
    """Return all records; W&B's own process writes the last ones shortly after `finish` returns."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = list(_records(file))
        if any(record.HasField("exit") for record in found):
            return found
        time.sleep(0.2)
    raise TimeoutError(f"{file}: the run had not ended after 60 s")


def wandb_wrote(folder: Path, axis: str) -> Scalars:
    scalars: dict[str, dict[int, float]] = {}
    for row in wandb_rows(folder):
        for key, value in row.items():
            if (tag := key.removeprefix("train/")).startswith("adiv.") and tag != "adiv.step":
                scalars.setdefault(tag, {})[int(row[axis])] = float(value)
    return scalars


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """Return key → value of each row of the history; of a picture, what is known of its file."""
    (file,) = folder.rglob("run-*.wandb")
    rows = []
    for record in _finished(file):
        row: dict[str, Any] = {}
        for item in record.history.item:
            *outer, last = item.nested_key or [item.key]
            of = row.setdefault(outer[0], {}) if outer else row
            of[last] = json.loads(item.value_json)
        rows += [row] if row else []
    return rows


def _histories(client: Any, number: str) -> dict[str, dict[int, float]]:
    """Return tag → step → value when complete: a Trainer writes them in other threads."""
    deadline, found = time.monotonic() + 60, {}
    while time.monotonic() < deadline:
        with suppress(ValueError):  # the file is still empty
            keys = [k for k in client.get_run(number).data.metrics if k.startswith("adiv.")]
            found = {
                k: {m.step: m.value for m in client.get_metric_history(number, k)} for k in keys
            }
            if found and all(len(steps) == STEPS // EVERY for steps in found.values()):
                return found
        time.sleep(0.2)
    return found


def mlflow_wrote(folder: Path) -> Scalars:
    from mlflow import MlflowClient

    (run,) = Path(folder).glob("[0-9]*/*/meta.yaml")
    return _histories(MlflowClient(f"file:{folder}"), run.parent.name)


# --- ways to write -------------------------------------------------------------------------------


def wandb_by_lightning(folder: Path) -> tuple[MemorySink, Scalars]:
    import wandb
    from pytorch_lightning.loggers import WandbLogger

    memory = by_lightning(folder, WandbLogger(offline=True, save_dir=folder, project="p"))
    wandb.finish()
    return memory, wandb_wrote(folder, "trainer/global_step")


def mlflow_by_lightning(folder: Path) -> tuple[MemorySink, Scalars]:
    from pytorch_lightning.loggers import MLFlowLogger

    memory = by_lightning(folder, MLFlowLogger(tracking_uri=f"file:{folder / 'runs'}"))
    return memory, mlflow_wrote(folder / "runs")


def wandb_by_trainer(folder: Path) -> tuple[MemorySink, Scalars]:
    import wandb

    wandb.init(dir=folder, mode="offline", project="p")
    memory = by_trainer(folder, "wandb")
    wandb.finish()
    return memory, wandb_wrote(folder, "train/global_step")


WAYS: dict[str, tuple[str, Callable[[Path], tuple[MemorySink, Scalars]]]] = {
    "W&B by Lightning": ("wandb", wandb_by_lightning),
    "MLflow by Lightning": ("mlflow", mlflow_by_lightning),
    "W&B by Hugging Face": ("wandb", wandb_by_trainer),
}


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("way", WAYS)
def test_products_have_the_scalars(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, train = WAYS[way]
    pytest.importorskip(package, reason='pip install "adiv-monitor[products]"')
    monkeypatch.chdir(tmp_path)  # where clients write other files
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'runs'}")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    memory, written = train(tmp_path)
    offset = 1 if "Hugging" in way else 0  # whose history counts completed steps
    assert len(memory.reports) == STEPS // EVERY
    for report in memory.reports:
        for tag, value in board_scalars(report, None, "few").items():
            kept = written[tag][report.step + offset]
            assert kept == pytest.approx(value, rel=1e-6, nan_ok=math.isnan(value))


Logs = Callable[[int], None]
OWN_LOGS: dict[str, Callable[[Any], Logs]] = {
    "none": lambda run: lambda step: None,
    "each step": lambda run: lambda step: run.log({"own": step}),
    "each step, by its number": lambda run: lambda step: run.log({"own": step}, step=step),
    "seldom": lambda run: lambda step: run.log({"own": step}) if step % 5 == 0 else None,
}


@pytest.mark.slow
@pytest.mark.parametrize("own", OWN_LOGS)
def test_a_loop_of_ones_own_keeps_its_logs_in_wandb_beside_ours(own: str, tmp_path: Path) -> None:
    """W&B drops a row whose step is not above the last, and overwrites a row that waits."""
    wandb = pytest.importorskip("wandb", reason='pip install "adiv-monitor[products]"')
    rows = {}
    for monitored in (False, True):
        folder = tmp_path / str(monitored)
        folder.mkdir()
        run = wandb.init(dir=folder, mode="offline", project="p", settings={"silent": True})
        torch.manual_seed(0)
        log, memory, model = OWN_LOGS[own](run), MemorySink(), nn.Linear(6, 3)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        sinks = [TrackerSink("wandb"), memory] if monitored else [memory]
        with Monitor(model, optimizer, every_n_steps=EVERY, sinks=sinks, on_error="raise"):
            for step in range(STEPS):
                optimizer.zero_grad()
                model(torch.randn(8, 6)).square().mean().backward()
                optimizer.step()
                log(step)
        run.finish()
        rows[monitored] = wandb_rows(folder)
    said = [[(row["_step"], row["own"]) for row in of if "own" in row] for of in rows.values()]
    assert [step for _, step in said[0]] == [step for _, step in said[1]]
    assert own == "seldom" or said[0] == said[1]  # between seldom logs, ours are rows of their own
    ours = [row for row in rows[True] if "adiv.summary/coverage" in row]
    assert [row["adiv.step"] for row in ours] == [report.step for report in memory.reports]
    for row, report in zip(ours, memory.reports, strict=True):
        expected = board_scalars(report, None, "few")
        assert {tag: row[tag] for tag in expected} == pytest.approx(expected, nan_ok=True)
    assert rows[True][-1]["adiv/overview"]["_type"] == "image-file"
