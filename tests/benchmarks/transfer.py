"""Is the best learning rate the same when a model gets wider? Loss over rate, at several widths.

An MLP learns handwritten digits, and a GPT the characters of Python's own manual, with Adam and
with SGD with momentum. Rates are tried in half decades, for the MLP in quarters, with three seeds.
The rate warms up over a tenth of the steps and falls linearly to zero. The result is the final
loss: of the MLP on its training data, which it sees seven times, and in addition on held-out data;
of the GPT on held-out text. Arms:

- torch: torch's own initialisation, one rate for all parameters, tuned at each width;
- mup: `parametrize_model(…, "mup", base=…)` and its groups, the base 32 wide;
- solver: torch's own initialisation, "sp", and the largest rates that the solver gives for it at
  full alignment;
- measured: the same with the alignments at the end of one training at the base width;
- package: Microsoft's mup package with the same base (where it can be imported).

The heads of the GPT have 16 entries at every width, so it does not matter whether attention divides
by that number or by its root.

Expected before the run: with Adam, torch's best rate falls with width by half a decade or more from
32 to 256 (hidden weights would need 1/n), and that of the other arms does not. mup and package
agree within the noise. At the largest width, mup and solver at the best rate of the smallest width
are no worse than torch at its own best rate. With SGD the differences are small: hidden weights
would need n^(−½). (The first runs judged the MLP on held-out digits in half decades. There muP with
SGD was worse than torch, as was mup: 0.098 and 0.079 at 256. The question is what rates do to
training.)

"measured" came later, after the solver's rates had proven too small at 256 with SGD. Tried before
in the MLP at 256 with the seeds of `--fresh`, at the rate that is best at 32: 0.0135 with SGD (full
alignment 0.0238, muP 0.0125, torch 0.0097), 0.0086 with Adam (0.0078, 0.0089, 0.0098). Expected
with three seeds at all widths: the best rate within a quarter decade at all of them, with SGD as
good as muP, with Adam as good as full alignment. In the GPT c lies at half the way from torch's
0 to full alignment too, so with SGD it is no worse than torch, and with Adam than the solver.

`--kinds` compares factors of η for one kind of parameter at the base width, with a base and without
one ("absolute"). Expected: with a base no factor is better than 1 in all settings; without one,
vectors that learn at η itself (a factor of 10^1.8) are worse. The result was that inputs tolerate
ten times the rate and readouts three times. So muP with these factors, and the solver with them,
are two more arms.

The best of several rates on three seeds is partly luck, which the rate of another width does
not have. `--fresh` therefore trains the MLP at its largest width once more with twelve other seeds:
torch at its best rate there, all others at their best rate at 32.

    python tests/benchmarks/transfer.py train --runs runs.jsonl --minutes 20     repeat to continue
    python tests/benchmarks/transfer.py train --runs runs.jsonl --kinds
    python tests/benchmarks/transfer.py train --runs runs.jsonl --fresh fresh.jsonl
    python tests/benchmarks/transfer.py factors --write FACTORS.md
    python tests/benchmarks/transfer.py report --runs runs.jsonl --fresh fresh.jsonl --write FILE.md
"""

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
from transfer_training import BASE, SEEDS, Setting, train
from write_up import heading, table, write

WIDTHS = {"mlp": (32, 64, 128, 256), "gpt": (32, 64, 128)}
OPTIMIZERS = ("adam", "sgd")
# Factors of η by kind, as tenfold exponents, that suit models and optimizers at the base width
# (`--kinds`, "factors").
CONSTANTS = {
    ("mlp", "adam"): "input=-10,readout=10,vector=-10",
    ("mlp", "sgd"): "input=-10,readout=10,vector=-10",
    ("gpt", "adam"): "input=10,readout=5",
    ("gpt", "sgd"): "input=10",
}
ARMS = ("torch", "mup", "solver", "measured", "package")
# What `--kinds` tries at the base width, with a base and without one.
FACTORS = {
    "mup": (
        "",
        *(f"{kind}={x}" for kind in ("vector", "hidden") for x in (-5, 5)),
        *(f"{kind}={x}" for kind in ("input", "readout") for x in (5, 10)),
        *sorted({*CONSTANTS.values()} - {"input=10"}),
    ),
    "absolute": ("", "vector=-10", "vector=10", "vector=18"),
}
# Tenfold the exponents of rates that are tried first, from which to which, and how far apart they
# are; further ones where the best is at an end.
RATES = {"adam": (-30, -15), "sgd": (-20, -5)}
APART = {"mlp": 2.5, "gpt": 5}
SMALLEST, LARGEST = -60, 20
FRESH_SEEDS = range(3, 15)
# "factors": of which kinds, tenfold exponents of factors, rates and seeds.
TRIED = {"input": (-10, 0, 10), "vector": (-10, 0, 10), "readout": (-10, 0, 10)}
NEAR = {"adam": (-15, -12.5, -10), "sgd": (-10, -7.5, -5)}
FACTOR_SEEDS = range(15, 39)

