"""The figures that the pages state, computed anew from the runs that are kept: no data needed.

    python examples/paper/headlines.py

A test finds every one of them, as printed here, in `docs/paper.md` or in `results/README.md`.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

from alignments_report import ARMS, changes, every_change, of_held_out, of_training, settings
from constants import compared, less
from fair_report import Accuracies, Arm, accuracies, difference
from readings_report import layer_medians, typical
from scipy import stats
from slopes import BY_BATCH, Run, at_the_end, mean_and_error
from table import plus
from tuned_report import best, more

RESULTS = Path(__file__).parent / "results"
ALIGNMENT = RESULTS.parents[1] / "alignment" / "results"
SIZES, TUNED = (8, 16, 32, 64, 128), (8, 32, 128)
READS = (("training", of_training), ("held out", of_held_out))  # of alignments
Headline = tuple[str, str]  # what, and the figures


def runs(name: str, folder: Path = RESULTS) -> list[Run]:
    """The runs of an experiment."""
    found: list[Run] = json.loads((folder / f"{name}.json").read_text())
    return found


def table1(read: Callable[[Run], float] = at_the_end) -> Accuracies:
    """Accuracies of Table 1's runs by arm and seed; batch normalisation by both tests."""
    found: Accuracies = {}
    for run in runs("table1"):
        arm = Arm(run["method"], run["activation"], run["batch_size"])
        found.setdefault(arm, {})[run["seed"]] = read(run)
        if BY_BATCH in run:
            by_batch = arm._replace(method="by-batch")
            found.setdefault(by_batch, {})[run["seed"]] = at_the_end(run, BY_BATCH)
    return found


def after(epochs: int) -> Callable[[Run], float]:
    """Reads the accuracy that a run would end with after so many epochs."""
    return lambda run: at_the_end({"test_accuracy": run["test_accuracy"][:epochs]})


def tuned(name: str = "fair", which: str = "test_accuracy") -> Accuracies:
    """Accuracies of a fair test at the tuned rates."""
    return accuracies(runs(f"{name}-tuning"), runs(name), which)


def signed(values: Sequence[float]) -> str:
    """Mean and error of values, with a sign."""
    return plus(*mean_and_error(values), sign=True)


def over_sizes(found: Accuracies, arm: Arm, than: str, sizes: Sequence[int]) -> list[float]:
    """Mean over batch sizes of a paired difference, by seed."""
    each = [difference(found, arm._replace(batch_size=size), than) for size in sizes]
    return [statistics.fmean(of_seed) for of_seed in zip(*each, strict=True)]


def slopes(found: Accuracies, method: str, activation: str, sizes: Sequence[int]) -> list[float]:
    """Points per 100 samples of the batch, by seed."""
    seeds = [found[Arm(method, activation, size)] for size in sizes]
    fits = [stats.linregress(sizes, [each[seed] for each in seeds]) for seed in sorted(seeds[0])]
    return [100 * float(fit.slope) for fit in fits]


def of_table1() -> Iterator[Headline]:
    """Table 1 at the paper's one learning rate."""
    found = table1()
    tanh, leaky = (Arm("affine-like", activation, 0) for activation in ("tanh", "leaky"))
    less = [
        mean_and_error(difference(found, tanh._replace(batch_size=b), "standard")) for b in TUNED
    ]
    shown = "{:.1f}, {:.1f} and {:.1f} points".format(*(mean for mean, _ in less))
    yield "Table 1, tanh, B = 8, 32, 128: affine-like − standard", shown
    for arm in (tanh, leaky):
        name = f"Table 1, {arm.activation}"
        yield f"{name}: affine-like − standard", signed(over_sizes(found, arm, "standard", SIZES))
        constant = over_sizes(found, arm._replace(method="constant-scale"), arm.method, SIZES)
        yield f"{name}: constant-scale − affine-like", signed(constant)
        yield (
            f"{name}: slope of affine-like",
            signed(slopes(found, arm.method, arm.activation, SIZES)),
        )
    for method in ("norm-like", "standard"):
        yield f"Table 1, tanh: slope of {method}", signed(slopes(found, method, "tanh", SIZES))
    for than in ("rmsnorm", "norm-like", "layernorm", "by-batch"):
        shown = signed(over_sizes(found, leaky, than, SIZES))
        yield f"Table 1, leaky: affine-like − {than}", shown
    running = over_sizes(found, leaky._replace(method="batchnorm"), "affine-like", SIZES)
    yield "Table 1, leaky: batchnorm − affine-like", signed(running)


