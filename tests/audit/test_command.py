"""The command, as its user meets it: what it writes, prints and returns."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from audit import command_models

from adiv_monitor.audit.command.cli import main
from adiv_monitor.audit.command.terminal import CLOSED_PIPE
from adiv_monitor.audit.options.config import Config, load
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.audit.sources.imported import imported, of_file
from adiv_monitor.diagnosis.record import Record

HERE = "audit.command_models"
NET = f"{HERE}:net"
SHAPE = ("--input-shape", "5")  # of its samples
FILES = {"report.html", "report.json", "report.md", "config.yaml", "tensorboard"}

pytestmark = pytest.mark.filterwarnings("default")  # of what draws the page
for package in ("rich", "yaml", "jinja2", "matplotlib", "tensorboard"):
    pytest.importorskip(package)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    command_models.calls.clear()


def run(*argv: str) -> int:
    """A short audit; options given again win."""
    return main([argv[0], *SHAPE, "--steps", "4", "--no-try", "--out", "out", *argv[1:]])


def report() -> AuditReport:
    return AuditReport.from_json(Path("out/report.json").read_text())


def everything(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The record of a run without options."""
    folder = tmp_path_factory.mktemp("usual")
    assert run(NET, "--out", str(folder / "out")) == 0
    return AuditReport.from_json((folder / "out/report.json").read_text()).record


# What it leaves


def test_it_writes_report_config_and_tensorboard(capsys: pytest.CaptureFixture[str]) -> None:
    weights = {key: value.clone() for key, value in command_models.net.state_dict().items()}
    assert run(NET, "--realised") == 0
    assert everything(Path("out")) == FILES and everything(Path()) == {"out"}
    made = report()
    assert made.record.facts.steps == 4 and len(made.record.losses) == 4
    assert any("random" in note for note in made.record.notes)
    assert made.record.reports[0].layers["0"].realised_cosine is not None
    assert any(file.name.startswith("events") for file in Path("out/tensorboard").iterdir())
    printed = capsys.readouterr().out
    assert (
        made.verdict.split()[0] in printed and "update" in printed and "out/report.html" in printed
    )
    after = command_models.net.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in weights.items())


def test_help_that_is_not_read_to_its_end_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    reads, writes = os.pipe()
    os.close(reads)  # as `| head` does
    with monkeypatch.context() as patch, os.fdopen(writes, "w") as pipe:
        patch.setattr(sys, "stdout", pipe)
        assert main(["--help"]) == CLOSED_PIPE
    assert capfd.readouterr().err == ""


def test_a_report_that_is_not_read_to_its_end_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with monkeypatch.context() as patch, os.fdopen(writes, "w") as pipe:
        patch.setattr(sys, "stdout", pipe)
        assert run(NET, "--fail-if", "scale_cv > -1") == CLOSED_PIPE  # 1: a rule holds
    assert everything(Path("out")) == FILES


def test_the_written_config_makes_the_same_run_again() -> None:
    options = ("--input-shape", "64", "--loss", "mse", "--optimizer-args", '{"lr": 1e-2}')
    assert run(f"{HERE}:mlp", *options) == 0
    first = report().record
    config = Config(**load("out/config.yaml"))
    assert (config.input_shape, config.loss, config.device) == ((64,), "mse", "cpu")
    assert main([f"{HERE}:mlp", "--config", "out/config.yaml", "--out", "again"]) == 0
    again = AuditReport.from_json(Path("again/report.json").read_text()).record
    assert again.losses == first.losses and again.reports == first.reports


def test_the_command_line_wins_over_the_config() -> None:
    Path("c.yaml").write_text("model: other:net\ninput_shape: 5\nsteps: 2\ntry: false\nout: out\n")
    assert main([NET, "--config", "c.yaml", "--steps", "3"]) == 0
    assert report().record.facts.steps == 3


@pytest.mark.slow
def test_an_earlier_report_is_replaced_and_other_files_stay() -> None:
    assert run(NET) == 0
    Path("out/mine.txt").write_text("mine")
    before = everything(Path("out/tensorboard"))
    time.sleep(0.01)
    assert run(NET, "--steps", "3") == 0
    assert report().record.facts.steps == 3
    assert everything(Path("out")) == {*FILES, "mine.txt"}
    assert len(everything(Path("out/tensorboard"))) == len(before)


