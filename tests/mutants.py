"""Mutation testing with mutmut, a file at a time: which changes of the core does no test notice?

Every operator, number, argument and condition inside the file's functions is changed, one change at
a time, and the tests listed for the file below run until one fails. Surviving mutants are printed
as diffs. Survivors with a known reason are listed in `mutants.md`, word for word as printed here,
and are then only counted. mutmut skips code outside functions and decorated functions; this script
also skips lines that hold only the words of a message.

The mutants live in a copy, `.mutants/<file>`. An interrupted run continues where it stopped, unless
the package or its tests have changed since. A mutant takes one to ten seconds, survivors up to a
minute, and a large file has 1,300 mutants. About a tenth of them, chosen by the last digit of their
numbers in each function, is a good estimate; these are tested anew each time. To compare two states
of the tests, use a sample over all files: it stays the same as long as the files do.

    make mutants FILE=adiv_monitor/maths/measures.py
    python tests/mutants.py adiv_monitor/maths/{measures,dots}.py --processes 2
    python tests/mutants.py --digits 3            # all files below, every tenth mutant
    python tests/mutants.py --sample 200 --seed 0 # all files below, 200 mutants in all
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACE = ROOT / ".mutants"
KNOWN = ROOT / "tests" / "mutants.md"

# Settings: the tests that should kill a file's mutants. Of these, mutmut runs those that reach the
# changed function, quick ones first.
_MEASURED = ["test_against_reference", "test_invariants", "test_models"]
_COURSE = [*_MEASURED, "test_gradients", "test_optimizers", "test_robustness"]
_RULES = ["test_functions", "test_features", "test_corrected_layers", *_MEASURED]
_FAMILIES = ["contraction", "gains", "products"]
_FORMULAS = ["test_functional", "test_modules", "test_convolutions", "test_attention"]
_BOOKS = ["test_bookkeeping", "test_sampling", *_COURSE]
_MONITOR_TESTS = {
    "maths/estimates.py": ["test_measures", "test_standard_errors", *_MEASURED],
    "maths/measures.py": ["test_measures", "test_standard_errors", "test_realised", *_MEASURED],
    "maths/readings.py": ["test_measures", "test_attention_measures", "test_realised", *_COURSE],
    "step/vectors.py": ["test_measures", "test_uneven_rows", *_MEASURED],
    "maths/totals.py": ["test_uneven_rows", *_MEASURED],
    "capture/sampling.py": ["test_sampling"],
    "step/parameter_steps.py": ["test_distributed", "test_sharded", *_COURSE],
    "capture/check.py": ["test_contributions", *_COURSE],
    "capture/capture.py": [*_BOOKS, "test_several_uses", "test_whole_modules", "test_trace"],
    "capture/layer_rows.py": [*_BOOKS, "test_recurrent", "test_realised"],
    "step/gradient_check.py": ["test_contributions", *_BOOKS],
    "step/measured_step.py": ["test_several_uses", "test_whole_modules", *_BOOKS],
    "step/outcome.py": [
        *("test_measures", "test_realised", "test_sampled_readings", "test_contributions"),
        *_BOOKS,
    ],
    "step/transfer.py": ["test_measures", *_MEASURED],
    "maths/ceiling.py": ["test_bookkeeping", "test_gradients", "test_functions", *_MEASURED],
    "probe/attention.py": ["test_attention_measures", "test_attention_scores"],
    "probe/batch.py": ["test_realised", "test_attention_measures"],
    "probe/recording.py": ["test_realised", "test_several_uses"],
    "probe/run.py": ["test_realised", "test_bit_identical"],
    "probe/scales.py": ["test_attention_measures", "test_attention_scores"],
    "step/probing.py": ["test_realised", "test_attention_measures"],
    "features/rows.py": [*_RULES, "test_attention_measures", *_COURSE],
    "features/features.py": _RULES,
    "features/functions/linear.py": _RULES,
    "features/functions/conv.py": _RULES,
    "features/functions/embedding.py": ["test_bookkeeping", *_RULES],
    "features/corrected.py": _RULES,
    **{f"features/functions/{name}.py": ["test_functions"] for name in _FAMILIES},
}
_LAYER_TESTS = {"functional.py": _FORMULAS, "forms.py": _FORMULAS}
TESTS = {
    **{
        f"adiv_monitor/{file}": [f"tests/monitor/{test}.py" for test in tests]
        for file, tests in _MONITOR_TESTS.items()
    },
    **{
        f"layers/adiv_layers/{file}": [f"tests/layers/{test}.py" for test in tests]
        for file, tests in _LAYER_TESTS.items()
    },
}
# Tests that fail under the trampolines through which mutmut calls functions.
NOT_RUN = ("compil", "jit", "script", "pickl")
# The slowest tests: only the files of features need them.
ONLY_FOR_FEATURES = ("cnn", "vit")
WORDS = r'^ +f?"[^"]* [^"]*"$'
_COPIED = ("adiv_monitor", "layers", "tests", "examples", "README.md", "pyproject.toml")


def prepared(file: str) -> Path:
    """Return a copy of the project to mutate; reuse the last run's if nothing has changed since."""
    place = PLACE / re.sub(r"\W+", "-", file.removesuffix(".py"))
    stamp, state = place / "state", fingerprint(file)
    if stamp.exists() and stamp.read_text() == state:
        return place
    shutil.rmtree(place, ignore_errors=True)
    # The folder must exist before Python starts: it caches a missing path as holding no modules.
    (place / "mutants").mkdir(parents=True)
    (PLACE / ".gitignore").write_text("*\n")
    leave = shutil.ignore_patterns("__pycache__", "results", "mutants.*")
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=leave)
        else:
            shutil.copy2(source, place / name)
    # mutmut derives a module's name from its file's path.
    (place / "layers" / "adiv_layers").rename(place / "adiv_layers")
    with (place / "pyproject.toml").open("a") as settings:
        settings.write(mutmut_settings(file))
    stamp.write_text(state)
    return place


