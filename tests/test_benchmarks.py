"""The benchmarks run, and their counts are right."""

from pathlib import Path
from types import ModuleType

import covered
import host
import larger_faults
import launches
import monitor
import peers
import pictures
import pytest
import rows
import spikes
import torch
from models import TASKS, Trainer


@pytest.mark.parametrize(
    "script",
    [
        rows,
        *(
            pytest.param(script, marks=pytest.mark.slow)
            for script in (host, launches, monitor, peers, pictures)
        ),
    ],
    ids=lambda script: script.__name__,
)
def test_runs_and_writes_what_it_found(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.md"
    threads = torch.get_num_threads()
    script.main(["--quick", "--threads", str(threads), "--write", str(result)])
    text = result.read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    assert f"`python tests/benchmarks/{script.__name__}.py --threads" in text
    assert "| MLP" in text


@pytest.mark.slow
def test_a_fault_in_the_midst_of_a_run_is_found_and_its_twin_is_not_accused(tmp_path: Path) -> None:
    result = tmp_path / "result.md"
    spikes.main(["--quick", "--threads", "1", "--write", str(result)])
    (line,) = (x for x in result.read_text().splitlines() if x.startswith("| label-change"))
    assert "| 1 of 1 | spike:" in line
    assert line.endswith("| none |")


@pytest.mark.slow
def test_bugs_in_larger_networks_are_audited_from_the_command_line(tmp_path: Path) -> None:
    result = tmp_path / "result.md"
    larger_faults.main(["--quick", "--only", "gru", "--write", str(result)])
    assert "| `gru_not_batch_first` | 0.99 M | `sequences` | samples-mixed |" in result.read_text()


def test_one_copy_to_the_host_per_report() -> None:
    task = launches.TASKS["mlp"]
    plain, none = launches.count_task(task)
    measured, layers = launches.count_task(task, {"every_n_steps": 1})
    assert (none, layers) == (0, 4)
    assert plain.copies == {}
    assert measured.copies.total() == 1
    assert measured.places[""] == plain.kernels


def test_says_what_is_covered_and_what_is_not(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("peft")
    result = tmp_path / "models.md"
    covered.main(["--quick", "--threads", str(torch.get_num_threads()), "--write", str(result)])
    models, missing = result.read_text().split("## Not measured")
    assert "| one block called ten times | 1,189 | 100 % | linear 6, layer_norm 2 | " in models
    assert "| function of parameters in a dict | 53 | 0.00 % | " in models
    assert "called ten times" not in missing
    assert "| function of parameters in a dict | `weight` | 40 | " in missing
    assert "none is given" not in missing


def test_a_measured_step_of_small_layers_makes_few_calls() -> None:
    """As `host.py` counts them for 60 × Linear(32): 564 by layer with Python 3.11, torch 2.15."""
    plain, measured = Trainer(TASKS["layers"]), Trainer(TASKS["layers"], {"every_n_steps": 1})
    for trainer in (plain, measured):
        for _ in range(5):
            trainer.step()
    made = (host.calls(measured, 1) - host.calls(plain, 1)) / 60
    measured.close()
    assert 250 < made < 600
