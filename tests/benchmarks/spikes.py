"""Faults that strike in the middle of a run: does the monitor say when, and in which layer?

Two sets of ten plants, each with a twin without it. What must be said was written before any
monitored run of the set:

- a spike of the loss within `WITHIN` steps of the plant (of a batch or of labels: at its very
  step), with the planted layer first among those that it names, where a layer is planted; or
- one of the findings that are named here, with that layer first; or
- a sentence in a note, a finding or a warning.

Plants of the first set have sizes that practitioners report. Those of the second, in other
networks, have the smallest size, of a few, at which the loss of a run without a monitor rises by
half within 20 steps (`--size` shows by how much); none does so for logits. An alarm of a twin is a
spike, a finding to act on, or such a sentence.

    python tests/benchmarks/spikes.py [--sets 1 2] [--seeds 3] [--only reset …] [--watch norms]
        [--size] [--threads 1] [--write FILE]
"""

import contextlib
import json
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from write_up import heading, parser, table, write

from adiv_monitor import Monitor

STEPS, EVERY, WITHIN = 320, 50, 20
Batch = tuple[Tensor, Tensor]
TEXT = torch.frombuffer(
    bytearray((Path(__file__).parents[2] / "LICENSE").read_bytes()), dtype=torch.uint8
).long()


# --- networks and data ----------------------------------------------------------------------------


class GPT(nn.Module):
    """Two blocks over 32 bytes, with the norm before or after."""

    def __init__(self, *, norm_first: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, 48), nn.Embedding(32, 48)
        block = partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(block(48, 4, 192, norm_first=norm_first) for _ in range(2))
        self.head = nn.Linear(48, 256)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        z = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            z = block(z, src_mask=mask, is_causal=True)
        return self.head(z)


class ViT(nn.Module):
    """Three blocks over the eight rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(8, 32), nn.Parameter(0.02 * torch.randn(8, 32))
        block = partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(block(32, 2, 64, norm_first=True) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x.view(-1, 8, 8)) + self.places
        for block in self.blocks:
            z = block(z)
        return self.head(z.mean(1))


class LSTM(nn.Module):
    """An LSTM over 32 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.cells = nn.Embedding(256, 32), nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.tokens(x))[0])


def mlp(depth: int = 2) -> nn.Module:
    hidden = [of for _ in range(depth - 1) for of in (nn.Linear(128, 128), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), *hidden, nn.Linear(128, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)),
        *(nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
        nn.Linear(512, 10),
    )


def plain_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(512, 10),
    )


def texts(generator: torch.Generator) -> Batch:
    starts = torch.randint(len(TEXT) - 33, (16,), generator=generator)
    several = torch.stack([TEXT[i : i + 33] for i in starts])
    return several[:, :-1], several[:, 1:]


@cache
def images() -> Batch:
    data, target = load_digits(return_X_y=True)
    return torch.tensor(data, dtype=torch.float32) / 16, torch.tensor(target)


def digits(generator: torch.Generator) -> Batch:
    x, y = images()
    chosen = torch.randint(len(x), (32,), generator=generator)
    return x[chosen], y[chosen]


# --- loops, and where a fault can strike ----------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A network, what it learns and by which optimizer, with a parameter group for each module."""

    network: Callable[[], nn.Module]
    batches: Callable[[torch.Generator], Batch]
    optimizer: Callable[..., torch.optim.Optimizer]
    autocast: torch.dtype | None = None
    scaler: dict[str, float] | None = None
    warmup: bool = False
    monitor: dict[str, Any] = field(default_factory=dict)