def fingerprint(file: str) -> str:
    """Return a hash of everything that decides which mutants survive: sources, tests, settings."""
    found = hashlib.sha256(json.dumps([file, TESTS[file], left_out(file), WORDS]).encode())
    for top in ("adiv_monitor", "layers", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if "benchmarks" not in path.parts and path != Path(__file__):
                found.update(path.read_bytes())
    return found.hexdigest()


def left_out(file: str) -> tuple[str, ...]:
    """Return words in the names of tests that are not run."""
    return NOT_RUN + (() if file.startswith("adiv_monitor/features/") else ONLY_FOR_FEATURES)


def mutmut_settings(file: str) -> str:
    settings = {
        "source_paths": ["adiv_monitor", "adiv_layers"],
        "only_mutate": [file.removeprefix("layers/")],
        "also_copy": ["layers", "examples", "README.md"],
        "pytest_add_cli_args_test_selection": TESTS[file],
        "pytest_add_cli_args": ["-k", " and ".join(f"not {word}" for word in left_out(file))],
        "do_not_mutate_patterns": [WORDS],
        "process_isolation": "forkserver",  # torch's threads do not survive a plain fork
        "timeout_multiplier": 30.0,
        "timeout_constant": 20.0,
    }
    lines = (f"{name} = {json.dumps(value)}" for name, value in settings.items())
    return "\n[tool.mutmut]\n" + "\n".join(lines) + "\n"


def mutmut(place: Path, *arguments: str, quiet: bool = True) -> str:
    path = str(place / "mutants")  # also for processes started by tests
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    # Not "-m mutmut", which would put the unchanged sources onto the path.
    command = [str(Path(sys.executable).with_name("mutmut")), *arguments]
    output = subprocess.PIPE if quiet else None
    done = subprocess.run(command, cwd=place, env=environment, stdout=output, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed in {place}: see above")
    return done.stdout or ""


# Run in the folder of the settings, by which mutmut decides what it mutates.
_NAMES = """
import sys
from pathlib import Path
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.utils.format_utils import get_mutant_name
file = Path(sys.argv[1])
for name in mutate_file_contents(str(file), file.read_text()).mutant_names:
    print(get_mutant_name(file, name))
"""


def sampled(files: Sequence[str], count: int, seed: int) -> dict[str, list[str]]:
    """Draw this many mutants uniformly from all files together, and return them by file."""
    names = [(file, name) for file in files for name in mutants_of(file)]
    chosen: dict[str, list[str]] = {}
    for file, name in sorted(random.Random(seed).sample(names, min(count, len(names)))):
        chosen.setdefault(file, []).append(name)
    return chosen


def mutants_of(file: str) -> list[str]:
    command = [sys.executable, "-c", _NAMES, file.removeprefix("layers/")]
    done = subprocess.run(
        command, cwd=prepared(file), stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.split()


def survivors(place: Path, file: str) -> list[str]:
    """Return one line per surviving mutant: its function, the code before and after."""
    named = re.findall(r"^\s*(\S+): (survived|no tests)$", mutmut(place, "results"), re.MULTILINE)
    lines = []
    for name, _ in named:
        changed = re.findall(r"^([-+])(?![-+]{2} )(.*)$", mutmut(place, "show", name), re.MULTILINE)
        before, after = (" ".join(t.strip() for s, t in changed if s == sign) for sign in "-+")
        function = re.sub(r"__mutmut_\d+$", "", name).rpartition(".")[2]
        spoken = function.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
        lines.append(f"`{file}:{spoken}` `{before}` → `{after}`")
    return lines


def report(place: Path, file: str) -> None:
    mutmut(place, "export-cicd-stats")
    counts = json.loads((place / "mutants" / "mutmut-cicd-stats.json").read_text())
    counts["total"] -= mutmut(place, "results").count(": not checked")
    known = KNOWN.read_text() if KNOWN.exists() else ""
    found = survivors(place, file)
    fresh = [line for line in found if line not in known]
    killed, total = counts["killed"] + counts["timeout"] + counts["segfault"], counts["total"]
    print(
        f"\n| {file} | {total} mutants | {killed} killed ({killed / max(total, 1):.1%}) | ", end=""
    )
    print(f"{len(found)} survived | {len(found) - len(fresh)} with a known reason |\n")
    for line in fresh:
        print(f"- {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", choices=[*TESTS, []], help="of the core; default: all")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--digits", help="only mutants whose numbers end with one of these")
    parser.add_argument("--sample", type=int, help="only so many mutants, of all files together")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    arguments = parser.parse_args()
    files = arguments.files or list(TESTS)
    sample = sampled(files, arguments.sample, arguments.seed) if arguments.sample else {}
    for file in sample or files:
        place = prepared(file)
        chosen = [f"*[{arguments.digits}]"] if arguments.digits else sample.get(file, [])
        try:
            mutmut(place, "run", "--max-children", str(arguments.processes), *chosen, quiet=False)
        except SystemExit as failure:
            if not chosen:
                raise
            print(f"{file}: perhaps no mutant has such a number. {failure}")
            continue
        report(place, file)


if __name__ == "__main__":
    main()
