"""Faults in networks, data and strengths that no rule or threshold was made with.

The other cases existed while the rules were written. These were run for the first time when the
table of results was made.
"""

import math

import torch
from audit.fault_benchmark import data, healthy, networks
from audit.fault_benchmark.faulty import initial, inputs, optimizers, rates, wiring
from audit.fault_benchmark.run import Healthy, Run, case
from computes import Computes
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, NAdam


def waves(size: int = 32) -> data.Batches:
    """Return noisy waves (2, 32) of five frequencies, with random phase and variance 1."""
    labels = torch.randint(5, (1024,))
    phase = 2 * math.pi * torch.rand(1024, 1)
    time = torch.linspace(0, 2 * math.pi, 32)
    angle = (labels[:, None] + 1) * time + phase
    signals = torch.stack([angle.sin(), angle.cos()], 1) + 0.5 * torch.randn(1024, 2, 32)
    return data.minibatches(signals / signals.std(), labels, size)


def _waves() -> Run:
    body = nn.Sequential(
        *(nn.Conv1d(2, 16, 5, padding=2), nn.ELU(), nn.AvgPool1d(2)),
        *(nn.Conv1d(16, 16, 5, padding=2), nn.ELU(), nn.AvgPool1d(2), nn.Flatten()),
    )
    model = networks.Net(body, nn.Linear(128, 5))
    return healthy.classify(model, waves(), SGD, 0.05, momentum=0.9)


def _gru() -> Run:
    """A GRU's last output; eight steps of 2 × 4 values."""

    def last(m: nn.Module, signals: Tensor) -> Tensor:
        steps = signals.reshape(-1, 2, 8, 4).transpose(1, 2).flatten(2)
        return m.gru(steps)[0][:, -1]

    body = Computes(last, gru=nn.GRU(8, 24, batch_first=True))
    model = networks.Net(body, nn.Linear(24, 5))
    return healthy.classify(model, waves(), Adam, 3e-2)


class Mixer(nn.Module):
    """A block that mixes places, then channels, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places1, self.places2 = nn.Linear(places, 16), nn.Linear(16, places)
        self.width1, self.width2 = nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.places2(functional.silu(self.places1(self.norm1(hidden).transpose(1, 2))))
        hidden = hidden + mixed.transpose(1, 2)
        return hidden + self.width2(functional.silu(self.width1(self.norm2(hidden))))


def _mixer() -> Run:
    embed = (networks.Patches(), nn.Linear(16, 24))
    body = nn.Sequential(*embed, Mixer(4, 24), nn.LayerNorm(24), networks.Pool())
    model = networks.Net(body, nn.Linear(24, 10))
    return healthy.classify(model, data.images(), NAdam, 1e-2)


def _wide() -> Run:
    model = networks.mlp([16, 192, 3], nn.LeakyReLU)
    return Run(model, data.taught(32), healthy.squared_error, AdamW, {"lr": 1e-2})


def _three_layers() -> Run:
    model = networks.mlp([64, 96, 48, 10])
    return healthy.classify(model, data.digits(32), SGD, 0.2, momentum=0.5)


def _encoder() -> Run:
    model = networks.gpt(width=24)
    return healthy.classify(model, data.text(), Adam, 1e-2)


WAVES = Healthy("waves-conv1d-momentum", "CNN", _waves)
GRU = Healthy("waves-gru-adam", "GRU", _gru)
MIXER = Healthy("mixer-nadam", "mixer", _mixer)
WIDE = Healthy("wide-leaky-adamw", "MLP", _wide)
THREE = Healthy("three-layers-momentum", "MLP", _three_layers)
SMALL_GPT = Healthy("small-gpt-adam", "transformer", _encoder)
HEALTHY = (WAVES, GRU, MIXER, WIDE, THREE, SMALL_GPT)


SCALE, MEAN = initial.SCALE, ("input-mean", "interference")

CASES = [
    case(WAVES, "inputs × 40", inputs.scaled(40), "input-scale"),
    case(THREE, "inputs × 255", inputs.scaled(255), "input-scale"),
    case(WIDE, "inputs × 0.003", inputs.scaled(0.003), "input-scale"),
    case(MIXER, "inputs × 0.002", inputs.scaled(0.002), "input-scale"),
    case(GRU, "inputs × 100", inputs.scaled(100), "input-scale"),
    case(WIDE, "one feature × 300", inputs.one_feature(300), "input-scale"),
    case(WAVES, "inputs + 5", inputs.shifted(5), *MEAN, because=inputs.MEAN_INTERFERES),
    case(THREE, "inputs + 4", inputs.shifted(4), *MEAN, because=inputs.MEAN_INTERFERES),
    case(WAVES, "exposure ×/÷ e^1.7", inputs.unequal(1.7), "row-spread"),
    case(THREE, "one row of 32 × 100", inputs.rare_long(100), "row-spread"),
    case(WAVES, "rate × 50", rates.times(50), "rate-too-high"),
    case(GRU, "rate × 50", rates.times(50), "rate-too-high"),
    case(SMALL_GPT, "rate × 30", rates.times(30), "rate-too-high"),
    case(MIXER, "rate × 0.01", rates.times(0.01), "rate-too-low"),
    case(THREE, "rate × 0.003", rates.times(0.003), "rate-too-low"),
    case(WIDE, "rate of the head × 100", rates.own_rate(-1, 100), "group-rates"),
    case(WAVES, "rate of layer 2 × 0.0003", rates.own_rate(1, 0.0003), "group-rates"),
    case(THREE, "gain 0.03", initial.gain(0.03), *initial.FADING, because=SCALE),
    case(WAVES, "gain 8", initial.gain(8), *initial.GROWING, because=SCALE),
    case(THREE, "biases -20", initial.biases(-20), *initial.DEAD, because=initial.BIASES),
    case(THREE, "momentum 0.995", optimizers.settings(momentum=0.995), "optimizer-turns"),
    case(WIDE, "weight decay 50", optimizers.settings(weight_decay=50.0), "decay-fights"),
    case(WAVES, "weight decay 0.5", optimizers.settings(weight_decay=0.5), "decay-fights"),
    case(
        MIXER,
        "clamped before each step",
        optimizers.before_forward(optimizers.clamp, 0.01),
        "projection-fights",
    ),
    case(THREE, "clipped to 0.003", optimizers.clipped(0.003), "clipping-always"),
    case(GRU, "body detached", wiring.detached, "unreached"),
    case(MIXER, "optimizer holds the head only", wiring.head_only, "not-held"),
    case(GRU, "body frozen", wiring.frozen, "frozen"),
    case(WAVES, "inputs × 0 inside", wiring.ignored, "input-ignored"),
    case(SMALL_GPT, "float16 overflows", wiring.in_half(1e6), "non-finite"),
    case(WIDE, "a missing entry in batch 7", wiring.bad_sample(7), "non-finite"),
    case(THREE, "labels shuffled", wiring.shuffled, *wiring.UNRELATED, because=wiring.NO_RELATION),
]
