"""The recipes of CONTRIBUTING.md work; metadata for hosting services agrees with the code."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import blocks
import example_reports
import function_cases
import numpy as np
import pytest
import torch
from blocks import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import adiv_monitor
from adiv_monitor import sinks
from adiv_monitor.diagnosis.faults import FAULTS, RULES, optimizer, units
from adiv_monitor.features import uses
from adiv_monitor.features.functions import products
from adiv_monitor.maths import measures
from adiv_monitor.maths.estimates import Estimate, Sample, over_rows
from adiv_monitor.report import StepReport

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}


def run(section: str, tmp_path: Path, namespace: dict[str, Any]) -> dict[str, Any]:
    """Run the code blocks of a section, given the names of the files that they belong to."""
    page = tmp_path / "section.md"
    page.write_text(SECTIONS[section])
    assert blocks.python_blocks(page)
    blocks.run(page, namespace)
    return namespace


def loaded(file: str) -> Any:
    """Load a test file as a module of its own."""
    spec = spec_from_file_location(f"of_{Path(file).stem}", ROOT / "tests" / file)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_operators_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "_RULES", dict(uses._RULES))
    monkeypatch.setattr(function_cases, "CASES", {})
    tests = loaded("monitor/test_functions.py")
    run("An operator's rule", tmp_path, {**vars(function_cases), **vars(products)})
    monkeypatch.setattr(tests, "CASES", function_cases.CASES)
    assert set(function_cases.CASES) == {"vecdot"}
    tests.test_every_measure("vecdot", "adamw", 1)
    tests.test_what_is_exact_stays_so_when_rows_are_sampled("vecdot")
    tests.test_rows_move_with_the_parameters_by_these_features("vecdot")
    uses._RULES.pop("linalg_vecdot")
    with pytest.raises(AssertionError):
        tests.test_rows_move_with_the_parameters_by_these_features("vecdot")


def test_a_measure(tmp_path: Path) -> None:
    d, G = torch.randn(2, 5, 3, dtype=torch.float64)
    rows = Sample(np.array([5.0]), np.ones((1, 5), dtype=bool))
    d_d, G_G = (over_rows(v.square().sum(1).numpy()[None], rows) for v in (d, G))
    ours = ModuleType("measures")
    layers = SimpleNamespace(known_unit=np.array([True]), sample=rows)
    vars(ours)["update_gain"] = lambda *sums: made["update_gain"](*sums)
    made: dict[str, Any] = {**vars(measures), "d": d, "G": G, "whole": {}, "found": {}}
    made |= {"measures": ours, "x": layers, "d_d": d_d, "G_G": G_G, "Estimate": Estimate}
    run("A measure", tmp_path, made)
    (value,) = made["found"]["update_gain"].value
    assert value == pytest.approx(float(made["whole"]["update_gain"]), rel=1e-12)


def test_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = loaded("audit/test_diagnosis.py")
    for name in ("HITS", "NEAR_MISSES", "WITHIN_ERRORS"):
        monkeypatch.setattr(tests, name, dict(getattr(tests, name)))
    known = {*FAULTS}, {*RULES}
    try:
        run("A finding", tmp_path, {**vars(units), **vars(optimizer), **vars(tests)})
        for name in ("harmed-rows", "tiny-batches"):
            tests.test_a_fault_is_named_first_and_to_be_acted_on(name)
            tests.test_what_is_near_is_no_hit(name)
            assert name not in tests.found(tests.record())
        tests.test_what_lies_within_errors_is_no_hit("harmed-rows")
    finally:
        for registry, before in zip((FAULTS, RULES), known, strict=True):
            for key in {*registry} - before:
                del registry[key]


def test_a_sink(tmp_path: Path) -> None:
    names = {**vars(sinks), **vars(example_reports), "Path": Path, "StepReport": StepReport}
    made = run("A sink", tmp_path, names)
    made["test_every_layer_has_a_line_per_report"](tmp_path)


def test_files_that_are_named_are_there() -> None:
    rooms = ("", "adiv_monitor/", "adiv_monitor/features/functions/", "tests/monitor/")
    rooms += ("adiv_monitor/audit/", "adiv_monitor/diagnosis/", "adiv_monitor/diagnosis/faults/")
    named = set(re.findall(r"`((?:[\w.]+/)*[\w.]+(?:\.py|\.md|\.yml|\.cff|/))`", PAGE))
    assert len(named) > 20
    to_be_made = {"adiv_monitor/sinks/NAME.py", "docs/findings/harmed-rows.md", "dist/", "site/"}
    missing = {n for n in named if not any((ROOT / room / n).exists() for room in rooms)}
    assert missing <= to_be_made


# Metadata for hosting services


def test_the_citation_is_of_this_version() -> None:
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(cited["version"]) == adiv_monitor.__version__
    assert cited["references"][0]["identifiers"][0]["value"] == "arXiv:2512.22247"


def ranges() -> dict[str, SpecifierSet]:
    """Return the version ranges in pyproject.toml by package."""
    text = (ROOT / "pyproject.toml").read_text()
    text = re.sub(
        r"#.*", "", text[text.index("\ndependencies") : text.index("\n[project.scripts]")]
    )
    named: dict[str, SpecifierSet] = {}
    for found in re.findall(r'"([^"]+)"', text):
        requirement = Requirement(found)
        known = named.get(canonicalize_name(requirement.name), SpecifierSet())
        named[canonicalize_name(requirement.name)] = known & requirement.specifier
    return named


@pytest.mark.parametrize("file", sorted((ROOT / "constraints").glob("*.txt")), ids=lambda f: f.stem)
def test_what_is_installed_is_what_is_allowed(file: Path) -> None:
    """Constraint files pin one version per package for all platforms, within the allowed ranges."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, version in (x.split("==") for x in lines)}
    assert len(pins) == len(lines)
    assert not [line for line in lines if "+" in line]  # builds for one kind of device
    allowed = ranges()
    for name, version in pins.items():
        assert version in allowed.get(name, SpecifierSet()), name
    if file.stem == "lowest":
        lower = {n: s for n, r in allowed.items() for s in r if s.operator == ">="}
        assert {n: s.version for n, s in lower.items() if n in pins} == pins
    else:
        optional = {"adiv-monitor", "mutmut", "backpack-for-pytorch", "trackio", "trl"}
        assert allowed.keys() - pins.keys() <= optional
