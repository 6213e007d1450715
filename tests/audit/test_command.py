"""The command, as its user meets it: what it writes, prints and returns."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import FunctionType
from typing import Any

import example_audits
import pytest
import torch
from audit import command_models
from example_reports import report as step_report

from adiv_monitor.audit.command import output
from adiv_monitor.audit.command.cli import CLOSED_PIPE, main
from adiv_monitor.audit.command.code import OF_FILE, UsageError, imported
from adiv_monitor.audit.command.options import Config, load
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.sinks import HtmlSink

HERE = "audit.command_models"
NET = f"{HERE}:net"
SHAPE = ("--input-shape", "5")  # of its samples
FILES = {"report.html", "report.json", "report.md", "config.yaml", "tensorboard"}
Read = pytest.CaptureFixture[str]

pytestmark = pytest.mark.filterwarnings("default")  # of what draws the page
for package in ("rich", "yaml", "jinja2", "matplotlib", "tensorboard"):
    pytest.importorskip(package)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    command_models.calls.clear()
    OF_FILE.set(())


def run(*argv: str) -> int:
    """A short audit; options given again win."""
    return main([argv[0], *SHAPE, "--steps", "4", "--no-try", "--out", "out", *argv[1:]])


def report() -> AuditReport:
    return AuditReport.from_json(Path("out/report.json").read_text())


def everything(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


# What it leaves


def test_it_writes_a_report_that_its_config_makes_again(capsys: Read) -> None:
    weights = {key: value.clone() for key, value in command_models.net.state_dict().items()}
    given = ("--loss", "mse", "--optimizer-args", '{"lr": 1e-2}')
    assert run(NET, *given) == 0
    assert everything("out") == FILES and everything(".") == {"out"}
    assert all(torch.equal(x, weights[k]) for k, x in command_models.net.state_dict().items())
    first, printed = report(), capsys.readouterr().out
    assert len(first.record.losses) == 4 and first.record.facts.data == "random"
    assert any("random" in note for note in first.record.notes)
    assert first.verdict.split()[0] in printed and "out/report.html" in printed
    assert any(name.startswith("events") for name in everything("out/tensorboard"))
    assert main([NET, "--config", "out/config.yaml", "--out", "again"]) == 0
    again = AuditReport.from_json(Path("again/report.json").read_text()).record
    assert again.losses == first.record.losses and again.reports == first.record.reports


def test_options_reach_the_run_and_win_over_the_config() -> None:
    Path("c.yaml").write_text("model: other:net\ninput_shape: 5\nsteps: 2\ntry: false\nout: out\n")
    given = ("--steps", "3", "--clip-norm", "1e-3", "--seed", "7", "--batch-size", "3")
    assert main([NET, "--config", "c.yaml", *given, "--optimizer", "sgd"]) == 0
    facts = report().record.facts
    assert (facts.steps, facts.clip_norm, facts.seed, facts.batch_size) == (3, 1e-3, 7, 3)
    assert facts.optimizer == "SGD" and not report().record.rates


def test_output_that_is_not_read_to_its_end_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reads, writes = os.pipe()
    os.close(reads)  # as `| head` does
    with monkeypatch.context() as patch, os.fdopen(writes, "w") as pipe:
        patch.setattr(sys, "stdout", pipe)
        assert main([NET, *SHAPE, "--steps", "1", "--no-try"]) == CLOSED_PIPE
    assert capfd.readouterr().err == "" and everything("adiv-audit") == FILES


def write(folder: str = "out", force: bool = False) -> None:
    output.check(folder, force=force)
    output.write(example_audits.made_up(["a"], 2), Config(NET, out=folder, force=force))


def test_an_earlier_report_is_replaced_and_other_files_stay() -> None:
    write()
    Path("out/mine.txt").write_text("mine")
    Path("out/report.md").chmod(0o600)
    before = everything("out/tensorboard")
    time.sleep(0.01)
    write()
    assert everything("out") == {*FILES, "mine.txt"}
    assert len(everything("out/tensorboard")) == 1 and everything("out/tensorboard") != before
    assert Path("out/report.md").stat().st_mode & 0o777 == 0o600


FOREIGN = {
    "config.yaml": "mine",
    "report.html": "mine",
    "report.md": "mine",
    "report.json": '{"id":1,"verdict":"mine"}',
    "tensorboard/events.out.tfevents.1.mine": "mine",
    "tensorboard": "mine",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_no_audit_wrote_is_overwritten_by_force_only(name: str, capsys: Read) -> None:
    path = Path("out") / name
    path.parent.mkdir(parents=True)
    path.write_text(FOREIGN[name])
    assert run(NET) == 2
    told = capsys.readouterr().err
    assert f"--out out: holds {name}," in told and "--force" in told
    assert path.read_text() == FOREIGN[name] and not command_models.calls
    output.check("out", force=True)


def test_a_link_to_a_folder_is_not_followed() -> None:
    Path("out").mkdir()
    Path("out/tensorboard").symlink_to(Path.cwd())
    with pytest.raises(UsageError, match="holds tensorboard"):
        output.check("out")


def test_force_leaves_other_files() -> None:
    for name in ("report.md", "mine.txt", "tensorboard/deep/mine"):
        Path("out", name).parent.mkdir(parents=True, exist_ok=True)
        Path("out", name).write_text("mine")
    write(force=True)
    assert Path("out/mine.txt").read_text() == Path("out/tensorboard/deep/mine").read_text()
    assert "mine" not in Path("out/report.md").read_text()
    assert "force" not in load("out/config.yaml"), "nobody forces without knowing it"


def test_the_losses_of_ones_own_run_and_rules_that_hold(capsys: Read) -> None:
    Path("losses.json").write_text(json.dumps([50.0] * 12))
    rules = ("--fail-if", "scale_cv > -1", "--fail-if", "0: scale_mean < 0")
    assert run(NET, "--losses", "losses.json", "--steps", "12", "--try", *rules) == 1
    assert report().record.rates, "fixes were tried"
    assert report().record.own_losses == dict.fromkeys(range(12), 50.0)
    printed = capsys.readouterr().out
    assert "does not train as your run did" in printed.replace("\n", " ")
    assert all(line == line.rstrip() for line in printed.splitlines()), "to be copied"
    told = [line for line in printed.splitlines() if line.startswith("fails")]
    assert [line.split(":")[1].strip() for line in told] == ["0", "2"]


# Comparisons


def test_compare_makes_a_page_anew() -> None:
    schema_2 = str(Path(__file__).parent / "report_of_schema_2.json")
    given = ["compare", schema_2, schema_2, "--out"]
    assert main([*given, "pages/both.html"]) == main([*given, "pages/both.html"]) == 0
    assert "<html" in Path("pages/both.html").read_text()


def test_trainings_are_compared_by_their_pages(capsys: Read) -> None:
    sink = HtmlSink("runs/one.html")
    sink.write(step_report(0))
    sink.close()
    assert main(["compare", "runs/one.html", "runs/one.json", "--out", "both.html"]) == 0
    assert "<html" in Path("both.html").read_text()
    Path("runs/one.json").unlink()
    assert main(["compare", "runs/one.html", "runs/one.html"]) == 2
    assert "'runs/one.json'" in capsys.readouterr().err


# Exit codes


@pytest.mark.parametrize("part", ["model", "--data", "--loss"])
def test_code_that_exits_does_not_end_the_audit_in_silence(part: str, capsys: Read) -> None:
    """Its exit code might say that a rule holds, or that all is well."""
    exits = f"{HERE}:exits"
    assert (run(exits) if part == "model" else run(NET, part, exits)) == 2
    told = capsys.readouterr().err
    assert "command_models.py:" in told and "sys.exit(0)" in told and told.count("\n") == 1
    assert everything(".") == set()


BAD = {
    "no model": ([], "which model?"),
    "no module": (["none.deep:x"], "'none'; modules are found from the current folder"),
    "no shape": ([NET], "give batches with --data module:name, or the shape of one"),
    "no JSON": ([f"{HERE}:mlp", "--model-args", '{"width": '], "as JSON"),
    "batches that don't fit": (
        [NET, "--data", f"{HERE}:pairs"],
        "with shapes (4, 7), (4, 7), (4, 1), raised",
    ),
    "no samples": ([NET, "--data", f"{HERE}:no_samples"], "got an empty tensor in batch 0"),
    "its arguments": ([NET, *SHAPE, "--optimizer-args", '{"rate": 1}'], "'rate'"),
    "rule": ([NET, "--fail-if", "scale_cv ="], "'scale_cv =': expected [LAYERS:] MEASURE"),
    "no checkpoint": ([NET, "--checkpoint", "none.pt"], "it is missing"),
    "file as folder": ([NET, "--out", "file/out"], "can't be written to"),
    "compare no report": (["compare", "file", "file"], "is no report"),
}


@pytest.mark.parametrize(("argv", "told"), BAD.values(), ids=BAD)
def test_bad_usage_is_one_line_and_leaves_nothing(argv: list[str], told: str, capsys: Read) -> None:
    Path("file").write_text("no folder")
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert told in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert printed.err.startswith("adiv-audit: ")
    assert everything(".") == {"file"}


def test_a_fault_of_the_audit_itself_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: Read
) -> None:
    monkeypatch.setattr(sys.modules[main.__module__], "audit", lambda **_: 1 / 0)
    assert run(NET) == 2
    assert "the audit itself failed: ZeroDivisionError" in capsys.readouterr().err
    assert everything(".") == set()


def test_ctrl_c_writes_what_there_is(capsys: Read) -> None:
    assert run(NET, "--loss", f"{HERE}:interrupting", "--steps", "60") == 130
    assert 0 < len(report().record.losses) < 60 and report().record.interrupted
    assert everything("out") == FILES and "interrupted" in capsys.readouterr().err


@pytest.mark.slow
def test_a_users_own_file_from_the_shell() -> None:
    Path("mine.py").write_text("from torch import nn\ndef build(): return nn.Linear(3, 2)\n")
    options = ("--input-shape", "3", "--steps", "3", "--no-try", "--out", "out")
    command = [sys.executable, "-m", "adiv_monitor", "mine:build", *options]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0 and "Traceback" not in ran.stderr
    assert report().record.facts.model.endswith("Linear")


# What a configuration may name


OWN = """
import os
from functools import partial
from os import mkdir
from torch import nn