class Loop:
    """A training, whose parts a plant may replace; each is told the step."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        torch.manual_seed(seed)
        self.recipe, self.seed, self.model = recipe, seed, recipe.network()
        modules = {n: [*m.parameters(recurse=False)] for n, m in self.model.named_modules()}
        groups = [{"params": ps, "name": name} for name, ps in modules.items() if ps]
        self.optimizer = recipe.optimizer(groups)
        self.group = {group["name"]: group for group in self.optimizer.param_groups}
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        scaler = recipe.scaler
        self.scaler = None if scaler is None else torch.amp.GradScaler("cpu", **scaler)
        self.begins: Callable[[int], None] = lambda step: None
        self.batch: Callable[[int, Batch], Batch] = lambda step, batch: batch
        self.gradients: Callable[[int], None] = lambda step: None
        self.warmed: Callable[[int], float] = lambda step: (step + 1) / STEPS

    def weight(self, layer: str) -> Tensor:
        found = self.model.get_parameter(f"{layer}.weight")
        return found.data

    def run(self, *, monitored: bool = True, **given: Any) -> tuple[Monitor | None, list[float]]:
        generator, losses = torch.Generator().manual_seed(self.seed), list[float]()
        optimizer, scaler, recipe = self.optimizer, self.scaler, self.recipe
        half = contextlib.nullcontext()
        if recipe.autocast is not None:
            half = torch.autocast("cpu", dtype=recipe.autocast)
        own = {"every_n_steps": EVERY, "seed": self.seed, **recipe.monitor, **given}
        context = Monitor(self.model, optimizer, **own) if monitored else contextlib.nullcontext()
        with context as monitor:
            for step in range(STEPS):
                self.begins(step)
                x, y = self.batch(step, recipe.batches(generator))
                with half:
                    logits = self.model(x)
                    loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
                losses.append(loss.item())
                if monitor is not None:
                    monitor.log_loss(loss)
                if recipe.warmup:
                    for group, peak in zip(optimizer.param_groups, self.peaks, strict=True):
                        group["lr"] = peak * self.warmed(step)
                optimizer.zero_grad()
                (loss if scaler is None else scaler.scale(loss)).backward()
                if scaler is not None:
                    scaler.unscale_(optimizer)
                self.gradients(step)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step() if scaler is None else scaler.step(optimizer)
                if scaler is not None:
                    scaler.update()
        return monitor, losses


# --- plants: each changes a loop at a step, by a size, in a layer ---------------------------------


def bad_batch(loop: Loop, at: int, size: float, layer: str) -> None:
    """One batch of random bytes, as from a damaged shard."""

    def batch(step: int, given: Batch) -> Batch:
        x, y = given
        return (torch.randint_like(x, 256), torch.randint_like(y, 256)) if step == at else given

    loop.batch = batch


def rate_jump(loop: Loop, at: int, size: float, layer: str) -> None:
    """The rate of one group becomes so many times as large, as by a schedule that is set back."""

    def begins(step: int) -> None:
        if step == at:
            loop.group[layer]["lr"] *= size

    loop.begins = begins


def stale_moment(loop: Loop, at: int, size: float, layer: str) -> None:
    """A layer's gradient was shrunk to this, and is no more: Adam's second moment is behind."""

    def gradients(step: int) -> None:
        for p in loop.group[layer]["params"] if step < at else ():
            p.grad.mul_(size)

    loop.gradients = gradients


def corrupted_row(loop: Loop, at: int, size: float, layer: str) -> None:
    """The scale of one row of a weight is wrong by this factor."""

    def begins(step: int) -> None:
        if step == at:
            loop.weight(layer)[5] *= size

    loop.begins = begins


def scale_overflow(loop: Loop, at: int, size: float, layer: str) -> None:
    """The loss scale becomes far too large: gradients in half precision overflow."""

    def begins(step: int) -> None:
        if step == at and loop.scaler is not None:
            loop.scaler.update(size)

    loop.begins = begins


def label_change(loop: Loop, at: int, size: float, layer: str) -> None:
    """From here on labels are counted from another number, as in another shard."""
    loop.batch = lambda step, given: (given[0], (given[1] + int(size) * (step >= at)) % 10)


def reset(loop: Loop, at: int, size: float, layer: str) -> None:
    """The weights of one layer are drawn anew."""

    def begins(step: int) -> None:
        if step == at:
            loop.model.get_submodule(layer).reset_parameters()  # type: ignore[operator]

    loop.begins = begins


def exploding_logits(loop: Loop, at: int, size: float, layer: str) -> None:
    """Queries and keys of one block grow by this factor in each step."""

    def begins(step: int) -> None:
        weight = loop.model.get_parameter(f"{layer}.in_proj_weight").data
        if step >= at:
            weight[: 2 * weight.shape[1]] *= size

    loop.begins = begins


def warmup_ends(loop: Loop, at: int, size: float, layer: str) -> None:
    """The learning rate jumps to its peak in the midst of the warm-up."""
    loop.warmed = lambda step: size if step >= at else (step + 1) / STEPS


def inf_in_a_rank(loop: Loop, at: int, size: float, layer: str) -> None:
    """An input of rank 1 of 2 is infinite in one step."""
    if dist.get_rank() == 1:

        def batch(step: int, given: Batch) -> Batch:
            if step == at:
                given[0][3, 20] = torch.inf
            return given

        loop.batch = batch


# --- what is said --------------------------------------------------------------------------------


@dataclass
class Said:
    """What a run's reports, findings and warnings say.

    Attributes:
        spikes: (step, layers) of each spike.
        findings: (name, strength, layers) of each finding.
        text: sentences of notes, findings and warnings.
        losses: all losses.
    """

    spikes: list[tuple[int, list[str]]]
    findings: list[tuple[str, str, list[str]]]
    text: list[str]
    losses: list[float]

    @staticmethod
    def by(monitor: Monitor, warned: list[str], losses: list[float]) -> "Said":
        findings = monitor._outlet.running.findings()
        spikes = [spike for report in monitor.reports for spike in report.spikes]
        notes = {note: None for report in monitor.reports for note in report.notes}
        return Said(
            [(spike.step, [*spike.layers]) for spike in spikes],
            [(f.name, f.strength, [*f.layers]) for f in findings],
            [*notes, *(f"{f.name}: {f.summary}" for f in findings), *warned],
            losses,
        )


@dataclass(frozen=True)
class Case:
    """A plant, and what must be said of it.

    Attributes:
        reported: where such plants are reported.
        recipe: the training.
        plant: the plant.
        size: its size.
        sizes: those among which a size is chosen.
        layer: the planted layer's path; "": none is planted.
        at: its step.
        within: steps in which a spike must be.
        findings: findings that say it as well.
        words: what a sentence must match, in place of a spike.
    """

    reported: str
    recipe: Recipe
    plant: Callable[[Loop, int, float, str], None]
    size: float = 1.0
    sizes: tuple[float, ...] = ()
    layer: str = ""
    at: int = 200
    within: int = WITHIN
    findings: tuple[str, ...] = ()
    words: str = ""

    @property
    def name(self) -> str:
        return self.plant.__name__.replace("_", "-")

    def names(self, layers: list[str]) -> bool:
        return not self.layer or bool(layers and layers[0].startswith(self.layer))

    def found(self, said: Said) -> bool:
        if self.words:
            return any(re.search(self.words, sentence) for sentence in said.text)
        steps = range(self.at, self.at + self.within + 1)
        return any(step in steps and self.names(layers) for step, layers in said.spikes) or any(
            name in self.findings and self.names(layers) for name, _, layers in said.findings
        )

    def alarms(self, said: Said) -> list[str]:
        found = [f"spike at {step}" for step, _ in said.spikes]
        found += [name for name, strength, _ in said.findings if strength == "act"]
        return found + [s for s in said.text if self.words and re.search(self.words, s)]

    def loop(self, seed: int, *, planted: bool) -> Loop:
        loop = Loop(self.recipe, seed)
        if planted or self.plant is stale_moment:
            at = self.at if planted else STEPS  # of the twin, the gradient stays as small
            self.plant(loop, at, self.size, self.layer)
        return loop

    def play(self, seed: int, *, planted: bool, **given: Any) -> Said:
        if self.plant is inf_in_a_rank:
            with tempfile.TemporaryDirectory() as folder:
                multiprocessing.spawn(of_rank, (self, planted, seed, folder, given), nprocs=2)
                return Said(**json.loads(Path(folder, "said").read_text()))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            monitor, losses = self.loop(seed, planted=planted).run(**given)
        assert monitor is not None
        return Said.by(monitor, [str(w.message) for w in caught], losses)


def of_rank(
    rank: int, case: Case, planted: bool, seed: int, folder: str, given: dict[str, Any]
) -> None:
    """Run one of two ranks; the first writes what is said."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    network = case.recipe.network
    recipe = replace(case.recipe, network=lambda: DistributedDataParallel(network()))
    loop = replace(case, recipe=recipe).loop(seed, planted=planted)
    loop.seed = 2 * seed + rank
    monitor, losses = loop.run(**given)
    assert monitor is not None
    if rank == 0:
        Path(folder, "said").write_text(json.dumps(vars(Said.by(monitor, [], losses))))
    dist.barrier()


