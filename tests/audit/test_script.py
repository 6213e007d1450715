"""Scripts that users name: what is loaded of them, what runs, and what the audit says of it."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from adiv_monitor.audit.command.cli import main
from adiv_monitor.audit.command.code import UsageError, imported, steps_of, watched
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.record import Record

pytestmark = pytest.mark.filterwarnings("default")  # of what draws the page
for package in ("rich", "yaml", "jinja2", "matplotlib", "tensorboard"):
    pytest.importorskip(package)

Write = Callable[[str, str], None]
Read = pytest.CaptureFixture[str]

MODEL = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

model = Net()
"""
DATA = """
x = torch.randn(40, 4)
samples = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(
    [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}],
    lr=0.2, momentum=0.5,
)
"""
STEPS = """
def step():
    optimizer.zero_grad()
    criterion(model(x), x[:, :3].argmax(1)).backward()
    optimizer.step()

"""
TRAIN = "for _ in range(5): step()\n"
SAVE = "torch.save(model.state_dict(), 'best.pt')\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a file into the working folder; what is imported from there is forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def written(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        monkeypatch.delitem(sys.modules, path.stem, raising=False)  # of another test's folder

    yield written
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def run(*argv: str) -> int:
    return main([*argv, "--input-shape", "4", "--steps", "3", "--no-try", "--out", "out"])


def made() -> Record:
    return AuditReport.from_json(Path("out/report.json").read_text()).record


# What is refused


@pytest.mark.parametrize(
    "ending",
    [
        TRAIN + SAVE,
        f"try:\n    {TRAIN}except BaseException:\n    raise KeyError\n",
        "def build():\n    step()\n    return model\n",
    ],
)
def test_a_script_that_trains_is_refused_at_its_first_step(
    ending: str, write: Write, capsys: Read
) -> None:
    write("best.pt", "of a long run")
    write("train.py", MODEL + DATA + STEPS + ending)
    save = torch.save
    assert run("train:build" if "build" in ending else "train:model") == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "train.py:22 takes an optimizer step" in told[0]
    assert "--run-script" in told[0]
    assert Path("best.pt").read_text() == "of a long run"
    assert torch.save is save and not torch_optimizer._global_optimizer_pre_hooks


@pytest.mark.parametrize(
    "saves",
    [
        "from torch import save\nsave(obj=1, f='best.pt')\n",
        "from safetensors.torch import save_file\nsave_file(model.state_dict(), 'best.pt')\n",
    ],
)
def test_a_script_that_overwrites_a_file_is_refused(saves: str, write: Write, capsys: Read) -> None:
    pytest.importorskip("safetensors")
    write("best.pt", "of a long run")
    write("train.py", MODEL + saves)
    assert run("train:model") == 2
    told = capsys.readouterr().err
    assert "train.py:11 writes over best.pt" in told and "--run-script" in told
    assert Path("best.pt").read_text() == "of a long run"


def test_what_writes_new_files_and_elsewhere_is_not_refused(
    write: Write, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("cache") / "cached.pt"
    elsewhere.write_text("old")
    write("train.py", MODEL + SAVE + f"torch.save(1, {str(elsewhere)!r})\nsave = torch.save\n")
    with watched(may_train=False) as ran:
        train = import_module("train")
    assert steps_of(ran, train.model) == 0
    assert Path("best.pt").stat().st_size > 0 and torch.load(elsewhere) == 1
    train.save(2, "best.pt")  # later, it is torch's
    assert torch.load("best.pt") == 2


# What runs


def test_a_script_that_may_run_gives_trained_weights(write: Write, capsys: Read) -> None:
    write("best.pt", "of a long run")
    write("train.py", MODEL + DATA + STEPS + TRAIN + SAVE)
    assert run("train:model", "--run-script") == 0
    said = "weights have been trained: 5 steps during import"
    assert said in capsys.readouterr().out.splitlines()[0]
    assert made().facts.trained == said
    assert torch.load("best.pt").keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_weights_are_trained_if_they_are_those_that_the_steps_moved(write: Write) -> None:
    write("train.py", MODEL + DATA + STEPS + TRAIN)
    with watched(may_train=True) as ran:
        train = import_module("train")
    assert steps_of(ran, train.model) == 5
    assert steps_of(ran, train.Net()) == 0  # made anew
    train.step()
    assert steps_of(ran, train.model) == 5, "no longer watched"


# What is accepted


def test_an_optimizer_a_loss_and_a_data_set_that_exist_are_used(write: Write, capsys: Read) -> None:
    write("train.py", MODEL + DATA)
    names = ("--data", "train.py:samples", "--loss", "train.py:criterion")
    assert run("train.py:model", *names, "--optimizer", "train.py:optimizer") == 0
    assert made().reports[0].learning_rates == (0.02, 0.2)
    assert made().facts.settings["momentum"] == 0.5 and made().facts.batch_size == 16
    assert any("in batches of 16 (--batch-size)" in note for note in made().notes)
    assert capsys.readouterr().out.splitlines()[0] == (
        "train.py:model (Net) · real data (train.py:samples) · loss train.py:criterion · SGD, "
        "learning rates 0.02 to 0.2"
    )
    assert "\ntrain.Net · real data" in Path("out/report.md").read_text()


def test_an_optimizer_of_another_model_is_told(write: Write, capsys: Read) -> None:
    write("train.py", MODEL + DATA)
    assert run("train:Net", "--optimizer", "train:optimizer") == 2
    assert "holds none of the parameters of Net" in capsys.readouterr().err


def test_files_are_imported_as_in_their_package_or_as_scripts(write: Write) -> None:
    for name in ("pack/__init__.py", "pack/inner/__init__.py"):
        write(name, "")
    write("pack/inner/net.py", "from ..other import size\n")
    write("pack/other.py", "size = 3\n")
    write("scripts/first.py", "from beside import size\n")
    write("scripts/beside.py", "size = 4\n")
    assert imported("pack/inner/net.py:size", "MODEL") == 3
    assert imported("./scripts/first.py:size", "MODEL") == 4


def test_a_script_that_holds_all_below_main_is_told_three_lines(write: Write) -> None:
    write("train.py", 'Model = int\nif __name__ == "__main__":\n    model = 1\n')
    write("plain.py", "net = 1\n")
    with pytest.raises(UsageError, match=r"def model\(\): .*def batches\(\): .*def loss\(output"):
        imported("train:model", "MODEL")
    with pytest.raises(UsageError, match=r"has no attribute 'model'$"):
        imported("plain:model", "MODEL")