Curve = dict[float, dict[int, float]]  # tenfold exponent → seed → loss
Runs = dict[Setting, Curve]


def arms(kind: str, optimizer: str) -> list[str]:
    """Return the arms of a model and an optimizer."""
    constants = (f"{arm}:{CONSTANTS[kind, optimizer]}" for arm in ("mup", "solver", "measured"))
    return [*ARMS, *constants]


def settings(kinds: bool) -> Iterator[Setting]:
    """Return all curves, those of small models first."""
    for kind in WIDTHS:
        for width, name in product(WIDTHS[kind], OPTIMIZERS) if not kinds else ():
            for arm in arms(kind, name):
                if arm != "package" or has_package():
                    yield Setting(kind, name, arm, width)
        for name, arm in product(OPTIMIZERS, FACTORS) if kinds else ():
            for factor in FACTORS[arm]:
                yield Setting(kind, name, f"{arm}:{factor}" if factor else arm, BASE)


def read(file: Path, measure: str = "loss") -> Runs:
    """Return the runs in a file."""
    runs: Runs = defaultdict(lambda: defaultdict(dict))
    for line in file.read_text().splitlines() if file.exists() else ():
        run = json.loads(line)
        runs[Setting(*run["setting"])][run["tenfold"]][run["seed"]] = float(run[measure])
    return runs


def best(curve: Curve) -> float:
    """Return the rate with the smallest mean loss."""
    return min(curve, key=lambda tenfold: mean(curve[tenfold].values()))


def missing(setting: Setting, runs: Runs) -> list[tuple[float, int]]:
    """Return rates and seeds to run next; none once the best rate is between two others."""
    curve = runs[setting]
    least, most = RATES[setting.optimizer]
    apart = APART[setting.model]
    wanted = {*(least + apart * i for i in range(round((most - least) / apart) + 1)), *curve}
    if curve and best(curve) == max(curve) < LARGEST:
        wanted.add(max(curve) + apart)
    if curve and best(curve) == min(curve) > SMALLEST:
        wanted.add(min(curve) - apart)
    return [(rate, s) for rate in sorted(wanted) for s in SEEDS if s not in curve.get(rate, {})]


def train_all(file: Path, minutes: float, kinds: bool) -> None:
    """Run what the file lacks, and append it; stop after this many minutes."""
    end = time.monotonic() + 60 * minutes
    runs = read(file)
    for setting in settings(kinds):
        while due := missing(setting, runs):
            if time.monotonic() > end:
                print(f"not done yet: the next is {setting}")
                return
            begun = time.process_time()
            losses = train(setting, due)
            append(file, setting, due, losses)
            for (tenfold, seed), loss in zip(due, losses[0], strict=True):
                runs[setting][tenfold][seed] = loss
            seconds = time.process_time() - begun
            print(f"{setting}: {len(due)} runs, {seconds:.0f} s, best {best(runs[setting]) / 10}")
    print("done")


def train_fresh(runs: Runs, file: Path) -> None:
    """Run the MLP at both ends of its widths with other seeds, at the rates that were found."""
    done = read(file)
    widths = WIDTHS["mlp"]
    ends = (widths[0], widths[-1])
    for name, arm, width in ((n, a, w) for n in OPTIMIZERS for a in arms("mlp", n) for w in ends):
        setting = Setting("mlp", name, arm, width)
        tenfold = best(runs[setting if arm == "torch" else setting._replace(width=widths[0])])
        if tenfold in done[setting] or (arm == "package" and not has_package()):
            continue
        due = [(tenfold, seed) for seed in FRESH_SEEDS]
        append(file, setting, due, train(setting, due))


