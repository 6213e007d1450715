"""Mutation testing: which changes of the core does no test notice?

Each operator, number, argument, string and condition in the functions of the core can be changed,
one at a time (mutmut's changes; the words of messages stay as they are). For each change, the tests
listed below for the file run until one fails, in a copy of the project. Mutants that survive are
printed: function, code before and after. Those with a known reason are listed in `mutants.md`, word
for word as printed here, and are then only counted.

A mutant takes five seconds to half a minute, a survivor some minutes. The core has twenty
thousand, so draw a sample: it stays the same as long as the files do. An interrupted run continues
where it stopped, unless the package or its tests have changed since.

    python tests/mutants.py --sample 200                 # of all files together
    python tests/mutants.py adiv_monitor/maths/totals.py # every mutant of one file
"""

import argparse
import ast
import contextlib
import difflib
import gc
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import libcst as cst
import pytest
import torch.distributed.tensor  # noqa: F401  # once: tests run in forks of this process
from libcst import matchers
from libcst.metadata import MetadataWrapper
from mutmut.mutation.file_mutation import Mutation, MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

ROOT = Path(__file__).parent.parent
PLACE = ROOT / ".mutants"
KNOWN = ROOT / "tests" / "mutants.md"
COPIED = ("adiv_monitor", "layers", "tests", "examples", "docs", "README.md", "pyproject.toml")
LONGEST = 600  # seconds: a test that takes longer has noticed a mutant that never ends

# The tests that meet the mutants of a folder, or of a file. Names are of files in tests/monitor, or
# in the folder that they begin with.
TESTS = {
    "adiv_monitor/alignment/": "alignment/ratio alignment/uses alignment/models "
    "alignment/instrument alignment/logits alignment/monitor alignment/width",
    "adiv_monitor/capture/": "several_uses bookkeeping whole_modules contributions models "
    "gradients robustness derived loop_facts losses trace sampling uneven_rows checkpointing "
    "bystanders sampled_readings shared_weights features jagged functions realised deep_models "
    "torch_paths whole_model turns report sharded monitor/faults/boundaries",
    "adiv_monitor/features/": "features corrected_layers functions models recurrent "
    "attention_scores several_uses whole_modules jagged sampled_readings uneven_rows",
    "adiv_monitor/maths/": "standard_errors invariants against_reference uneven_rows dots "
    "attention_scores attention_measures sizes shared_weights sampled_readings realised "
    "own_measures messages",
    "adiv_monitor/probe/": "realised bit_identical alignment/instrument alignment/uses "
    "attention_scores attention_measures",
    "adiv_monitor/rerun/": "derived whole_modules torch_paths models realised bit_identical "
    "bystanders audit/beginning",
    "adiv_monitor/step/": "standard_errors sizes models gradients against_reference own_measures "
    "plain_steps losses whole_model optimizers robustness optimizer_table spikes schedule dots "
    "contributions sampled_readings shared_weights several_uses whole_modules realised turns "
    "trace attention_measures uneven_rows messages distributed sharded monitor/faults/boundaries",
    "layers/adiv_layers/forms.py": "layers/functional layers/modules layers/convolutions "
    "layers/attention",
    "layers/adiv_layers/functional.py": "layers/functional layers/modules layers/convolutions "
    "layers/attention",
}


def tests_of(file: str) -> list[str]:
    """Return the tests of a file's folder; first those that are named like the file."""
    (names,) = (tests.split() for path, tests in TESTS.items() if file.startswith(path))
    names.sort(key=lambda name: Path(file).stem not in name)
    places = (name.rpartition("/") for name in names)
    return [f"tests/{folder or 'monitor'}/test_{test}.py" for folder, _, test in places]


def core() -> list[str]:
    """Return all files that tests are listed for."""
    roots = [ROOT / path for path in TESTS]
    paths = {file for root in roots for file in (root.rglob("*.py") if root.is_dir() else [root])}
    return sorted(str(path.relative_to(ROOT)) for path in paths)


class Changes(MutationVisitor):
    """mutmut's changes of a file, also of decorated functions, which mutmut itself can't run."""

    def __init__(self) -> None:
        super().__init__(mutation_operators, IgnoredCode(set(), set(), set()))

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        return not isinstance(node, cst.FunctionDef) and super()._skip_node_and_children(node)


def words(node: cst.CSTNode) -> list[str]:
    """Return the words of messages in a piece of code."""
    found: Any = matchers.findall(node, matchers.SimpleString() | matchers.FormattedStringText())
    return [text.value for text in found if " " in text.value]


@cache
def changes_of(file: str) -> tuple[cst.Module, list[Mutation]]:
    visitor = Changes()
    module = MetadataWrapper(cst.parse_module((ROOT / file).read_text())).visit(visitor)
    return module, [
        change
        for change in visitor.mutations
        if isinstance(change.contained_by_top_level_function, cst.FunctionDef)
        and words(change.original_node) == words(change.mutated_node)
    ]


