"""What users get: the wheel's names, working docstrings, no import that they did not ask for."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
import zipfile
from pathlib import Path

import adiv_layers

import adiv_monitor

ROOT = Path(__file__).parent.parent


def test_the_wheel_installs_two_packages_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    subprocess.run([*command, ROOT], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {
        "adiv_monitor",
        "adiv_layers",
        f"adiv_monitor-{adiv_monitor.__version__}.dist-info",
    }
    assert {"adiv_monitor/py.typed", "adiv_layers/py.typed"} <= set(names)
    scripts = archive.read(f"adiv_monitor-{adiv_monitor.__version__}.dist-info/entry_points.txt")
    assert b"adiv-audit = adiv_monitor.audit.command.cli:main" in scripts
    assert b"adiv-monitor = adiv_monitor.audit.command.monitor:main" in scripts
    page = Path("adiv_monitor/pages")
    parts = [*ROOT.glob(f"{page}/templates/*"), *ROOT.glob(f"{page}/assets/*")]
    assert len(parts) > 3
    assert {str(part.relative_to(ROOT)) for part in parts} <= set(names)


def test_examples_in_docstrings() -> None:
    tried = 0
    for package in (adiv_monitor, adiv_layers):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".kernels" in found.name:  # needs triton; holds no examples
                continue
            outcome = doctest.testmod(importlib.import_module(found.name))
            assert outcome.failed == 0, found.name
            tried += outcome.attempted
    assert tried >= 10


def test_optional_packages_are_not_imported() -> None:
    """Neither trainers nor sinks' packages nor models come with `import adiv_monitor`."""
    program = (
        "import sys, adiv_monitor, adiv_monitor.sinks, adiv_monitor.features; "
        "heavy = {'rich', 'tensorboard', 'pytorch_lightning', 'lightning', 'triton', 'scipy', "
        "'transformers', 'accelerate', 'torchvision', 'timm', 'peft'}; "
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or None)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