def of_fair() -> Iterator[Headline]:
    """The fair test: differences, their slopes, and when they were taken."""
    found, trained = tuned(), tuned(which="train_accuracy")
    for activation in ("tanh", "leaky"):
        arm = Arm("affine-like", activation, 0)
        shown = signed(over_sizes(found, arm, "standard", TUNED))
        yield f"fair, {activation}: affine-like − standard, mean over B", shown
        for method in ("affine-like", "standard"):
            shown = signed(slopes(found, method, activation, TUNED))
            yield f"fair, {activation}: slope of {method}", shown
    for size in TUNED:
        arm = Arm("affine-like", "tanh", size)
        yield f"fair, tanh, B = {size}: test", signed(difference(found, arm, "standard"))
        yield f"fair, tanh, B = {size}: training", signed(difference(trained, arm, "standard"))
        early = difference(_early(), arm, "standard")
        yield f"fair, tanh, B = {size}: test, epochs 4 to 6", signed(early)


def of_gradient_only() -> Iterator[Headline]:
    """Corrections of the gradient alone, and what they leave to the map's."""
    found, trained = tuned(), tuned(which="train_accuracy")
    pairs = (
        *(("rate-by-layer", "standard"), ("gradient-proportional", "standard")),
        *(("gradient-proportional", "rate-by-layer"), ("affine-like", "rate-by-layer")),
        *(("affine-like", "gradient-proportional"), ("gradient-disproportional", "standard")),
        *(("gradient-batch", "standard"), ("affine-like", "batchnorm"), ("affine-like", "rmsnorm")),
    )
    for activation, size in product(("tanh", "leaky"), TUNED):
        name = f"fair, {activation}, B = {size}"
        for method, than in pairs:
            shown = signed(difference(found, Arm(method, activation, size), than))
            yield f"{name}: {method} − {than}", shown
        shown = signed(difference(trained, Arm("gradient-batch", activation, size), "standard"))
        yield f"{name}: gradient-batch − standard, training", shown
    means = [("tanh", *pair) for pair in (*pairs[:2], pairs[4])]
    means += [("leaky", *pair) for pair in (pairs[1], pairs[4], pairs[5], pairs[7])]
    for activation, method, than in means:
        shown = signed(over_sizes(found, Arm(method, activation, 0), than, TUNED))
        yield f"fair, {activation}: {method} − {than}, mean over B", shown


def _early() -> Accuracies:
    """Accuracies of the fair test in epochs 4 to 6."""
    cut = [
        {**run, "test_accuracy": [statistics.fmean(run["test_accuracy"][3:6])]}
        for run in runs("fair")
    ]
    return accuracies(runs("fair-tuning"), cut)


def of_hundred() -> Iterator[Headline]:
    """The fair test of a hundred epochs at batch size 128: where the advantage goes."""
    tuning, ended = runs("fair-epochs100-tuning"), runs("fair-epochs100")
    for activation, which in product(("tanh", "leaky"), ("test_accuracy", "train_accuracy")):
        for epochs in (5, 25, 50, 100):
            cut = [{**run, which: run[which][:epochs]} for run in ended]
            found = accuracies(tuning, cut, which)
            shown = signed(difference(found, Arm("affine-like", activation, 128), "standard"))
            yield f"100 epochs, {activation}: affine-like − standard, {which} at {epochs}", shown


