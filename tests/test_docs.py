"""The docs: blocks run, commands are understood, pictures have their scripts, links hold."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import blocks
import pytest
import torch
from audit.browser import chromium
from blocks import ROOT

from adiv_monitor.maths import attention, measures
from adiv_monitor.report import ALIGNMENT_MEASURES, ATTENTION_MEASURES, MEASURES

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "CONTRIBUTING.md"]
MOST_NOT_RUN = 2
# Its blocks need packages and models that `make test` has not: tests/monitor/test_fine_tuning.py.
ELSEWHERE = DOCS / "fine-tuning.md"


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


# Blocks


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process among several that are not there; Accelerate's settings are the process's."""
    accelerate = pytest.importorskip("accelerate.state")
    monkeypatch.chdir(tmp_path)
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 0)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    # What is compiled is not at stake, and a compiler may not be there.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    accelerate.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.GradientState._reset_state()


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p.is_relative_to(DOCS) and p != ELSEWHERE and blocks.python_blocks(p)],
    ids=named,
)
def test_every_block_runs(page: Path) -> None:
    for name in ("pytorch_lightning", "lightning.fabric", "transformers", "scipy"):
        pytest.importorskip(name)
    blocks.run(page, blocks.names())


def test_what_is_not_run_says_why() -> None:
    every = [block for page in PAGES for block in blocks.python_blocks(page)]
    not_run = [block for block in every if block.startswith(blocks.NOT_RUN)]
    assert len(every) >= 20
    assert len(not_run) <= MOST_NOT_RUN
    assert all(len(block.splitlines()[0]) > len(blocks.NOT_RUN) + 10 for block in not_run)


def test_tests_that_pages_name_are_there() -> None:
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"`((?:[\w.]+/)*test_\w+\.py)(?:::(test_\w+))?`", text))
    assert len(named) > 50
    for file, test in named:
        codes = [path.read_text() for path in (ROOT / "tests").rglob(file.removeprefix("tests/"))]
        assert any(not test or f"\ndef {test}(" in code for code in codes), (file, test)


# Commands


def commands() -> list[str]:
    """In blocks for a shell, and those in the text that run a script or a module."""
    found = [command for page in PAGES for command in blocks.commands(page)]
    for page in PAGES:
        found += re.findall(r"`(python (?:-m )?[\w./-]+[^`\n]*)`", page.read_text())
    return sorted(set(found))


@cache
def said(*program: str) -> str:
    """What a program of somebody else's says of itself."""
    away = Path(sys.executable).parent  # from what the repository would have it load
    ran = subprocess.run([*program, "--help"], capture_output=True, text=True, cwd=away)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def beside(name: str) -> str:
    """A program of this environment, or of the machine."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    return found or pytest.skip(f"needs {name}")


def options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]


@pytest.mark.parametrize("command", commands())
def test_every_command_is_one(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program, *words = shlex.split(command)
    if program in ("adiv-audit", "adiv-monitor"):
        monkeypatch.chdir(tmp_path)
        blocks.assert_audits(shlex.join(words), monkeypatch, capsys)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[0] in targets
    elif program == "pip":
        extras = re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        asked = "".join(re.findall(r"\[(.*?)\]", command))
        assert words[0] == "install"
        assert set(filter(None, asked.split(","))) <= set(extras)
    elif command.startswith("python -m pytest"):
        assert all((ROOT / word).exists() for word in words[2:] if word.startswith("tests/"))
        own = (ROOT / "tests" / "conftest.py").read_text()  # options of the project
        assert_understood(words[2:], said(sys.executable, "-m", "pytest") + own)
    elif program == "python":
        is_module = words[0] == "-m"
        run = runpy.run_module if is_module else runpy.run_path
        name = words[1] if is_module else str(ROOT / words[0])
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        monkeypatch.syspath_prepend(str(Path(name).parent))  # as Python does for a script
        if options(words[1 + is_module :]):
            with pytest.raises(SystemExit):  # in this process, which has imported torch already
                run(name, run_name="__main__")
            assert_understood(words[1 + is_module :], capsys.readouterr().out)
        else:
            assert is_module or Path(name).is_file()
    else:
        theirs = beside(program)
        if options(words):  # to ask takes seconds
            assert_understood(words, said(theirs))


def assert_understood(words: list[str], known: str) -> None:
    missing = [o for o in options(words) if not re.search(rf"(?<![\w-]){o}(?![\w-])", known)]
    assert missing == []


# Pictures

SCRIPTS = sorted(DOCS.glob("figures/*.py"))
PICTURES = {
    (picture, command)
    for page in DOCS.rglob("*.md")
    for picture, command in re.findall(
        r"^!\[[^\]]+\]\(\S*?([\w-]+)\.png\)\n\n(.*)$", page.read_text(), re.MULTILINE
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_script_makes_its_pictures(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "sklearn", "torchvision"):
        pytest.importorskip(name)
    monkeypatch.setattr(sys, "argv", [script.name, "--steps", "3", "--out", str(tmp_path)])
    threads = torch.get_num_threads()
    runpy.run_path(str(script), run_name="__main__")
    torch.set_num_threads(threads)
    made = {path.stem for path in tmp_path.glob("*.png") if path.stat().st_size > 5000}
    assert made == {name for name, command in PICTURES if f"/{script.name}" in command}


# Readings


def test_every_measure_is_explained() -> None:
    """Each in the first column of a table; those of attention and of alignment in the text."""
    text = (DOCS / "readings.md").read_text()
    first = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    explained = set()
    for cell in first:
        name, *others = re.findall(r"`(\w+)`", cell)
        stem = name.rpartition("_")[0]
        explained |= {name, *(f"{stem}{o}" if o.startswith("_") else o for o in others)}
    assert set(MEASURES) <= explained
    others = {*ATTENTION_MEASURES, *ALIGNMENT_MEASURES}
    families = ("kappa_", "spectral_")
    assert {n for n in others if f"`{n}`" not in text and not n.startswith(families)} == set()


def test_every_measure_names_its_function() -> None:
    """In the theory, by a link that the strict build follows."""
    theory = "".join(page.read_text() for page in (DOCS / "theory").glob("*.md"))
    for module in (measures, attention):
        functions = {n for n in (*MEASURES, *ATTENTION_MEASURES) if hasattr(module, n)}
        linked = set(re.findall(rf"{re.escape(module.__name__)}\.(\w+)\)", theory))
        assert functions - linked == set()


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: every internal link and anchor is there."""
    if find_spec("mkdocs") is None:
        pytest.skip('needs mkdocs: pip install ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.mark.slow
def test_the_site_is_built_strictly_and_asks_for_nothing(site: Path) -> None:
    """No page loads anything over a network."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    loads = re.compile(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="?(?:https?:)?//[^>]*>')
    assert {tag for page in pages for tag in loads.findall(page.read_text())} == set()
    assert "adiv_monitor.Monitor" in (site / "api" / "monitor.html").read_text()


@pytest.mark.slow
def test_every_formula_is_typeset(site: Path, tmp_path: Path) -> None:
    marked = [page for page in site.rglob("*.html") if 'class="arithmatex"' in page.read_text()]
    assert len(marked) >= 4
    with chromium(tmp_path) as browser:
        for page in marked:
            browser.open(page)
            wrong = browser.texts(".arithmatex:not(:has(.katex-html))")
            assert wrong == [], page
            assert [asked for asked in browser.requests() if asked.startswith("http")] == []