def append(
    file: Path,
    setting: Setting,
    due: Sequence[tuple[float, int]],
    losses: tuple[list[float], list[float]],
) -> None:
    """Write a line for each run."""
    with file.open("a") as lines:
        for (tenfold, seed), loss, held_out in zip(due, *losses, strict=True):
            run = {"setting": setting, "tenfold": tenfold, "seed": seed, "loss": loss}
            run["held_out"] = held_out
            lines.write(json.dumps(run) + "\n")


def tried_lines() -> list[str]:
    """Train the MLP at the base width with all factors that are tried; a table, best first."""
    rows = []
    for name, chosen in product(OPTIMIZERS, product(*TRIED.values())):
        factors = ",".join(f"{kind}={x}" for kind, x in zip(TRIED, chosen, strict=True) if x)
        setting = Setting("mlp", name, f"mup:{factors}" if factors else "mup", BASE)
        due = [(tenfold, seed) for tenfold in NEAR[name] for seed in FACTOR_SEEDS]
        curve: Curve = defaultdict(dict)
        for (tenfold, seed), loss in zip(due, train(setting, due)[0], strict=True):
            curve[tenfold][seed] = loss
        found = mean_and_error(curve[best(curve)])
        rows.append((name, found, [factors_named(factors), written(found), power(best(curve))]))
        print(rows[-1])
    lines = [f"{len(FACTOR_SEEDS)} seeds, muP, {BASE} wide: the loss at the best rate.", ""]
    for name in OPTIMIZERS:
        ranked = sorted((found, cells) for of, found, cells in rows if of == name)
        lines += [f"## mlp, {name}", ""]
        lines += table(["factors of η", "loss", "best rate"], [cells for _, cells in ranked])
    return lines


def has_package() -> bool:
    """Whether mup can be imported."""
    try:
        import mup  # noqa: F401
    except ImportError:
        return False
    return True


def mean_and_error(losses: dict[int, float]) -> tuple[float, float]:
    """Return the mean over seeds and its standard error."""
    values = list(losses.values())
    finite = all(map(math.isfinite, values))
    return mean(values), stdev(values) / len(values) ** 0.5 if finite else math.inf


def written(loss: tuple[float, float]) -> str:
    return f"{loss[0]:.4f} ± {loss[1]:.4f}"


def power(tenfold: float) -> str:
    return f"10^{tenfold / 10:g}"


def factors_named(factors: str) -> str:
    """Return factors by kind as text."""
    chosen = [factor.split("=") for factor in filter(None, factors.split(","))]
    return ", ".join(f"{kind} × {power(int(x))}" for kind, x in chosen) or "all × 1"


def arm_named(arm: str) -> str:
    """The arm with its factors, to be read."""
    name, _, factors = arm.partition(":")
    return f"{name}, {factors_named(factors)}" if factors else name


def fresh_lines(fresh: Runs, held_out: Runs) -> list[str]:
    """A table of the MLP at both ends of its widths with other seeds, at rates that are given."""
    base, last = WIDTHS["mlp"][0], WIDTHS["mlp"][-1]
    lines = [f"## Other seeds: mlp, {len(FRESH_SEEDS)} seeds", ""]
    lines += [f"torch at its best rate at either width, all others at theirs at {base}.", ""]
    rows = []
    for name in OPTIMIZERS:
        tuned: tuple[float, float] | None = None
        for arm in arms("mlp", name):
            at_base = fresh.get(Setting("mlp", name, arm, base), {})
            small = [written(mean_and_error(losses)) for losses in at_base.values()] or ["–"]
            for tenfold, losses in fresh.get(Setting("mlp", name, arm, last), {}).items():
                found = mean_and_error(losses)
                tuned = tuned or found
                above = found[0] - tuned[0]
                errors = above / math.hypot(found[1], tuned[1])
                of_held_out = mean_and_error(held_out[Setting("mlp", name, arm, last)][tenfold])
                over = f"{above:+.4f} ({errors:+.1f})" if found != tuned else ""
                cells = [power(tenfold), *small, written(found), over, written(of_held_out)]
                rows.append([name, arm_named(arm), *cells])
    header = ["", "", f"rate at {last}", f"loss, {base}", f"loss, {last}", "over torch"]
    return [*lines, *table([*header, f"held out, {last}"], rows)]


