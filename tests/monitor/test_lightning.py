"""The callback agrees with a monitor in a plain loop, in every setting of Lightning's Trainer."""

import importlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("pytorch_lightning")
pytest.importorskip("lightning.pytorch")
import lightning.pytorch as lpl
import pytorch_lightning as pl
from hooks import no_hooks
from lightning_setups import BATCHES, QUIET, loader, module, net, trainer
from plain_loops import assert_same, losses_of, plain_loop
from pytorch_lightning.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from adiv_monitor import StepReport
from adiv_monitor.lightning import DivergenceCallback
from adiv_monitor.sinks import HtmlSink, MemorySink
from adiv_monitor.sinks.scalars import DEFAULT_MEASURES, summary_scalars

pytestmark = QUIET


def fit(model: Any = None, package: ModuleType = pl, **options: Any) -> list[StepReport]:
    """Fit with a callback that measures every second step; return its reports."""
    memory = MemorySink()
    callback = DivergenceCallback(2, sinks=[memory], on_error="raise")
    model = module(package) if model is None else model
    trainer(package, callbacks=callback, **options).fit(model, loader())
    return memory.reports


def plain_fit(
    accumulate: int = 1, prepare: Callable[[nn.Module], object] = lambda model: None
) -> list[StepReport]:
    """Run the same training as a plain loop."""
    model = nn.ModuleDict({"net": net()})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(2)
    losses = (nn.functional.cross_entropy(model["net"](x), y) for x, y in BATCHES)
    return plain_loop(model, optimizer, losses, accumulate, prepare)


