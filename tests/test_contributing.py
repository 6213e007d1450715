"""What CONTRIBUTING.md and the metadata for hosting services say agrees with the code."""

import re
from pathlib import Path

import blocks
import example_reports
import pytest
from blocks import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import adiv_monitor
from adiv_monitor import sinks
from adiv_monitor.report import StepReport

PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def test_a_sink(tmp_path: Path) -> None:
    page = tmp_path / "section.md"
    page.write_text(PAGE.partition("\n## A sink\n")[2].partition("\n## ")[0])
    made = {**vars(sinks), **vars(example_reports), "Path": Path, "StepReport": StepReport}
    blocks.run(page, made)
    made["test_every_layer_has_a_line_per_report"](tmp_path)


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