def transfer_lines(runs: Runs, held_out: Runs) -> list[str]:
    """Return a table for each model and optimizer."""
    lines = []
    for kind, name in product(WIDTHS, OPTIMIZERS):
        widths = WIDTHS[kind]
        last = widths[-1]
        rows = []
        own = runs.get(Setting(kind, name, "torch", last), {})
        if not own:
            continue
        tuned = mean_and_error(own[best(own)])
        for arm in arms(kind, name):
            curves = [runs.get(Setting(kind, name, arm, width), {}) for width in widths]
            if not all(curves):
                continue
            rates = [best(curve) for curve in curves]
            carried = mean_and_error(curves[-1][rates[0]])
            errors = math.hypot(carried[1], tuned[1])
            worse = (carried[0] - tuned[0]) / errors
            of_held_out = held_out[Setting(kind, name, arm, last)][rates[0]]
            rows.append(
                [
                    arm_named(arm),
                    *map(power, rates),
                    written(mean_and_error(curves[-1][rates[-1]])),
                    written(carried),
                    f"{carried[0] - tuned[0]:+.4f} ({worse:+.1f})",
                    written(mean_and_error(of_held_out)),
                ]
            )
        lines += [f"## {kind}, {name}", ""]
        header = [f"best rate, {width}" for width in widths]
        found = [
            f"loss, {last}",
            f"loss, {last} at the rate of {widths[0]}",
            "over tuned torch",
            "held out",
        ]
        lines += table(["", *header, *found], rows)
    return lines


def kinds_lines(runs: Runs) -> list[str]:
    """Return a table of the loss at the best rate, with a factor for one kind of parameter."""
    pairs = list(product(WIDTHS, OPTIMIZERS))
    rows = []
    for arm, factors in FACTORS.items():
        for factor in factors:
            full = f"{arm}:{factor}" if factor else arm
            curves = [runs.get(Setting(*pair, full, BASE), {}) for pair in pairs]
            cells = [
                f"{written(mean_and_error(c[best(c)]))} at {power(best(c))}" if c else "–"
                for c in curves
            ]
            if any(curves):
                rows.append([{"mup": "base 32"}.get(arm, "no base"), factors_named(factor), *cells])
    title = ["## Factors by kind", "", f"Of η, muP, {BASE} wide: the loss at the best rate.", ""]
    return [*title, *table(["", "", *(f"{k}, {o}" for k, o in pairs)], rows)] if rows else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("train", "report", "factors"))
    parser.add_argument("--runs", type=Path, default="runs.jsonl", help="lines of JSON, one a run")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kinds", action="store_true", help="train with factors by kind")
    parser.add_argument("--fresh", type=Path, help="the same, of the MLP with other seeds")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.what == "factors":
        lines = heading("Factors by kind", __file__, argparse.Namespace(threads=1))
        lines[2] = "`python tests/benchmarks/transfer.py factors`"
        print(write([*lines, *tried_lines()], given.write))
        return
    if given.what == "train" and given.fresh:
        train_fresh(read(given.runs), given.fresh)
        return
    if given.what == "train":
        train_all(given.runs, given.minutes, given.kinds)
        return
    runs = read(given.runs)
    lines = heading("Learning rates over widths", __file__, argparse.Namespace(threads=1))
    lines[2] = (
        "`python tests/benchmarks/transfer.py train --runs transfer.jsonl`, the same with "
        "`--kinds` and with `--fresh`, and `report`: means over three seeds ± standard errors; "
        "in brackets, how many standard errors the difference is."
    )
    if has_package():
        lines[4] += f" mup {version('mup')}."
    lines += [*transfer_lines(runs, read(given.runs, "held_out")), *kinds_lines(runs)]
    if given.fresh:
        lines += fresh_lines(read(given.fresh), read(given.fresh, "held_out"))
    print(write(lines, given.write))


if __name__ == "__main__":
    main()