def test_an_alarm_may_stop_the_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The report of step 2 is complete, and has reached the loggers, in the fourth batch."""
    logger = pl.loggers.CSVLogger(tmp_path)
    memory, model = MemorySink(), module()
    rules = [lambda path, reading: path == "net.3" and len(memory.reports) == 1]
    callback = DivergenceCallback(2, sinks=[memory], alarms=rules, on_alarm="stop")
    run = trainer(callbacks=callback, logger=logger, max_epochs=3)
    run.fit(model, loader())
    assert run.should_stop
    assert run.global_step == 4
    assert [len(report.alarms) for report in memory.reports] == [0, 1]
    (line,) = [r for r in caplog.records if "training stops" in r.getMessage()]
    assert (line.name, line.levelname) == ("adiv_monitor", "WARNING")
    assert line.getMessage().startswith("adiv-monitor: training stops: step 2: net.3: ")
    assert "adiv.summary/alarms" in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    assert no_hooks(model, model.optimizers(use_pl_optimizer=False))


# Agreement with a plain loop


@pytest.mark.parametrize("package", [pl, lpl])
def test_readings_are_those_of_a_plain_loop(package: ModuleType) -> None:
    reports = fit(package=package)
    assert [report.step for report in reports] == [0, 2, 4, 6]
    assert list(reports[0].layers) == ["net.0", "net.3"]
    assert reports[0].loss_module == "CrossEntropyLoss" and sum(reports[0].labels) == 6
    assert_same(reports, plain_fit())


def test_accumulated_batches_count_as_one_step() -> None:
    reports = fit(accumulate_grad_batches=2)
    assert [report.step for report in reports] == [0, 2]
    assert reports[0].layers["net.0"].rows_total == 12
    assert_same(reports, plain_fit(accumulate=2))


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize(
    ("algorithm", "clip"),
    [("norm", nn.utils.clip_grad_norm_), ("value", nn.utils.clip_grad_value_)],
)
def test_clipped_gradients(algorithm: str, clip: Callable[..., object]) -> None:
    reports = fit(gradient_clip_val=0.01, gradient_clip_algorithm=algorithm)
    assert_same(reports, plain_fit(prepare=lambda model: clip(model.parameters(), 0.01)))
    assert 0 < reports[0].layers["net.0"].gradient_factor < 0.9


# Dynamo itself reads `.grad` of tensors that it traces.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_module() -> None:
    """Lightning compiles the step; a measured step runs eagerly, so that hooks fire."""
    assert_same(fit(model=torch.compile(module(), backend="eager")), plain_fit())


@pytest.mark.parametrize(("scale", "taken"), [(2.0**10, 8), (2.0**127, 0)])
def test_float16_with_a_loss_scale(scale: float, taken: int) -> None:
    """An overflow makes the scaler skip a step, and a skipped step has no report."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=0.99)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    reports = fit(plugins=plugin)
    assert [report.step for report in reports] == [0, 2, 4, 6][: taken // 2]
    if taken:
        reading = reports[0].layers["net.3"]
        assert reading.gradient_factor == pytest.approx(1 / scale, rel=1e-3)
        (expected, *_) = plain_fit()
        assert reading.measures() == pytest.approx(
            expected.layers["net.3"].measures(), rel=0.1, abs=0.05
        )


# The loss


def collecting(**given: Any) -> Any:
    """Return a classifier that collects its losses; keywords replace the module's methods."""
    base = module()

    class Collects(type(base)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.collected: list[float] = []

        def loss_of(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.collected.append(loss.item())
            return loss

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            return self.loss_of(batch)

    return type("Model", (Collects,), given)()


def as_a_dictionary(self: Any, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
    return {"loss": self.loss_of(batch), "logits": torch.ones(2)}


def every_other(self: Any, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
    return self.loss_of(batch) if batch_idx % 2 else None


@pytest.mark.filterwarnings("ignore:.*training_step.* returned .?None")
@pytest.mark.parametrize("training_step", [as_a_dictionary, every_other])
def test_a_training_step_may_give_a_dictionary_or_nothing(training_step: Any) -> None:
    model = collecting(training_step=training_step)
    found = losses_of(fit(model=model))
    assert len(found) > 2
    whole = training_step is as_a_dictionary
    # Lightning steps the optimizer even without a loss; such a step has none in its report.
    expected = model.collected if whole else [x for y in model.collected for x in (None, y)]
    assert found == pytest.approx({i: x for i, x in enumerate(expected[:7]) if x is not None})


def by_hand(self: Any, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
    optimizers = self.optimizers()
    several = optimizers if isinstance(optimizers, list) else [optimizers]
    stepping = several if self.at_once else [several[batch_idx % len(several)]]
    loss = self.loss_of(batch)
    self.manual_backward(loss)
    for optimizer in stepping:
        for _ in range(self.steps):
            optimizer.step()
    for optimizer in several:
        optimizer.zero_grad()
    return loss


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize(
    ("count", "at_once", "steps", "known"),
    [(1, True, 1, True), (1, True, 2, False), (2, False, 1, True), (2, True, 1, False)],
)
def test_by_hand_the_loss_is_known_where_one_step_was_taken(
    count: int, at_once: bool, steps: int, known: bool
) -> None:
    def optimizers(self: Any) -> list[torch.optim.Optimizer]:
        parts = [self.net[0], self.net[3]] if count == 2 else [self]
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]

    model = collecting(
        training_step=by_hand,
        configure_optimizers=optimizers,
        automatic_optimization=False,
        at_once=at_once,
        steps=steps,
    )
    memory = MemorySink()
    callback = DivergenceCallback(1, sinks=[memory], on_error="raise")
    trainer(callbacks=callback).fit(model, loader())
    for index, monitor in enumerate(callback.monitors.values()):
        found = losses_of(list(monitor.reports))
        expected = dict(enumerate(model.collected[index::count])) if known else {}
        assert found == pytest.approx(expected)


def test_the_fit_is_bit_identical() -> None:
    with_callback, without = module(), module()
    fit(with_callback)
    trainer(pl).fit(without, loader())
    after = torch.random.get_rng_state()
    for ours, plain in zip(with_callback.parameters(), without.parameters(), strict=True):
        assert torch.equal(ours, plain)
    fit(module())
    assert torch.equal(torch.random.get_rng_state(), after)


# Several optimizers


class Pair(pl.LightningModule):
    """Two networks trained in turn by two optimizers, the second one twice per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second, second):
            self.toggle_optimizer(optimizer)
            loss = self.critic(self.generator(batch[0])).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net.parameters(), 0.1) for net in (self.generator, self.critic)]


def test_each_optimizer_has_a_monitor_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    callback = DivergenceCallback(4, sinks=[MemorySink()], on_error="raise")
    run = trainer(callbacks=callback)
    with caplog.at_level(logging.INFO, "adiv_monitor"):
        run.fit(Pair(), loader())
    closing = [r.getMessage() for r in caplog.records if r.name == "adiv_monitor"]
    assert [line.split(":")[1] for line in closing] == [" optimizer_0 (SGD)", " optimizer_1 (SGD)"]
    reports = {name: list(monitor.reports) for name, monitor in callback.monitors.items()}
    assert {name: [(r.step, *r.layers) for r in found] for name, found in reports.items()} == {
        "optimizer_0": [(0, "generator"), (4, "generator")],
        "optimizer_1": [(step, "critic") for step in (0, 4, 8, 12)],
    }
    for report in (report for found in reports.values() for report in found):
        assert not report.unsupported
        assert (report.coverage, report.unmeasured) == (1.0, {}), "of what its optimizer trains"
    for name in reports:
        assert f"adiv.summary.{name}/update_cosine_min" in run.callback_metrics


def test_each_optimizer_has_a_page_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    page = HtmlSink(tmp_path / "run.html")
    trainer(callbacks=DivergenceCallback(1, sinks=[page], on_error="raise")).fit(Pair(), loader())
    for name, layer, steps in (("optimizer_0", "generator", 8), ("optimizer_1", "critic", 16)):
        reports = json.loads((tmp_path / f"run-{name}.json").read_text())["record"]["reports"]
        assert [(report["step"], *report["layers"]) for report in reports] == [
            (step, layer) for step in range(steps)
        ]
    assert not (tmp_path / "run.html").exists()


def test_a_fast_run_is_told_nothing_of_its_loggers() -> None:
    trainer(callbacks=DivergenceCallback(1), fast_dev_run=True, logger=True).fit(module(), loader())


def test_a_choice_may_leave_an_optimizer_out() -> None:
    memory = MemorySink()
    callback = DivergenceCallback(4, layers=["crit*"], sinks=[memory], on_error="raise")
    trainer(callbacks=callback).fit(Pair(), loader())
    assert list(callback.monitors) == ["optimizer_1"]
    assert {path for report in memory.reports for path in report.layers} == {"critic"}


# Outputs of the reports


def test_every_logger_gets_the_same_tags(tmp_path: Path) -> None:
    board = pl.loggers.TensorBoardLogger(str(tmp_path / "board"))
    table = pl.loggers.CSVLogger(str(tmp_path / "table"))
    callback = DivergenceCallback(4, scalars="all", on_error="raise")
    trainer(callbacks=callback, logger=[board, table]).fit(module(), loader())
    found = EventAccumulator(board.log_dir).Reload()
    ours = {tag for tag in found.Tags()["scalars"] if tag.startswith("adiv.")}
    assert {"adiv.update_cosine/net.0", "adiv.summary/scale_cv_max"} <= ours
    assert {"adiv/overview", "adiv/per_layer/descent"} <= set(found.Tags()["images"])
    header, *rows = (Path(table.log_dir) / "metrics.csv").read_text().splitlines()
    columns = header.split(",")
    assert {column for column in columns if column.startswith("adiv.")} == ours
    cells = [dict(zip(columns, row.split(","), strict=True)) for row in rows]
    reported = {int(c["step"]): c["adiv.scale_mean/net.0"] for c in cells}
    (_, last) = found.Scalars("adiv.scale_mean/net.0")
    assert [step for step, value in reported.items() if value] == [0, 4]
    assert float(reported[4]) == pytest.approx(last.value)


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("logs, measured", [(3, [0, 20]), (22, [0, 22])])
def test_the_interval_follows_the_trainer_within_the_bound(logs: int, measured: list[int]) -> None:
    memory = MemorySink()
    callback = DivergenceCallback(sinks=[memory])
    run = trainer(callbacks=callback, log_every_n_steps=logs, max_epochs=-1, max_steps=24)
    run.fit(module(), loader())
    assert [report.step for report in memory.reports] == measured


def test_only_rank_zero_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl.Trainer, "is_global_zero", property(lambda trainer: False))
    assert not fit()


def test_a_trainer_without_a_logger_or_an_interval_is_refused() -> None:
    with pytest.raises(ValueError, match=r"without a logger.*DivergenceCallback\(sinks="):
        trainer(callbacks=DivergenceCallback()).fit(module(), loader())
    callback = DivergenceCallback(sinks=[MemorySink()])
    with pytest.raises(ValueError, match=r"log_every_n_steps=0.*every_n_steps=1"):
        trainer(callbacks=callback, log_every_n_steps=0).fit(module(), loader())


WATCHED = "adiv.summary/update_cosine_min"


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("validate", [True, False])
def test_the_summary_is_there_at_the_end_of_a_first_epoch_of_one_step(
    validate: bool, tmp_path: Path
) -> None:
    model = module()
    if validate:
        model.validation_step = lambda batch, batch_idx: model.net(batch[0])
    found: list[float] = []

    class Look(pl.callbacks.Callback):  # type: ignore[misc]
        def on_train_epoch_start(self, run: Any, model: Any) -> None:
            found.append(run.callback_metrics.get(WATCHED))

    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, monitor=WATCHED, mode="max")
    stop = pl.callbacks.EarlyStopping(WATCHED, mode="max", patience=100)
    callback = DivergenceCallback(1, sinks=[MemorySink()], on_error="raise")
    run = trainer(
        callbacks=[checkpoint, stop, callback, Look()],
        enable_checkpointing=True,
        limit_train_batches=1,
        max_epochs=3,
    )
    run.fit(model, loader(), loader() if validate else None)
    assert run.global_step == 3, "nothing stopped it"
    reported = [r.summary()["update_cosine"].min for r in callback.monitors[""].reports]
    assert len(reported) == 3
    assert found[1] == pytest.approx(reported[0])
    # Only the first report is early: changes of the weights at an epoch's end belong to a report.
    assert found[2] == pytest.approx(reported[1 if validate else 0])
    assert checkpoint.best_model_score in [pytest.approx(value) for value in reported]


def test_a_separator_stands_in_all_names_but_tensorboards(tmp_path: Path) -> None:
    files = CSVLogger(tmp_path, "files")
    board = pl.loggers.TensorBoardLogger(tmp_path, "board")
    stop = pl.callbacks.EarlyStopping(
        "adiv.summary_scale_cv_max", divergence_threshold=0.0, check_on_train_epoch_end=True
    )
    callback = DivergenceCallback(2, separator="_", scalars="all", alarms=["scale_mean > 0"])
    run = trainer(callbacks=[callback, stop], logger=[files, board], max_epochs=5)
    with pytest.warns(UserWarning, match="scale_mean > 0"):
        run.fit(module(), loader())
    assert run.global_step == len(BATCHES), "stopped after the first of five epochs"
    names = {name for name in run.callback_metrics if name.startswith("adiv")}
    assert "adiv.summary_alarms" in names
    columns = (Path(files.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    names |= {column for column in columns if column.startswith("adiv")}
    assert "adiv.update_cosine_net.0" in names
    assert not any("/" in name for name in names)
    tags = EventAccumulator(board.log_dir).Reload().Tags()["scalars"]
    assert "adiv.summary/update_cosine_min" in tags


def test_callbacks_and_progress_bar_see_the_last_summary() -> None:
    callback = DivergenceCallback(2, sinks=[MemorySink()], prog_bar=True)
    run = trainer(callbacks=callback)
    run.fit(module(), loader())
    report = callback.monitors[""].latest
    assert report.step == 6
    assert run.callback_metrics == {
        "loss": run.callback_metrics["loss"],
        **{
            tag: pytest.approx(value)
            for tag, value in summary_scalars(report, DEFAULT_MEASURES).items()
        },
    }
    assert run.progress_bar_metrics == {"update_cosine_min": report.summary()["update_cosine"].min}


# Starts and ends


def test_a_resumed_fit_counts_on(tmp_path: Path) -> None:
    whole = fit(max_epochs=2)
    memory = MemorySink()
    callback = DivergenceCallback(3, sinks=[memory], on_error="raise")
    first = trainer(callbacks=callback)
    first.fit(module(), loader())
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = DivergenceCallback(3, sinks=[memory], on_error="raise")
    second = trainer(callbacks=resumed, max_epochs=2)
    second.fit(module(), loader(), ckpt_path=str(tmp_path / "half.ckpt"))
    assert [report.step for report in memory.reports] == [0, 3, 6, 8, 9, 12, 15]
    assert resumed.monitors[""].step == len(whole) * 2 == 16


def test_a_new_fit_counts_from_zero_and_a_longer_one_on() -> None:
    memory = MemorySink()
    callback = DivergenceCallback(8, sinks=[memory], on_error="raise")
    for _ in range(2):
        run = trainer(callbacks=callback)
        model = module()
        run.fit(model, loader())
    run.fit_loop.max_epochs = 2
    run.fit(model, loader())
    assert [report.step for report in memory.reports] == [0, 0, 8]


@pytest.mark.parametrize("failing", [3, None])
def test_nothing_stays_on_the_model(failing: int | None) -> None:
    model = module()
    counted = []

    class Failing(pl.Callback):
        def on_train_batch_end(self, run: Any, model: Any, out: Any, batch: Any, i: int) -> None:
            counted.append(no_hooks(model, run.optimizers[0]))
            if i == failing:
                raise RuntimeError("out of luck")

    memory = MemorySink()
    callback = DivergenceCallback(1, sinks=[memory], on_error="raise")
    run = trainer(callbacks=[callback, Failing()])
    if failing is None:
        run.fit(model, loader())
    else:
        with pytest.raises(RuntimeError, match="out of luck"):
            run.fit(model, loader())
    assert not counted[0], "there was something to remove"
    assert no_hooks(model, model.optimizers(use_pl_optimizer=False))
    batches = len(BATCHES) if failing is None else failing + 1
    assert [report.step for report in memory.reports] == list(range(batches)), "none is lost"


# Versions of Lightning


def test_no_lightning_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning_base"):
        monkeypatch.delitem(sys.modules, f"adiv_monitor.{name}")
    for package in ("pytorch_lightning", "lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r'pip install "adiv-monitor\[lightning\]"'):
        importlib.import_module("adiv_monitor.lightning")
