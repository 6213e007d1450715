"""The Trainer's callback agrees with a monitor in a plain loop, in every setting of the Trainer."""

import importlib
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState
from hooks import no_hooks
from huggingface_setups import ROWS, SIZE, STEPS, Net, trainer_in
from plain_loops import assert_same, losses_of, plain_loop
from processes import as_launched, meet, patient, run_in
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback

from adiv_monitor import StepReport
from adiv_monitor.huggingface import DivergenceTrainerCallback
from adiv_monitor.sinks import MemorySink
from adiv_monitor.sinks.scalars import DEFAULT_MEASURES, summary_scalars


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """Return a function like `trainer_in`, for this test's folder."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # a Trainer may set it
    return partial(trainer_in, tmp_path)


Make = Callable[..., Trainer]


def train(make: Make, **options: Any) -> list[StepReport]:
    """Train with a callback that measures every second step; return its reports."""
    memory = MemorySink()
    make(DivergenceTrainerCallback(2, sinks=[memory], on_error="raise"), **options).train()
    return memory.reports


def plain(accumulate: int = 1) -> list[StepReport]:
    """Run the same training as a plain loop."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)

    def loss_of(index: int) -> Tensor:
        if index % accumulate == 0:
            torch.manual_seed(index // accumulate)
        rows = ROWS[index * SIZE : (index + 1) * SIZE]
        batch = {name: torch.stack([row[name] for row in rows]) for name in ("x", "labels")}
        return model(**batch)["loss"]

    return plain_loop(model, optimizer, map(loss_of, range(STEPS)), accumulate)


def logged(trainer: Trainer) -> dict[int, dict[str, float]]:
    """Return the monitor's entries of the log history by the Trainer's step."""
    ours = [record for record in trainer.state.log_history if "adiv.summary/coverage" in record]
    found = {int(record["step"]): record for record in ours}
    assert len(found) == len(ours)
    return found


# Agreement with a plain loop


def test_readings_are_those_of_a_plain_loop(make: Make) -> None:
    reports = train(make)
    assert [report.step for report in reports] == [0, 2, 4, 6]
    assert list(reports[0].layers) == ["net.0", "net.3"]
    assert_same(reports, plain())


def test_accumulated_batches_count_as_one_step(make: Make) -> None:
    reports = train(make, gradient_accumulation_steps=2, max_steps=4)
    assert [report.step for report in reports] == [0, 2]
    assert reports[0].layers["net.0"].rows_total == 2 * SIZE
    assert_same(reports, plain(accumulate=2))


@pytest.mark.slow
def test_a_compiled_model(make: Make) -> None:
    """The Trainer compiles it; a measured step runs eagerly."""
    compiled = train(make, torch_compile=True, torch_compile_backend="eager")
    assert_same(compiled, plain())


class Breaking(Net):
    """A model whose fourth loss is NaN."""

    calls = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = super().forward(x, labels)
        self.calls += 1
        return out | {"loss": out["loss"] * math.nan} if self.calls == 4 else out


def test_a_loss_that_is_not_finite_is_told_though_the_trainer_hides_it(make: Make) -> None:
    memory = MemorySink()
    run = make(DivergenceTrainerCallback(2, sinks=[memory]), model=Breaking(), logging_steps=1)
    run.train()
    assert all(math.isfinite(x["loss"]) for x in run.state.log_history if "loss" in x)
    found = losses_of(memory.reports)
    assert math.isfinite(found[2])
    assert math.isnan(found[3])


class Summed(Net):
    """A Trainer that divides by all micro-batches' samples, as transformers' models do."""

    def forward(
        self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, labels, reduction="sum")
        return {"loss": loss / (num_items_in_batch or len(x)), "logits": out}


@pytest.mark.slow(one_in=2, first=1)
@pytest.mark.parametrize("model", [Net, Summed])
def test_losses_are_those_that_the_trainer_logs(make: Make, model: type[nn.Module]) -> None:
    memory = MemorySink()
    run = make(
        DivergenceTrainerCallback(1, sinks=[memory], on_error="raise"),
        model=model(),
        logging_steps=1,
        gradient_accumulation_steps=2,
        max_steps=STEPS // 2,
    )
    run.train()
    logged = {x["step"] - 1: x["loss"] for x in run.state.log_history if "loss" in x}
    assert len(logged) == STEPS // 2
    assert losses_of(memory.reports) == pytest.approx(logged, abs=1e-4)


def test_an_evaluation_completes_the_report(make: Make) -> None:
    """A report completed later would miss earlier changes of the weights and include later ones."""
    steps = []

    class Complete(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append([report.step for report in callback.monitor.reports])

    callback = DivergenceTrainerCallback(1, on_error="raise")
    make(callback, Complete(), eval_strategy="steps", eval_steps=2, max_steps=4).train()
    assert steps == [[0, 1], [0, 1, 2, 3]]


def test_the_training_is_bit_identical(make: Make) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 3, "logging_steps": 2}
    runs = []
    for callbacks in ([], [DivergenceTrainerCallback(2, attainable=True, on_error="raise")]):
        trainer = make(*callbacks, **options)
        trainer.train()
        losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
        evaluated = [r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r]
        runs.append((losses, evaluated, trainer.model.state_dict(), torch.get_rng_state()))
    (losses, evaluated, weights, stream), monitored = runs
    assert len(losses) == 4
    assert (losses, evaluated) == monitored[:2]
    assert all(torch.equal(weights[name], monitored[2][name]) for name in weights)
    assert torch.equal(stream, monitored[3])


def test_alarms_stand_in_the_history(make: Make) -> None:
    rule = "net.0: scale_mean > 0"
    callback = DivergenceTrainerCallback(2, alarms=[rule, lambda path, reading: False])
    trainer = make(callback)
    with pytest.warns(UserWarning, match="step 0: net.0: net.0: scale_mean > 0"):
        trainer.train()
    assert {record["adiv.summary/alarms"] for record in logged(trainer).values()} == {1}


def test_an_alarm_may_stop_the_training(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The report of step 2 is complete, and in the history, in the fourth step."""
    memory = MemorySink()
    rules = [lambda path, reading: path == "net.3" and len(memory.reports) == 1]
    callback = DivergenceTrainerCallback(2, sinks=[memory], alarms=rules, on_alarm="stop")
    trainer = make(callback)
    trainer.train()
    assert trainer.state.global_step == 4
    assert [len(report.alarms) for report in memory.reports] == [0, 1]
    assert [record.get("adiv.summary/alarms") for record in logged(trainer).values()] == [None, 1]
    (line,) = [r for r in caplog.records if "training stops" in r.getMessage()]
    assert (line.name, line.levelname) == ("adiv_monitor", "WARNING")
    assert line.getMessage().startswith("adiv-monitor: training stops: step 2: net.3: ")
    assert no_hooks(trainer.model, trainer.optimizer.optimizer)


# Outputs of the reports


class Logs(Trainer):
    """A trainer that logs how many steps there were since it last logged, as means are logged."""

    steps = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.steps += 1
        return super().training_step(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any) -> None:
        super().log({**logs, "steps": self.steps}, *args)
        self.steps = 0


def test_the_history_holds_every_reports_summary(make: Make) -> None:
    callback = DivergenceTrainerCallback(3, on_error="raise")
    trainer = make(callback, kind=Logs, logging_steps=2)
    trainer.train()
    reports = {report.step + 1: report for report in callback.monitor.reports}
    records = logged(trainer)
    assert list(records) == list(reports) == [1, 4, 7]
    for step, report in reports.items():
        record = dict(records[step])
        epoch = record.pop("epoch")
        assert epoch == pytest.approx(step / STEPS)
        expected = summary_scalars(report, DEFAULT_MEASURES)
        assert expected["adiv.summary/coverage"] == 1.0
        assert record == {**expected, "step": step}
    own = [(r["step"], r["steps"]) for r in trainer.state.log_history if "loss" in r]
    assert own == [(2, 2), (4, 2), (6, 2), (8, 2)]
    assert "train_runtime" in trainer.state.log_history[-1]


@pytest.mark.parametrize("strategy", ["no", "epoch"])
def test_an_interval_that_is_none_is_refused(make: Make, strategy: str) -> None:
    trainer = make(DivergenceTrainerCallback(), logging_strategy=strategy)
    with pytest.raises(ValueError, match=rf"logging_strategy='{strategy}'.*every_n_steps=1"):
        trainer.train()


def test_tensorboard_gets_layers_and_pictures(make: Make, tmp_path: Path) -> None:
    board = tmp_path / "board"
    writer = SummaryWriter(str(board))
    callback = DivergenceTrainerCallback(7, scalars="all", on_error="raise")
    make(TensorBoardCallback(writer), callback, logging_steps=4).train()
    (file,) = board.iterdir()  # a second writer would start after the Trainer closed the first
    found = EventAccumulator(str(file)).Reload()
    scalars = found.Tags()["scalars"]
    assert {"adiv.update_cosine/net.0", "adiv.summary/scale_cv_max", "train/loss"} <= set(scalars)
    assert "adiv/overview" in found.Tags()["images"]
    assert found.Images("adiv/overview")[-1].step == 7, "the last one before the file is closed"
    assert [event.step for event in found.Scalars("adiv.scale_mean/net.0")] == [0, 7]


def test_only_the_first_process_writes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "is_world_process_zero", lambda self: False)
    assert not train(make)


# Early stopping and the best checkpoint

FOLLOWED = "adiv.summary/update_cosine_min"


def followed(**options: Any) -> dict[str, Any]:
    """Return arguments to evaluate and save every second step, by the monitor's metric."""
    return {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "metric_for_best_model": FOLLOWED,
        "load_best_model_at_end": True,
        **options,
    }


class Look(TrainerCallback):
    """A callback that records the metrics of each evaluation."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(kwargs["metrics"][f"eval_{FOLLOWED}"])


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("name", [FOLLOWED, f"eval_{FOLLOWED}"])
def test_the_best_checkpoint_is_that_of_the_metric(make: Make, name: str) -> None:
    trainer = make(
        DivergenceTrainerCallback(1, on_error="raise"), **followed(metric_for_best_model=name)
    )
    trainer.train()
    values = {step: record[FOLLOWED] for step, record in logged(trainer).items() if step % 2 == 0}
    best = max(values, key=lambda step: values[step])
    assert trainer.state.best_global_step == best
    assert trainer.state.best_metric == values[best]


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize(
    "measure", ["update_cosin", "bias_share", "attainable_cosine", "attention_cosine"]
)
def test_a_metric_that_will_not_be_there_is_refused(make: Make, measure: str) -> None:
    metric = f"adiv.summary/{measure}_min"
    trainer = make(DivergenceTrainerCallback(1), **followed(metric_for_best_model=metric))
    with pytest.raises(ValueError, match=rf"'{metric}', expected one of {FOLLOWED}"):
        trainer.train()


WORLD = 2


def follow_together(rank: int, folder: str) -> None:
    """Train on one of two ranks that stop together, each by its own Trainer's metric."""
    meet(rank, WORLD, folder)
    as_launched(rank, WORLD)
    memory = MemorySink()
    callback = DivergenceTrainerCallback(1, sinks=[memory], on_error="raise")
    look = Look()
    trainer = trainer_in(Path(folder), callback, look, EarlyStoppingCallback(1), **followed())
    with patient():
        trainer.train()
    own = [summary_scalars(r, DEFAULT_MEASURES)[FOLLOWED] for r in callback.monitor.reports]
    found = {"seen": look.seen, "own": own, "steps": trainer.state.global_step}
    found["notes"] = [report.notes for report in callback.monitor.reports]
    written = {"sink": len(memory.reports), "history": len(logged(trainer))}
    torch.save({**found, **written}, Path(folder) / f"{rank}.pt")


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs the gloo backend")
def test_processes_follow_the_first_which_alone_writes(tmp_path: Path) -> None:
    run_in(WORLD, follow_together, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD))
    assert first["notes"] == second["notes"] == [()] * first["steps"], "nobody was too late"
    assert first["own"] == second["own"], "one report for the rows of both"
    assert first["seen"] == second["seen"] == first["own"][1::2]
    assert first["steps"] == second["steps"]
    assert (first["sink"], first["history"]) == (first["steps"], first["steps"])
    assert (second["sink"], second["history"]) == (0, 0)


def by_deepspeed(rank: int, folder: str) -> None:
    """Train on one of two ranks by DeepSpeed's engine: stage 0 alone, with others, and refused."""
    meet(rank, WORLD, folder)
    as_launched(rank, WORLD)
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first

    def train(*callbacks: Any, stage: int = 0, bf16: bool = False) -> list[Any]:
        AcceleratorState._reset_state(reset_partial_state=True)
        engine = {"train_micro_batch_size_per_gpu": SIZE, "gradient_accumulation_steps": 2}
        engine |= {"zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}}
        engine |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        alike = {"max_steps": 2, "logging_steps": 1, "gradient_accumulation_steps": 2}
        trainer = trainer_in(Path(folder), *callbacks, deepspeed=engine, bf16=bf16, **alike)
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        return [*map(torch.tensor, losses), *trainer.model.parameters(), torch.get_rng_state()]

    memory = MemorySink()
    with patient():
        ours = train(DivergenceTrainerCallback(1, sinks=[memory], on_error="raise"))
    plain = train()
    assert len(ours) == len(plain) > 2 and all(map(torch.equal, ours, plain))
    assert [report.step for report in memory.reports] == ([0, 1] if rank == 0 else [])
    for report in memory.reports:
        assert (report.coverage, report.unsupported, report.notes) == (1.0, {}, ())
        assert report.layers["net.0"].rows_total == WORLD * 2 * SIZE
    for stage, bf16 in ((0, True), (1, False), (2, True), (3, False)):
        with pytest.raises(TypeError, match=r"a DeepSpeedOptimizerWrapper.* stage 0 in float32"):
            train(DivergenceTrainerCallback(1), stage=stage, bf16=bf16)
    (Path(folder) / f"done.{rank}").touch()


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs the gloo backend")
def test_deepspeed_is_measured_where_it_steps_the_parameters_themselves(tmp_path: Path) -> None:
    """In stage 0 with float32; else it steps copies, and is refused by name."""
    pytest.importorskip("deepspeed", reason="pip install deepspeed")
    run_in(WORLD, by_deepspeed, str(tmp_path))
    assert len([*tmp_path.glob("done.*")]) == WORLD


# Checkpoints


def test_a_resumed_training_counts_on(make: Make, tmp_path: Path) -> None:
    make(DivergenceTrainerCallback(3), save_strategy="steps", save_steps=4, max_steps=4).train()
    memory = MemorySink()
    callback = DivergenceTrainerCallback(3, sinks=[memory], on_error="raise")
    trainer = make(callback)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert [report.step for report in memory.reports] == [4, 6]
    assert list(logged(trainer)) == [1, 5, 7], "step 3 was not complete when it was saved"
    assert callback.monitor.step == STEPS


# Every end of a training


class Failing(Trainer):
    """A model that fails in the third batch, in or around its forward, or in an evaluation."""

    where: str

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self.fail("data", self.state.global_step == 3)
        return super().get_batch_samples(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.fail("batch", self.state.global_step == 3)
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.fail("evaluation", self.state.global_step == 3)
        return super().evaluation_loop(*args, **kwargs)

    def fail(self, where: str, now: bool) -> None:
        if where == self.where and now:
            assert not no_hooks(self.model, self.optimizer.optimizer), (
                "there was something to remove"
            )
            raise KeyboardInterrupt


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("where", ["data", "batch", "evaluation"])
def test_nothing_stays_on_the_model_when_training_fails(make: Make, where: str) -> None:
    memory = MemorySink()
    callback = DivergenceTrainerCallback(1, sinks=[memory], on_error="raise")
    trainer = make(callback, kind=Failing, eval_strategy="steps", eval_steps=3)
    trainer.where = where
    before = set(vars(trainer))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert no_hooks(trainer.model, trainer.optimizer.optimizer)
    assert [report.step for report in memory.reports] == [0, 1, 2], "none is lost"
    assert not (set(vars(trainer)) - before) & {"training_step", "evaluate", "get_batch_samples"}
    trainer.where = ""
    trainer.train()
    assert [report.step for report in memory.reports[3:]] == [*range(STEPS)]
    assert no_hooks(trainer.model, trainer.optimizer.optimizer)


class Raise(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of luck")


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False])
def test_after_other_failures_the_next_training_or_close_tidies_up(make: Make, again: bool) -> None:
    callback = DivergenceTrainerCallback(1, on_error="raise")
    trainer = make(callback, Raise())
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.train()
    assert not no_hooks(trainer.model, trainer.optimizer.optimizer)
    if again:
        trainer.remove_callback(Raise)
        trainer.train()
    callback.close()
    assert no_hooks(trainer.model, trainer.optimizer.optimizer)
    assert not set(vars(trainer)) & {"training_step", "evaluate", "get_batch_samples"}
    assert list(logged(trainer)) == ([*range(1, STEPS + 1)] if again else [1])
    assert callback.monitor.latest.step == (STEPS - 1 if again else 0)


# Without transformers


@pytest.mark.parametrize("missing", ["transformers", "accelerate.utils"])
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delitem(sys.modules, "adiv_monitor.huggingface")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r'pip install "adiv-monitor\[huggingface\]"'):
        importlib.import_module("adiv_monitor.huggingface")