Adam, AdamW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
RATES = ("rate-rises", "rate-too-high", "group-rates", "uneven-rates")
SKIPS = "(?i)skipped the step|not finite|overflow"
HALF = {"autocast": torch.float16, "scaler": {}}
STATIC = {"growth_factor": 1.0000001, "backoff_factor": 0.9999999}
LOOKS = {"monitor": {"attention": True}}
BF16 = {"autocast": torch.bfloat16, **LOOKS}

FIRST = [
    Case("stanford-crfm/mistral#115", Recipe(GPT, texts, partial(AdamW, lr=1e-3)), bad_batch,
         within=0),
    Case("ultralytics/yolov5#292", Recipe(cnn, digits, partial(SGD, lr=0.05, momentum=0.9)),
         rate_jump, 10, layer="4", findings=RATES),
    Case("AI-Hypercomputer/maxtext#17", Recipe(GPT, texts, partial(Adam, lr=3e-3)), stale_moment,
         0.1, layer="tokens", findings=("uneven-rates", "rate-too-high")),
    Case("ecmwf/WeatherGenerator#2724", Recipe(mlp, digits, partial(SGD, lr=0.05)), inf_in_a_rank,
         words=r"step 200\b.*rank 1 alone"),
    Case("open-mmlab/mmdetection#2061", Recipe(GPT, texts, partial(AdamW, lr=1e-3)), corrupted_row,
         256, layer="blocks.1.linear2"),
    Case("NVIDIA/apex#318", Recipe(mlp, digits, partial(SGD, lr=0.05, momentum=0.9), **HALF),
         scale_overflow, 2.0**40, words=SKIPS),
    Case("jingyaogong/minimind#503", Recipe(mlp, digits, partial(AdamW, lr=1e-3)), label_change,
         within=0),
    Case("keras-team/keras#12834", Recipe(cnn, digits, partial(AdamW, lr=1e-3)), reset, layer="4"),
    Case("NVlabs/PixelDiT#14", Recipe(GPT, texts, partial(AdamW, lr=1e-3), **BF16),
         exploding_logits, 1.03, layer="blocks.0.self_attn", within=STEPS,
         findings=("attention-saturated",)),
    Case("salesforce/LAVIS#72", Recipe(partial(GPT, norm_first=False), texts,
         partial(AdamW, lr=1e-2), warmup=True), warmup_ends, at=60,
         findings=("rate-rises", "rate-too-high")),
]  # fmt: skip
SECOND = [
    Case("stanford-crfm/mistral#115", Recipe(LSTM, texts, partial(Adam, lr=3e-3)), bad_batch,
         at=213, within=0),
    Case("ultralytics/yolov5#292", Recipe(ViT, digits, partial(AdamW, lr=1e-3)), rate_jump,
         300, (10, 30, 100, 300), "blocks.1.linear2", 213, findings=RATES),
    Case("AI-Hypercomputer/maxtext#17", Recipe(mlp, digits, partial(Adam, lr=3e-3)), stale_moment,
         0.1, (0.1, 0.01, 1e-3, 1e-4), "2", 213, findings=("uneven-rates", "rate-too-high")),
    Case("ecmwf/WeatherGenerator#2724", Recipe(plain_cnn, digits, partial(SGD, lr=0.05)),
         inf_in_a_rank, at=213, words=r"step 213\b.*rank 1 alone"),
    Case("open-mmlab/mmdetection#2061", Recipe(plain_cnn, digits, partial(Adam, lr=1e-3)),
         corrupted_row, 16, (16, 64, 256, 1024), "3", 213),
    Case("NVIDIA/apex#318", Recipe(ViT, digits, partial(AdamW, lr=1e-3), torch.float16, STATIC),
         scale_overflow, 2.0**40, at=213, words=SKIPS),
    Case("jingyaogong/minimind#503", Recipe(ViT, digits, partial(AdamW, lr=1e-3)), label_change,
         3, at=213, within=0),
    Case("keras-team/keras#12834", Recipe(GPT, texts, partial(AdamW, lr=1e-3)), reset,
         layer="tokens", at=213),
    Case("NVlabs/PixelDiT#14", Recipe(ViT, digits, partial(AdamW, lr=1e-3), **BF16),
         exploding_logits, 1.1, (1.03, 1.1, 1.3, 2.0), "blocks.1.self_attn", 213,
         findings=("attention-saturated",)),
    Case("salesforce/LAVIS#72", Recipe(ViT, digits, partial(SGD, lr=0.3, momentum=0.9),
         warmup=True), warmup_ends, 1, (1, 3), at=70,
         findings=("rate-rises", "rate-too-high")),
]  # fmt: skip