def sampled(files: Sequence[str], count: int | None, seed: int) -> list[tuple[str, int]]:
    """Draw mutants uniformly from all files together: file, and number in the file."""
    every = [(file, number) for file in files for number in range(len(changes_of(file)[1]))]
    return random.Random(seed).sample(every, len(every) if count is None else count)


def described(file: str, before: str, after: str) -> str:
    """Return one line on a mutant: its function, the code before and after."""
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    old, new = (" ".join(x[2:].strip() for x in lines if x[0] == sign) for sign in "-+")
    line = 1 + next(number for number, x in enumerate(lines) if x[0] in "-+")
    functions = (ast.ClassDef, ast.FunctionDef)
    inside = [node for node in ast.walk(ast.parse(before)) if isinstance(node, functions)]
    names = [x.name for x in inside if x.lineno <= line <= (x.end_lineno or 0)]  # outermost first
    return f"`{file}:{'.'.join(names)}` `{old}` → `{new}`"


def prepared() -> tuple[Path, Path]:
    """Return a copy of the project as it is now, and the file of its mutants' results."""
    found = hashlib.sha256(json.dumps(TESTS).encode())
    for top in ("adiv_monitor", "layers", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if "benchmarks" not in path.parts and path != Path(__file__):
                found.update(path.read_bytes())
    place = PLACE / found.hexdigest()[:12]
    if not place.exists():
        new = place.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        (PLACE / ".gitignore").write_text("*\n")
        for name in COPIED:
            copy: Any = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, new / name)
        new.rename(place)
    return place, place.with_suffix(".jsonl")


def put(file: Path, source: str) -> None:
    file.write_text(source)
    # Python tells versions of a file by size and second.
    Path(cache_from_source(str(file))).unlink(missing_ok=True)


class Alarm:
    """Ends the process if a test takes too long."""

    def pytest_runtest_logstart(self) -> None:
        signal.alarm(LONGEST)


def killer(place: Path, *tests: str) -> str | None:
    """Run tests in the copy until one fails; return which, or else how the process ended."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(place)
        log = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        paths = [str(place), str(place / "layers")]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of processes that tests start
        sys.path[:] = paths + [path for path in sys.path if path != str(ROOT / "tests")]
        vars(sys.modules["__main__"]).pop("__file__")  # or they would import this script
        signal.alarm(LONGEST)  # for the imports
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:anyio"]
        os._exit(pytest.main([*options, *tests], plugins=[Alarm()]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests have left behind
    output = (place / "output.txt").read_text()
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if code in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    if code > 0 and failed is None:
        sys.exit(f"no test failed, but pytest: {output}")
    return failed[1] if failed else f"signal {-code}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", choices=[*core(), []], help="of the core; default: all")
    parser.add_argument("--sample", type=int, help="only so many mutants, of all files together")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    arguments = parser.parse_args()
    place, results = prepared()
    lines = results.read_text().splitlines() if results.exists() else []
    ended = {(file, number): (by, line) for file, number, by, line in map(json.loads, lines)}
    sound = {by for by, _ in ended.values()}  # tests that pass without a mutant
    chosen = sampled(arguments.files or core(), arguments.sample, arguments.seed)
    gc.freeze()  # forks need not look through what they share
    for file in core():  # an interrupted run may have left a mutant
        put(place / file, (ROOT / file).read_text())
    for file, number in chosen:
        if (file, number) in ended:
            continue
        module, changes = changes_of(file)
        change = changes[number]
        mutated = deep_replace(module, change.original_node, change.mutated_node)
        assert isinstance(mutated, cst.Module)
        line = described(file, module.code, mutated.code)
        put(place / file, mutated.code)
        try:
            found = (killer(place, test) for test in tests_of(file))
            by = next((test for test in found if test), None)
        finally:
            put(place / file, module.code)
        if by and "::" in by and by not in sound and killer(place, by, "--whole"):
            sys.exit(f"{by} fails without a mutant, too: see {place / 'output.txt'}")
        ended[file, number] = by, line
        sound.add(by)
        with results.open("a") as log:
            print(json.dumps([file, number, by, line]), file=log)
        print(f"{by or 'survived'}: {line}", flush=True)
    survivors = [ended[mutant][1] for mutant in chosen if ended[mutant][0] is None]
    fresh = [line for line in survivors if line not in KNOWN.read_text()]
    killed = len(chosen) - len(survivors)
    print(f"\n{len(chosen)} mutants, {killed} killed ({killed / len(chosen):.1%}),", end=" ")
    print(f"{len(survivors) - len(fresh)} survived with a known reason, {len(fresh)} without:")
    print(*(f"- {line}" for line in sorted(fresh)), sep="\n")


if __name__ == "__main__":
    main()