FOREIGN = (
    "config.yaml",
    "report.json",
    "report.html",
    "report.md",
    "tensorboard/events.out.tfevents.1.mine",
)


@pytest.mark.parametrize("name", FOREIGN)
def test_what_no_audit_wrote_is_not_overwritten(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("out") / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert run(NET) == 2
    told = capsys.readouterr().err
    assert f"--out out: holds {name}," in told and "--force" in told
    assert [p.read_text() for p in Path("out").rglob("*") if p.is_file()] == ["mine"]
    assert not command_models.calls, "it says so before it begins"


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("linked", [False, True])
def test_the_folder_may_be_on_another_file_system(
    linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be moved into it from outside."""
    folder = Path("volume" if linked else "out").absolute()
    folder.mkdir()
    if linked:
        Path("out").symlink_to(folder)
    plain = Path.replace

    def within(made: Path, target: Path) -> Path:
        if folder not in made.resolve().parents:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return plain(made, target)

    monkeypatch.setattr(Path, "replace", within)
    for _ in range(2):
        assert run(NET) == 0
        assert everything(folder) == FILES
        assert everything(Path()) == {"out", folder.name}
    assert Path("out").is_symlink() == linked


FOREIGN_JSON = (
    '{"id":1,"verdict":"mine"}',
    '[{"schema":2,"verdict":"mine"}]',
    '{"schema":"1","verdict":"mine"}',
    '{"schema":2,"name":"","verdict":"mine"}',
)


@pytest.mark.parametrize("text", FOREIGN_JSON)
def test_a_json_file_of_somebody_elses_is_not_overwritten(text: str) -> None:
    Path("out").mkdir()
    Path("out/report.json").write_text(text)
    assert run(NET) == 2
    assert Path("out/report.json").read_text() == text and not command_models.calls


@pytest.mark.slow
def test_an_earlier_audits_files_keep_their_modes() -> None:
    assert run(NET) == 0
    names = ("config.yaml", "report.html", "report.json", "report.md")
    for name in names:
        Path("out", name).chmod(0o600)
    assert run(NET) == 0
    assert {Path("out", name).stat().st_mode & 0o777 for name in names} == {0o600}


@pytest.mark.slow(one_in=2, first=1)
@pytest.mark.parametrize("earlier", [False, True])
def test_force_overwrites_the_files_that_it_writes_and_no_others(earlier: bool) -> None:
    if earlier:
        assert run(NET) == 0
    others = ["mine.txt", "tensorboard/events.out.tfevents.1.mine", "tensorboard/deep/mine"]
    for name in ("config.yaml", "report.json", "report.html", "report.md", *others):
        path = Path("out") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    assert run(NET, "--force") == 0
    assert report().record.losses and load("out/config.yaml")["model"] == NET
    assert [Path("out", name).read_text() for name in others] == ["mine"] * 3
    assert everything(Path("out")) == {*FILES, "mine.txt"}
    assert len(everything(Path("out/tensorboard"))) == 3, "two of mine, and one of this audit"
    assert "force" not in Path("out/config.yaml").read_text(), "nobody forces without knowing it"


@pytest.mark.parametrize("name", ["report.html", "tensorboard"])
@pytest.mark.parametrize("kind", ["pipe", "link to a folder"])
def test_what_is_no_file_is_not_overwritten_by_force_either(
    name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("out") / name
    path.parent.mkdir()
    Path("elsewhere").mkdir()
    Path("elsewhere/mine").write_text("mine")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(Path("elsewhere").absolute())
    before = path.lstat()
    assert run(NET, "--force") == 2
    assert f"--out out: {name} is no" in capsys.readouterr().err
    assert path.lstat() == before and everything(Path("elsewhere")) == {"mine"}


@pytest.mark.slow
def test_a_report_that_was_written_from_python_is_an_audits() -> None:
    assert run(NET) == 0
    report().write("other")
    assert run(NET, "--out", "other") == 0


def test_names_with_html_unicode_and_markup(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{HERE}:hostile_names", "--input-shape", "4") == 0
    assert set(report().record.reports[0].layers) == {
        "<script>alert(1)</script>",
        "日本語 é [red]",
    }
    assert "<script>alert(1)</script>" not in Path("out/report.html").read_text()
    assert "日本語 é [red]" in capsys.readouterr().out


@pytest.mark.slow
def test_the_terminal_shows_some_of_many_layers(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model-args", '{"layers": 80}', "--steps", "1", "--input-shape", "4")
    assert run(f"{HERE}:many", *options) == 0
    assert len(report().record.reports[0].layers) == 80
    printed = capsys.readouterr().out
    assert "64 more layers are in report.html" in printed and len(printed.splitlines()) < 80


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize(
    "options",
    [
        ("--precision", "64-true"),
        ("--precision", "bf16-true"),
        ("--precision", "bf16-mixed"),
        ("--clip-norm", "1e-3"),
        ("--attention",),
        ("--alignment",),
        ("--optimizer", "sgd", "--optimizer-args", '{"lr": 0.1, "momentum": 0.9}'),
        ("--optimizer", f"{HERE}:sgd", "--optimizer-args", '{"lr": 0.1}'),
        ("--loss", f"{HERE}:of_model_and_batch"),
        ("--seed", "7", "--batch-size", "3"),
    ],
)
def test_options_reach_the_run(options: tuple[str, ...], usual: Record) -> None:
    assert run(NET, *options) == 0
    record = report().record
    assert (
        record.facts != usual.facts
        or record.losses != usual.losses
        or options in (("--attention",), ("--alignment",))
    )
    settings = record.facts.settings
    if "--optimizer" in options:
        assert (record.facts.optimizer, settings["lr"]) == ("SGD", 0.1)
    if "--clip-norm" in options:
        assert record.facts.clip_norm == 1e-3
    if "--loss" in options:
        assert "of_model_and_batch" in command_models.calls


def test_the_losses_of_ones_own_run_reach_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    Path("losses.json").write_text(json.dumps([50.0] * 12))
    assert run(NET, "--losses", "losses.json", "--steps", "12") == 0
    assert report().record.own_losses == dict.fromkeys(range(12), 50.0)
    assert "does not train as your run did" in capsys.readouterr().out.replace("\n", " ")
    assert run(NET, "--losses", "none.json") == 2
    assert "--losses none.json: can't be read" in capsys.readouterr().err


def test_fixes_are_tried_unless_switched_off() -> None:
    assert main([NET, *SHAPE, "--steps", "4", "--out", "out"]) == 0
    assert report().record.rates
    assert run(NET) == 0
    assert not report().record.rates


@pytest.mark.slow
def test_compare_makes_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(NET) == 0
    Path("out").rename("before")
    assert run(NET, "--optimizer", "sgd") == 0
    assert main(["compare", "before", "out/report.json", "--out", "pages/both.html"]) == 0
    assert "<html" in Path("pages/both.html").read_text()
    assert everything(Path("pages")) == {"both.html"}
    assert main(["compare", "before", "before", "--out", "same.html"]) == 0
    assert "none differs by more than that." in Path("same.html").read_text()
    earlier = str(Path(__file__).parent / "report_of_schema_2.json")
    assert main(["compare", earlier, "before", "--out", "earlier.html"]) == 0


def test_compare_overwrites_its_own_pages_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(NET) == 0
    given = ["compare", "out", "out", "--out"]
    assert main([*given, "page.html"]) == main([*given, "page.html"]) == 0
    Path("mine.html").write_text("mine")
    for own in ("mine.html", "out/report.html", "out/report.json"):
        before = Path(own).read_text()
        assert main([*given, own]) == 2
        assert "was not written by compare" in capsys.readouterr().err
        assert Path(own).read_text() == before
    assert main([*given, "mine.html", "--force"]) == 0
    assert "<html" in Path("mine.html").read_text()


def test_the_report_names_its_data() -> None:
    assert run(NET) == 0
    assert report().record.facts.data == "random"
    assert "random, batches of" in Path("out/report.md").read_text()
    assert "random" in Path("out/report.html").read_text()


def test_trainings_are_compared_by_their_pages(capsys: pytest.CaptureFixture[str]) -> None:
    from example_reports import report as step_report

    from adiv_monitor.sinks import HtmlSink

    for name in ("one", "two"):
        sink = HtmlSink(f"runs/{name}.html")
        sink.write(step_report(0))
        sink.close()
    assert main(["compare", "runs/one.html", "runs/two.json", "--out", "both.html"]) == 0
    assert "<html" in Path("both.html").read_text()
    capsys.readouterr()
    Path("runs/one.json").unlink()
    assert main(["compare", "runs/one.html", "runs/two.html"]) == 2
    assert "can't read runs/one.json" in capsys.readouterr().err


def test_the_monitors_command_audits_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--steps"]) == 2
    assert "expected one argument" in capsys.readouterr().err


# Exit codes


def test_rules_that_hold_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    rules = ("--fail-if", "scale_cv > -1", "--fail-if", "0: scale_mean < 0")
    assert run(NET, *rules) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fails")]
    assert [line.split(":")[1].strip() for line in told] == ["0", "2"]
    assert all("(step 3)" in line for line in told) and everything(Path("out")) == FILES
    assert run(NET, "--fail-if", "scale_cv < -1") == 0


def test_a_rule_that_can_not_hold_anywhere_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(NET, "--fail-if", "enc*: scale_cv > 1") == 2
    assert "'enc*' matches no layer; there are 0, 2" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["model", "--data", "--loss"])
def test_code_that_exits_does_not_end_the_audit_in_silence(
    part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its exit code might say that a rule holds, or that all is well."""
    exits = f"{HERE}:exits"
    assert (run(exits) if part == "model" else run(NET, part, exits, "--fail-if", "act")) == 2
    told = capsys.readouterr().err
    assert "command_models.py:" in told and "sys.exit(0)" in told and told.count("\n") == 1
    assert everything(Path()) == set()


def test_code_that_parses_arguments_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["adiv-audit", "model", "--steps", "4"])
    assert run(f"{HERE}:by_arguments") == 0
    assert sys.argv == ["adiv-audit", "model", "--steps", "4"]


BAD = {
    "no model": ([], "which model?"),
    "unknown option": ([NET, "--nonsense", "3"], "see adiv-audit --help"),
    "no value": ([NET, "--steps"], "expected one argument"),
    "missing module": (["no_such_module:x"], "there is no module"),
    "missing attribute": ([f"{HERE}:nott"], "has no 'nott'"),
    "no module": ([f"{HERE}:no_module"], "expected a torch.nn.Module"),
    "no layers": (["torch.nn:Identity"], "no parameters"),
    "too deep": (
        [f"{HERE}:deep", *SHAPE, "--model-args", '{"levels": 10000}'],
        "nested too deeply",
    ),
    "no shape": ([NET], "give batches with --data package.module:name, or the shape of one"),
    "no JSON": ([f"{HERE}:mlp", "--model-args", '{"width": '], "as JSON"),
    "wrong shape": ([NET, "--input-shape", "3,4"], "can't take it"),
    "other targets": (
        [f"{HERE}:TwoInputs", "--data", f"{HERE}:pairs", "--loss", "cross_entropy"],
        "tells no classes apart",
    ),
    "batches that don't fit": ([NET, "--data", f"{HERE}:pairs"], "on the first batch raised"),
    "no samples": (
        [NET, "--data", f"{HERE}:no_samples", "--loss", "cross_entropy"],
        "has no samples",
    ),
    "NaN": ([f"{HERE}:TwoInputs", "--data", f"{HERE}:nan_pairs"], "are NaN"),
    "optimizer": ([NET, "--optimizer", "sgdd"], "there is none of that name"),
    "its arguments": ([NET, *SHAPE, "--optimizer-args", '{"rate": 1}'], "'rate'"),
    "no steps": ([NET, "--steps", "0"], "at least 1"),
    "no such device": ([NET, "--device", "xpu:7"], "can't be used here"),
    "no device": ([NET, "--device", "toaster"], "can't be used here"),
    "rule": ([NET, "--fail-if", "scale_cv ="], "expected [LAYERS:] MEASURE > NUMBER"),
    "rule of what is not measured": (
        [NET, "--fail-if", "realised_cosine < 0"],
        "realised_cosine needs --realised",
    ),
    "no checkpoint": ([NET, "--checkpoint", "none.pt"], "there is no such file"),
    "no config": (["--config", "none.yaml"], "can't be read"),
    "file in the way": ([NET, "--out", "file/out"], "can't be written to"),
    "file as folder": ([NET, "--out", "file"], "can't be written to"),
    "losses": ([NET, *SHAPE, "--losses", "losses.json"], "got 'x', expected a number"),
    "compare nothing": (["compare", "a", "b"], "can't read"),
    "compare no report": (["compare", "file", "file"], "is no report"),
    "compare one": (["compare", "file"], "required"),
}


@pytest.mark.parametrize(("argv", "told"), BAD.values(), ids=BAD)
def test_bad_usage_is_one_line_and_leaves_nothing(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("no folder")
    Path("losses.json").write_text('[1.5, "x"]')
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert told in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert printed.err.startswith("adiv-audit: ")
    assert everything(Path()) == {"file", "losses.json"}
    assert Path("file").read_text() == "no folder"


def test_a_malicious_checkpoint_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, ("evil",))

    torch.save({"0.weight": Evil()}, "evil.pt")
    assert run(NET, "--checkpoint", "evil.pt") == 2
    assert "running code" in capsys.readouterr().err
    assert everything(Path()) == {"evil.pt"}


def test_a_fault_of_the_audit_itself_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("here")

    monkeypatch.setattr(sys.modules["adiv_monitor.audit.command.cli"], "audit", fails)
    assert run(NET) == 2
    assert "the audit itself failed: ZeroDivisionError: here" in capsys.readouterr().err
    assert everything(Path()) == set()


@pytest.mark.parametrize("missing", ["yaml", "tensorboard"])
def test_a_missing_extra_is_told(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert run(NET) == 2
    error = capsys.readouterr().err
    assert f'needs the package {missing}: pip install "adiv-monitor[audit]"' in error
    assert everything(Path()) == set()


def test_ctrl_c_writes_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(NET, "--loss", f"{HERE}:interrupting", "--steps", "60") == 130
    assert 0 < len(report().record.losses) < 60 and report().record.interrupted
    assert everything(Path("out")) == FILES
    assert "interrupted" in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in ("--model-args", "--checkpoint", "--fail-if", "--no-try", "--config"):
        assert option in text
    for code in ("0 audited", "1 a --fail-if", "2 the audit was not possible", "130 interrupted"):
        assert code in text


# As a program


def program(*argv: str) -> list[str]:
    return [sys.executable, "-m", "adiv_monitor", *argv]


@pytest.mark.slow
def test_a_users_own_file_from_the_shell() -> None:
    Path("mine.py").write_text(
        "from torch import nn\n\ndef build(width=4):\n"
        "    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))\n"
    )
    command = program(
        "mine:build", "--input-shape", "3", "--steps", "3", "--no-try", "--out", "out"
    )
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    facts = json.loads(Path("out/report.json").read_text())["record"]["facts"]
    assert facts["steps"] == 3 and "Sequential" in facts["model"]
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_sigint_from_the_shell() -> None:
    Path("slow.py").write_text(
        "import time\nfrom pathlib import Path\nfrom torch import nn\n\n"
        "def loss(model, batch):\n    time.sleep(0.05)\n    Path('begun').touch()\n"
        "    return nn.functional.cross_entropy(model(batch[0]), batch[1])\n\n"
        "def build():\n    return nn.Linear(3, 2)\n"
    )
    options = ("--input-shape", "3", "--steps", "1000", "--out", "out")
    command = program("slow:build", "--loss", "slow:loss", *options)
    # What a shell starts in the background is not to hear of the keyboard, nor what that starts.
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as running:
        while not Path("begun").exists() and running.poll() is None:
            time.sleep(0.05)
        time.sleep(1.5)
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=120)
    assert running.returncode == 130, error
    assert "Traceback" not in error and error.startswith("adiv-audit: interrupted")
    if Path("out").exists():  # the key came after the first step
        assert everything(Path("out")) == FILES and report().record.interrupted


def written(**options: object) -> list[str]:
    """Write a configuration, and return the arguments that run it."""
    known = {"model": NET, "input_shape": 5, "steps": 1, "try": False, "out": "out"}
    Path("c.yaml").write_text(json.dumps(known | options))
    return ["--config", "c.yaml"]


class Runs:
    """A pickle that runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


REFUSED: dict[str, dict[str, Any]] = {
    "a function of Python": {"model": "os:mkdir", "model_args": {"path": "ran"}},
    "a builtin": {"model": "builtins:exec", "model_args": {"source": "open('ran', 'w')"}},
    "a module of Python": {"model": "this.s"},
    "a source's name": {"model": "random:seed"},
    "through a module": {"model": "own.os.mkdir", "model_args": {"path": "ran"}},
    "imported by an own file": {"model": "own:mkdir", "model_args": {"path": "ran"}},
    "a partial": {"data": "own:makes"},
    "a function of torch": {"model": "torch:load", "model_args": {"f": "evil.pt"}},
    "a function of torchvision": {"model": "torchvision.io:read_file"},
    "another package": {"model": "yaml:unsafe_load", "model_args": {"stream": "x"}},
    "data": {"data": "os:getcwd"},
    "a loss": {"loss": "os:system"},
    "an optimizer": {"optimizer": "builtins:exec"},
    "trust": {"checkpoint": "evil.pt", "trust_checkpoint": True},
    "a checkpoint of timm": {
        "model": "timm:resnet18",
        "model_args": {"checkpoint_path": "evil.pt"},
    },
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_a_configuration_runs_no_code_of_others(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "torchvision" in options.get("model", ""):
        pytest.importorskip("torchvision")
    monkeypatch.syspath_prepend(Path())
    monkeypatch.delitem(sys.modules, "own", raising=False)
    Path("own.py").write_text(
        "import os\nfrom functools import partial\nfrom os import mkdir\n"
        "from torch import nn\n\n\ndef build():\n    return nn.Linear(5, 2)\n\n\n"
        "makes = partial(mkdir, 'ran')\n"
    )
    torch.save({"state_dict": Runs()}, "evil.pt")
    line = ["--data", "random"] if "data" not in options else ["--loss", "torch.nn:MSELoss"]
    assert main([*written(**{"model": "own:build", **options}), *line]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("adiv-audit: --config: ") and printed.err.count("\n") == 1
    assert "command line" in printed.err
    assert not Path("ran").exists() and not Path("out").exists()


ALLOWED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "functions of the folder": (
        {"model": "mine:build", "data": "mine:batches", "loss": "mine:loss"},
        [],
    ),
    "a class of the folder": (
        {"model": "mine:Net", "data": "mine:batches", "loss": "torch.nn.functional:mse_loss"},
        [],
    ),
    "classes of torch": (
        {
            "model": "torch.nn:Linear",
            "model_args": {"in_features": 4, "out_features": 2},
            "data": "mine:batches",
            "loss": "torch.nn:MSELoss",
            "optimizer": "torch.optim:SGD",
            "optimizer_args": {"lr": 0.1},
        },
        [],
    ),
    "a package of the command line": (
        {"optimizer": f"{HERE}:sgd", "optimizer_args": {"lr": 0.1}},
        [NET],
    ),
}


def test_a_configuration_names_models_of_torchvision() -> None:
    models = pytest.importorskip("torchvision.models")
    with of_file(["MODEL"], ()):
        assert imported("torchvision.models.resnet18", "MODEL") is models.resnet18
        assert imported("torchvision.models:VisionTransformer", "MODEL") is models.VisionTransformer


@pytest.mark.parametrize(("options", "line"), ALLOWED.values(), ids=ALLOWED)
def test_a_configuration_names_code_of_the_folder_and_of_the_command_line(
    options: dict[str, Any], line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path())
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("mine.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(4, 2)\n\n\n"
        "def build():\n    return Net()\n\n\ndef batches():\n"
        "    return [(torch.randn(3, 4), torch.randn(3, 2))]\n\n\n"
        "def loss(output, target):\n    return (output - target).square().mean()\n"
    )
    assert main([*line, *written(**options)]) == 0
    if not line:  # as it is written
        assert main(["--config", "out/config.yaml", "--out", "again"]) == 0