def harm(case: Case, seed: int) -> float:
    """Return how many times as large as before the loss becomes, without a monitor.

    The lowest of three in a row, at its highest within 20 steps; of a batch, its own loss.
    """
    _, losses = case.loop(seed, planted=True).run(monitored=False)
    count = 1 if case.plant is bad_batch else 3
    after = [losses[i : i + count] for i in range(case.at, case.at + WITHIN)]
    worst = max(min(x if math.isfinite(x) else math.inf for x in several) for several in after)
    return worst / median(losses[case.at - 16 : case.at])


def sizes(cases: list[Case], seed: int) -> Iterator[tuple[str, str]]:
    """Yield the harm that plants do at each of their sizes."""
    for case in cases:
        if case.plant not in (inf_in_a_rank, scale_overflow):
            of = {size: harm(replace(case, size=size), seed) for size in case.sizes or (case.size,)}
            yield case.name, "; ".join(f"{size:g}: {value:.3g}" for size, value in of.items())


def rows(cases: list[Case], seeds: int, **given: Any) -> Iterator[tuple[str, ...]]:
    """Yield a row for each plant: how often it was found, what was said, alarms of its twins."""
    for case in cases:
        found, heard, alarms = 0, list[str](), list[str]()
        for seed in range(seeds):
            said = case.play(seed, planted=True, **given)
            found += case.found(said)
            heard += [f"spike: {', '.join(layers[:2]) or '–'}" for _, layers in said.spikes[:1]]
            heard += [f"{n} ({s}) {', '.join(of[:1])}".strip() for n, s, of in said.findings[:2]]
            heard += [s for s in said.text if case.words and re.search(case.words, s)][:1]
            alarms += case.alarms(case.play(seed, planted=False, **given))
        distinct = "; ".join(dict.fromkeys(heard))
        result = f"{found} of {seeds}", distinct or "nothing", "; ".join(alarms) or "none"
        yield case.name, f"{case.size:g}", case.reported, *result


