"""The stacked networks do, step by step, what separate runs of the layers' own modules do."""

import itertools
from functools import cache

import pytest
import torch
from ensemble import ACTIVATIONS, Ensemble, Network
from methods import METHODS
from plain import model, optimizer
from torch import Tensor, nn

DEPTHS = {1: (12, 5, 4), 2: (12, 5, 7, 4), 3: (12, 5, 7, 1, 4), 4: (12, 5, 5, 5, 5, 4)}
RESIDUAL = 4  # hidden layers of the networks with paths past all but the first
SIZES = DEPTHS[2]
TYPICAL = 3.0
RATE = 0.01
SEEDS = (3, 8)
BATCHES = (6, 6, 6, 4)  # the last of an epoch is smaller
# Optimizer and how many hidden layers.
COURSES = [("adam", 1), ("adam", 2), ("sgd", 2), ("sgd", 3), ("sgd", 4)]
Trained = tuple[Ensemble, list[list[list[Tensor]]]]


def batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.rand(rows, SIZES[0], generator=generator, dtype=torch.float64),
            torch.randint(SIZES[-1], (rows,), generator=generator),
        )
        for rows in BATCHES * 3
    ]


@cache
def trained(optimizer: str, depth: int) -> Trained:
    """All methods × activations × two seeds, and every network's parameters after every step."""
    networks = [
        Network(method, activation, seed, RATE)
        for method, activation, seed in itertools.product(METHODS, ACTIVATIONS, SEEDS)
    ]
    kind = (torch.float64, "cpu", optimizer, depth == RESIDUAL)
    ensemble = Ensemble(networks, DEPTHS[depth], TYPICAL, *kind)
    seen = {seed: batches(seed) for seed in SEEDS}
    course = []
    for step in range(len(BATCHES) * 3):
        images, labels = ({seed: seen[seed][step][i] for seed in SEEDS} for i in (0, 1))
        ensemble.step(images, labels)
        course.append([[p.clone() for p in ensemble.parameters(i)] for i in range(len(networks))])
    return ensemble, course


@pytest.mark.slow(one_in=41)
@pytest.mark.parametrize("course", COURSES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("method", METHODS)
def test_stacked_networks_train_as_separate_ones(
    method: str, activation: str, course: tuple[str, int]
) -> None:
    ensemble, steps = trained(*course)
    name, depth = course
    test = batches(99)[0][0]
    for seed in SEEDS:
        network = Network(method, activation, seed, RATE)
        place = ensemble.networks.index(network)
        alone = model(network, DEPTHS[depth], TYPICAL, depth == RESIDUAL).double()
        stepper = optimizer(network, alone, name)
        assert stepper.param_groups[0]["lr"] == (RATE / 2 if method == "norm-like-half" else RATE)
        last_bias = list(alone.parameters())[-1].detach().clone()
        for (x, y), stacked in zip(batches(seed), steps, strict=True):
            stepper.zero_grad()
            nn.functional.cross_entropy(alone(x), y).backward()
            stepper.step()
            # Where the gradient is zero, Adam divides its rounding by 1e-8.
            torch.testing.assert_close(
                stacked[place], [p.detach() for p in alone.parameters()], rtol=1e-9, atol=1e-9
            )
        moved = last_bias - list(alone.parameters())[-1].detach()
        assert moved.abs().max() > RATE / 10
        alone.eval()
        torch.testing.assert_close(ensemble.logits(test)[place], alone(test), rtol=1e-8, atol=1e-9)


def test_batch_statistics_at_test_time() -> None:
    ensemble, _ = trained("adam", 2)
    test = torch.cat([x for x, _ in batches(99)])[:17]
    place = ensemble.networks.index(Network("batchnorm", "tanh", SEEDS[0], RATE))
    alone = model(Network("batchnorm", "tanh", SEEDS[0], RATE), SIZES, TYPICAL).double()
    with torch.no_grad():
        for mine, theirs in zip(alone.parameters(), ensemble.parameters(place), strict=True):
            mine.copy_(theirs)
    expected = torch.cat([alone(rows) for rows in test.split(5)])
    torch.testing.assert_close(ensemble.logits(test, group=5)[place], expected)