criterion = nn.MSELoss()
makes = partial(mkdir, "ran")

class Net(nn.Linear): ...

def batches(): ...
"""


@pytest.fixture
def of_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path())
    monkeypatch.delitem(sys.modules, "own", raising=False)
    Path("own.py").write_text(OWN)
    OF_FILE.set(["MODEL"])


OTHERS = (
    *("os:mkdir", "builtins:exec", "own:os.mkdir", "own:mkdir", "own:makes"),
    *("torch:load", "torch.hub:load", "yaml:unsafe_load", "torch.nn:modules.module.torch.load"),
)


@pytest.mark.parametrize("path", OTHERS)
def test_a_configuration_names_no_code_of_others(path: str, of_file: None) -> None:
    with pytest.raises(UsageError, match=r"^--config: .* on the command line: MODEL "):
        imported(path, "MODEL")
    assert callable(imported(path, "--loss")), "which the command line gives"


def test_a_configuration_names_own_code_and_torchs(of_file: None) -> None:
    torchs = ("torch.nn:Linear", "torch.optim:SGD", "torch.nn.functional:mse_loss")
    for path in ("own:Net", "own:batches", "own:criterion", *torchs):
        assert callable(imported(path, "MODEL"))
    pytest.importorskip("torchvision")
    assert isinstance(imported("torchvision.models.googlenet", "MODEL"), FunctionType)


WEIGHTS = "torchvision.models:SqueezeNet1_1_Weights.DEFAULT"
EVIL = {"model_dir": ".", "file_name": "evil.pt"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"model": "os:mkdir", "model_args": {"path": "ran"}}, "--config: os:mkdir"),
        ({"model": "../evil.py:model"}, "--config: ../evil.py:model is code of ../evil.py"),
        ({"checkpoint": "evil.pt", "trust_checkpoint": True}, "--trust-checkpoint"),
        ({"data": "os:getcwd"}, "--data os:getcwd"),
        ({"model": f"{WEIGHTS}.get_state_dict", "model_args": EVIL}, f"--config: {WEIGHTS}"),
    ],
)
def test_a_configuration_runs_no_code(options: dict[str, Any], told: str, capsys: Read) -> None:
    pytest.importorskip("torchvision")
    torch.save({"state_dict": command_models.Evil()}, "evil.pt")
    Path("../evil.py").write_text("open('ran', 'w')")
    known = {"model": "torch.nn:Linear", "model_args": {"in_features": 5, "out_features": 2}}
    Path("c.yaml").write_text(json.dumps(known | {"input_shape": [5]} | options))
    assert main(["--config", "c.yaml"]) == 2
    printed = capsys.readouterr().err
    assert told in printed and printed.count("\n") == 1
    assert everything(".") == {"c.yaml", "evil.pt"}