def main(arguments: list[str] | None = None) -> None:
    """Run the plants and their twins, and print or write what was found."""
    options = parser(__doc__ or "")
    options.add_argument("--sets", nargs="*", default=["1", "2"], choices=("1", "2"))
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--only", nargs="*")
    options.add_argument("--watch", default="loss", choices=("loss", "norms"))
    options.add_argument("--size", action="store_true", help="show the harm without a monitor")
    chosen = options.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    if chosen.quick:
        chosen.sets, chosen.only = ["1"], ["label-change"]
    lines = heading("Faults that strike in the middle of a run", __file__, chosen)
    for number, every in (("1", FIRST), ("2", SECOND)):
        cases = [case for case in every if not chosen.only or case.name in chosen.only]
        if number in chosen.sets and chosen.size:
            header = "plant", "size: times the loss before"
            lines += [f"## Set {number}", "", *table(header, [*sizes(cases, 0)])]
        elif number in chosen.sets:
            header = "plant", "size", "reported", "found", "what is said", "alarms of the twins"
            given = {"watch": chosen.watch}
            lines += [f"## Set {number}", "", *table(header, [*rows(cases, chosen.seeds, **given)])]
        write(lines, chosen.write)
    print(write(lines, chosen.write))


if __name__ == "__main__":
    main()
