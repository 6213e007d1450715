"""What users get: the wheel's names, working docstrings, no import that they did not ask for."""

import doctest
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import adiv_layers
import pytest

import adiv_monitor

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a source archive, and of the wheel that was made from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_the_wheel_installs_two_packages_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
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
    assert b"adiv-monitor = adiv_monitor.audit.command.cli:main" in scripts
    page = Path("adiv_monitor/pages")
    parts = [*ROOT.glob(f"{page}/templates/*"), *ROOT.glob(f"{page}/assets/*")]
    assert len(parts) > 3
    assert {str(part.relative_to(ROOT)) for part in parts} <= set(names)


@pytest.mark.slow
def test_the_metadata_of_the_wheel(built: Path) -> None:
    """Its classifiers are known ones, with every Python that hosts test."""
    known = pytest.importorskip("trove_classifiers").classifiers
    (wheel,) = built.glob("*.whl")
    info = f"adiv_monitor-{adiv_monitor.__version__}.dist-info"
    said = Parser().parsestr(zipfile.ZipFile(wheel).read(f"{info}/METADATA").decode())
    classifiers = said.get_all("Classifier", [])
    assert set(classifiers) <= known
    pythons = {file.stem.removeprefix("python") for file in ROOT.glob("constraints/python*.txt")}
    assert {f"Programming Language :: Python :: {python}" for python in pythons} <= {*classifiers}
    assert said.get_all("Project-URL")
    assert said["License-Expression"] == "Apache-2.0"


@pytest.mark.slow
def test_the_source_archive_has_what_its_tests_need(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"LICENSE", "Makefile", "README.md", "tests/conftest.py", "docs/index.md"} <= names
    assert not any(name.startswith((".venv", "runs", "site")) for name in names)


@pytest.mark.slow
def test_readme_runs_with_what_is_installed(built: Path, tmp_path: Path) -> None:
    """In an environment with the wheel alone, and all other packages as they are here."""
    for package in ("pytorch_lightning", "transformers", "tensorboard"):
        pytest.importorskip(package)
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    target = Path(output(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, "--target", target, wheel], check=True)
    # A folder that is named here is searched, but files like this one in it are not read: an
    # editable installation of the checkout does not come with it.
    (target / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    program = (
        f"import sys; sys.path.append({str(ROOT / 'tests')!r})\n"
        "import adiv_layers, adiv_monitor, blocks\n"
        "blocks.run(blocks.ROOT / 'README.md', blocks.names())\n"
        "print(adiv_monitor.__file__, adiv_layers.__file__, sep='\\n')"
    )
    files = output(python, program, cwd=tmp_path).splitlines()[-2:]
    assert all(Path(file).is_relative_to(target) for file in files), files


def output(python: Path, program: str, cwd: Path | None = None) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        [python, "-c", program], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_examples_in_docstrings() -> None:
    tried = 0
    for package in (adiv_monitor, adiv_layers):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            # They need triton or Axolotl, and hold no examples.
            if ".kernels" in found.name or found.name == "adiv_monitor.axolotl":
                continue
            module = importlib.import_module(found.name)
            if ">>>" not in inspect.getsource(module):  # searching for examples takes much longer
                continue
            outcome = doctest.testmod(module)
            assert outcome.failed == 0, found.name
            tried += outcome.attempted
    assert tried >= 10