def of_eight() -> Iterator[Headline]:
    """The fair test at batch size 8, tuned with three seeds."""
    found = tuned("fair-batch8")
    gradient_only = ("rate-by-layer", *(f"gradient-{of}" for of in ("proportional", "batch")))
    pairs = [(m, "standard") for m in ("affine-like", "centred", "norm-like", *gradient_only)]
    pairs += [("affine-like", than) for than in ("gradient-proportional", "constant-scale")]
    arms = [("tanh", *pair) for pair in (*pairs, ("gradient-proportional", "rate-by-layer"))]
    arms += [("leaky", method, "standard") for method in ("affine-like", *gradient_only)]
    for activation, method, than in arms:
        shown = signed(difference(found, Arm(method, activation, 8), than))
        yield f"B = 8, three seeds of tuning, {activation}: {method} − {than}", shown


def of_depth() -> Iterator[Headline]:
    """The fair test with six hidden layers, at batch size 128, without and with residual paths."""
    found, paths = tuned("fair-depth6"), tuned("fair-depth6-residual")
    for activation in ("tanh", "leaky"):
        for method in ("affine-like", "norm-like", "batchnorm", "rate-by-layer"):
            arm = Arm(method, activation, 128)
            shown = signed(difference(paths, arm, "standard"))
            yield f"six layers with paths, {activation}: {method} − standard", shown
            gain = [paths[arm][seed] - without for seed, without in found[arm].items()]
            yield f"six layers, {activation}: {method} with paths − without", signed(gain)
        for than in ("batchnorm", "rate-by-layer"):
            shown = signed(difference(paths, Arm("affine-like", activation, 128), than))
            yield f"six layers with paths, {activation}: affine-like − {than}", shown
        for than in ("standard", "batchnorm", "layernorm"):
            shown = signed(difference(found, Arm("affine-like", activation, 128), than))
            yield f"six layers, {activation}: affine-like − {than}", shown
        for method in ("norm-like", "gradient-proportional", "rate-by-layer", "batchnorm"):
            shown = signed(difference(found, Arm(method, activation, 128), "standard"))
            yield f"six layers, {activation}: {method} − standard", shown


def of_own_setting() -> Iterator[Headline]:
    """The paper's setting at batch size 32, with a learning rate tuned for every map."""
    common, found = table1(after(25)), tuned("fair-adam-unit")
    for activation in ("tanh", "leaky"):
        arm = Arm("affine-like", activation, 32)
        shown = signed(difference(common, arm, "standard"))
        yield f"Adam at 0.001, {activation}, 25 epochs: affine-like − standard", shown
        for than in ("standard", "norm-like", "batchnorm", "layernorm", "rmsnorm"):
            shown = signed(difference(found, arm, than))
            yield f"Adam, tuned, {activation}: affine-like − {than}", shown
        for method in ("constant-scale", "centred"):
            shown = signed(difference(found, arm._replace(method=method), "affine-like"))
            yield f"Adam, tuned, {activation}: {method} − affine-like", shown


def of_batches() -> Iterator[Headline]:
    """The paper's setting at other batch sizes, with a learning rate tuned for every map."""
    found = tuned("fair-adam-unit-batches")
    arms = [Arm("affine-like", a, size) for a in ("tanh", "leaky") for size in (8, 128)]
    pairs = [(arm, than) for arm in arms for than in ("standard", "constant-scale")]
    pairs += [(arm._replace(method="constant-scale"), "standard") for arm in arms[:2]]
    for arm, than in pairs:
        of = f"{arm.activation}, B = {arm.batch_size}"
        shown = signed(difference(found, arm, than))
        yield f"Adam, tuned, {of}: {arm.method} − {than}", shown


def of_adam() -> Iterator[Headline]:
    """The paper's setting for a hundred epochs, and on centred pixels, with rates tuned anew."""
    rivals = (
        *("standard", "norm-like", "batchnorm", "layernorm"),
        *("rmsnorm", "constant-scale", "centred"),
    )
    tests = {"100 epochs": "fair-adam-unit-epochs100", "centred pixels": "fair-adam-centred"}
    for (what, name), activation in product(tests.items(), ("tanh", "leaky")):
        found = tuned(name)
        for than in rivals:
            shown = signed(difference(found, Arm("affine-like", activation, 32), than))
            yield f"Adam, tuned, {what}, {activation}: affine-like − {than}", shown


def of_overtaking() -> Iterator[Headline]:
    """When affine-like passes the others with tanh, in epochs and in updates."""
    for than in ("layernorm", "batchnorm", "standard"):
        behind = [last_behind(than, size) for size in SIZES]
        epochs = listed(str(epoch) for epoch, _ in behind)
        yield f"Table 1, tanh: last epoch of affine-like behind {than}, B = 8 … 128", epochs
        if than == "layernorm":
            updates = listed(f"{updates:,}" for _, updates in behind)
            yield "the next epoch's end, in updates", updates


def listed(words: Iterable[str]) -> str:
    """Words as a sentence has them: "1, 2 and 3"."""
    *most, last = words
    return f"{', '.join(most)} and {last}"


def last_behind(than: str, size: int) -> tuple[int, int]:
    """The last epoch after which affine-like is not above another map; updates of the next."""
    by_method: dict[str, list[list[float]]] = {}
    for run in runs("table1"):
        if (run["activation"], run["batch_size"]) == ("tanh", size):
            by_method.setdefault(run["method"], []).append(run["test_accuracy"])
            updates = int(run["updates_per_epoch"])
    ours, theirs = (
        [statistics.fmean(seeds) for seeds in zip(*by_method[method], strict=True)]
        for method in ("affine-like", than)
    )
    last = max(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=True), 1) if a <= b), default=0
    )
    return last, (last + 1) * updates


def of_widths() -> Iterator[Headline]:
    """Figs 2, 3 and 5, panel by panel: the best and the worst of the paper's seven maps."""
    for activation in ("tanh", "leaky", "none"):
        panels: dict[tuple[int, int], dict[str, float]] = {}
        for (method, *panel), mean in _means_of_widths(activation).items():
            panels.setdefault((panel[0], panel[1]), {})[method] = mean
        constant = [of.pop("constant-scale") - of["affine-like"] for of in panels.values()]
        order = [sorted(of, key=of.__getitem__) for of in panels.values()]
        if activation == "none":
            last = sum(set(of[:2]) == {"standard", "batchnorm"} for of in order)
            yield "Fig 5: standard and batchnorm are last", f"{last} of {len(order)} panels"
        else:
            first = sum(of[-1] == "affine-like" for of in order)
            yield (
                f"Figs 2, 3, {activation}: affine-like is first",
                f"{first} of {len(order)} panels",
            )
            what = f"Figs 2, 3, {activation}: constant-scale − affine-like"
            low, high = (plus(of(constant), float("nan"), sign=True) for of in (min, max))
            yield what, f"{low} to {high}"


def _means_of_widths(activation: str) -> dict[tuple[str, int, int], float]:
    """By method, depth and width; batch normalisation tested on batches, as in the paper."""
    found: dict[tuple[str, int, int], list[float]] = {}
    for run in runs("widths"):
        if run["activation"] == activation:
            key = BY_BATCH if run["method"] == "batchnorm" else "test_accuracy"
            place = run["method"], run["depth"], run["width"]
            found.setdefault(place, []).append(at_the_end(run, key))
    return {place: statistics.fmean(values) for place, values in found.items()}


def of_readings() -> Iterator[Headline]:
    """What BatchNorm changes, and whether readings foretell the end of a long training."""
    end = table1()
    for activation in ("tanh", "leaky"):
        by_method: dict[str, list[Run]] = {}
        for run in runs("readings"):
            if run["activation"] == activation:
                by_method.setdefault(run["method"], []).append(run)
        for method in ("standard", "batchnorm"):
            layers = zip(*(layer_medians(r, "scale_cv") for r in by_method[method]), strict=True)
            shown = ", ".join(f"{statistics.fmean(layer):.2f}" for layer in layers)
            yield f"readings, {activation}: scale_cv of {method} by layer", shown
        after = [statistics.fmean(end[Arm(m, activation, 128)].values()) for m in by_method]
        early = [statistics.fmean(map(at_the_end, mine)) for mine in by_method.values()]
        yield f"rank correlation of 5 and 100 epochs, {activation}", _rank(early, after)
        for measure in (
            "update_cosine",
            "harmed_fraction",
            "gradient_cosine",
            "interference_ratio",
        ):
            read = [statistics.fmean(typical(r, measure) for r in m) for m in by_method.values()]
            yield f"{measure} and accuracy after 100 epochs, {activation}", _rank(read, after)


def _rank(x: Sequence[float], y: Sequence[float]) -> str:
    return plus(float(stats.spearmanr(x, y).statistic), float("nan"), sign=True)


def of_optimizers() -> Iterator[Headline]:
    """What affine-like layers add to an optimizer."""
    found = best(runs("optimizers"))
    for optimizer in ("sgd", "adam", "muon"):
        shown = plus(*more(found, f"{optimizer}, affine-like", optimizer), sign=True)
        yield f"{optimizer}: affine-like layers − none", shown


def of_normalisers() -> Iterator[Headline]:
    """What their parameters bring to normalisers."""
    found = best(runs("normalisers"))
    for name in ("batchnorm", "layernorm", "rmsnorm"):
        shown = plus(*more(found, f"{name}, with parameters", name), sign=True)
        yield f"{name}: with parameters − without", shown


def of_schedules() -> Iterator[Headline]:
    """Dynamic maximal learning rates against those of full alignment, each at its best rate."""
    said = []
    for data in ("digits", "teacher"):
        losses = [(each["dynamic"], each["full"]) for each in runs(f"grid_{data}", ALIGNMENT)]
        pairs = [zip(d["losses"], f["losses"], strict=True) for d, f in losses]
        below = [dynamic < full for each in pairs for dynamic, full in each]
        said.append(f"{sum(below)} of {len(below)}")
    shown = f"{said[0]} paired runs on digits, {said[1]} on the teacher"
    yield "the dynamic schedule's loss below that of full alignment", shown


def of_alignments() -> Iterator[Headline]:
    """Learning rates that follow alignments on CIFAR-10, less those of full alignment."""
    found, longer = best(runs("alignments")), best(runs("alignments-2000"))
    for steps, these in (("1,000", found), ("2,000", longer)):
        for arm, (name, read) in product(ARMS[1:], READS):
            below = [change < 0 for change in every_change(these, arm, "", read)]
            pairs = f"{sum(below)} of {len(below)} pairs"
            yield f"CIFAR-10, {steps} steps, {arm}: lower loss, {name}", pairs
    for setting, arm in product(("sp sgd 256", "mup adam 256"), ARMS[1:]):
        shown = [signed(changes(longer, setting, arm, read)) for _, read in READS]
        yield f"CIFAR-10, 2,000 steps, {setting}: {arm} − full", " and ".join(shown)
    for setting, arm in (("sp sgd 256", "sum"), ("sp adam 128", "sum"), ("sp sgd 128", "carried")):
        shown = [signed(changes(found, setting, arm, read)) for _, read in READS]
        yield f"CIFAR-10, {setting}: {arm} − full", " and ".join(shown)
    tuned_alone = compared(runs("constants"), runs("alignments"))
    for arm in ARMS:
        networks = settings(tuned_alone)
        below = [x < 0 for s in networks for x in less(tuned_alone, s, arm, of_held_out)]
        yield f"CIFAR-10, constants less {arm}: held out, lower", f"{sum(below)} of {len(below)}"


def headlines() -> Iterable[Headline]:
    """All of them."""
    parts = (
        *(of_table1, of_fair, of_gradient_only, of_eight, of_hundred, of_depth),
        *(of_own_setting, of_batches, of_adam, of_overtaking, of_widths, of_readings),
    )
    for part in (*parts, of_optimizers, of_normalisers, of_schedules, of_alignments):
        yield from part()


def main() -> None:
    for what, figures in headlines():
        print(f"{what}: {figures}")


if __name__ == "__main__":
    main()
