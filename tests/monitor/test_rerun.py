"""Rerun modules compute the same as in the run, any number of times, without affecting it."""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import Monitor
from adiv_monitor.rerun.derivatives import Parameters, jvp, jvp_by_gradients, pushed_forward
from adiv_monitor.rerun.nested import mapped
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.surroundings import Surroundings, is_rerun, untouched
from adiv_monitor.rerun.twin import Arguments, Twin

CPU = torch.device("cpu")


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def plain(module: nn.Module, call: Callable[[], Any]) -> Any:
    return call()


class Double(torch.autograd.Function):
    """2x with a differentiable backward and without a forward-mode derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


class Untrue(Double):
    """A function whose backward is not linear in the gradient."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient * gradient.abs()


class Net(nn.Module):
    """A module that draws, writes to its input, a buffer and an attribute, and calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.history: list[float] = []
        self.own = np.random.default_rng(5)
        self.function = function

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.count += 1
        self.history.append(float(x.sum()))
        x.add_(self.count)
        noise = torch.rand_like(x) * random.random() * np.random.rand() * self.own.random()
        z = self.function(self.linear(x + noise))
        return {"z": z, "still": noise.sum()}


def expected(parameters: Parameters, tangents: Parameters) -> tuple[Any, Any]:
    """Compute value and derivative by `torch.func.jvp`."""
    return torch.func.jvp(made, (dict(parameters),), (dict(tangents),))


def made(parameters: Parameters) -> dict[str, Tensor]:
    w, b = parameters["w"], parameters["b"]
    return {"product": torch.tanh(w) @ b, "sum": w.sum(0, keepdim=True)}


@pytest.fixture
def point() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    drawn = [torch.randn(size, dtype=torch.float64) for size in ((4, 3), (3,)) * 2]
    return dict(zip("wb", drawn[:2], strict=True)), dict(zip("wb", drawn[2:], strict=True))


def by_gradients(function: Any, parameters: Parameters, tangents: Parameters) -> tuple[Any, Any]:
    return jvp_by_gradients(function, parameters, tangents, 1e-16)


@pytest.mark.parametrize("way", [jvp, by_gradients])
def test_derivatives_are_torchs(way: Any, point: Any) -> None:
    parameters, tangents = point
    values, moves = way(made, parameters, tangents)
    true_values, true_moves = expected(parameters, tangents)
    assert values.keys() == true_values.keys() == moves.keys()
    for name, value in true_values.items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-14)
        torch.testing.assert_close(moves[name], true_moves[name], rtol=1e-12, atol=1e-13)
        assert not values[name].requires_grad
        assert not moves[name].requires_grad


@pytest.mark.parametrize("way", [jvp, by_gradients])
def test_what_has_no_tangent_stays(way: Any, point: Any) -> None:
    parameters, tangents = point
    _, moves = way(made, parameters, {"w": tangents["w"]})
    _, whole = expected(parameters, {**tangents, "b": torch.zeros(3, dtype=torch.float64)})
    torch.testing.assert_close(moves["product"], whole["product"], rtol=1e-12, atol=1e-13)
    _, none = way(lambda p: (p["b"].detach() * 2, 7, None), parameters, tangents)
    assert none[0].tolist() == [0, 0, 0]
    assert none[1:] == (7, None)


def test_an_untrue_backward_is_found_out(point: Any) -> None:
    parameters, tangents = point
    with pytest.raises(RuntimeError, match="custom function or operator"):
        by_gradients(lambda p: Untrue.apply(p["w"]), parameters, tangents)
    leaf = parameters["w"].requires_grad_()
    (move,) = pushed_forward([Double.apply(leaf)], [leaf], [tangents["w"]])
    torch.testing.assert_close(move, 2 * tangents["w"], rtol=0, atol=0)


def truth(net: Net, x: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """Return the original call's z, and its derivative along `change` by central differences."""
    w, state = net.linear.weight.detach().clone(), Randomness([CPU], [net])
    found = []
    for step in (0, 1e-6, -1e-6):
        state.set()
        noise = torch.rand_like(x) * random.random() * np.random.rand() * net.own.random()
        hidden = functional.linear(x + 1 + noise, w + step * change, net.linear.bias)
        found.append(net.function(hidden).detach())
    state.set()
    return found[0], (found[1] - found[2]) / 2e-6


def twin(net: Net, x: Tensor) -> Twin:
    arguments: Arguments = ((x.clone(),), {})
    return Twin(net, arguments, Surroundings(Randomness([CPU], ())), {}, {})


@pytest.mark.parametrize("function", [torch.tanh, Double.apply])
def test_a_twin_is_the_call_again_however_often(function: Any) -> None:
    net, x = Net(function), torch.ones(5, 3, dtype=torch.float64)
    change = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
    z, move = truth(net, x, change)
    same = twin(net, x)
    moving = {"linear.weight": same.parameters["linear.weight"]}
    before = drawn()
    for _ in range(2):
        torch.testing.assert_close(same.run({}, plain)["z"], z, rtol=0, atol=0)
        found, moved = same.jvp(moving, {"linear.weight": change}, plain)
        torch.testing.assert_close(found["z"], z, rtol=0, atol=0)
        torch.testing.assert_close(moved["z"], move, rtol=1e-7, atol=1e-9)
        assert moved["still"] == 0
    other = same.run({"linear.weight": moving["linear.weight"] + change}, plain)["z"]
    assert not torch.equal(other, z)
    # The module, its input and the random number generators are unaffected.
    assert (float(net.count), net.history, x.unique().tolist()) == (0, [], [1])
    assert before != drawn()
    net_of_before = Net(function)
    assert net.own.random() == net_of_before.own.random()


def test_nothing_is_drawn_for_the_run() -> None:
    net, x = Net(), torch.ones(5, 3, dtype=torch.float64)
    same = twin(net, x)
    state = Randomness([CPU], ())
    expected = drawn()
    state.set()
    same.run({}, plain)
    assert drawn() == expected


@pytest.fixture
def not_deterministic() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("not_deterministic")
def test_a_twin_finds_what_its_call_found() -> None:
    """The rerun has the call's autocast, training mode and deterministic-algorithms setting."""
    seen: list[object] = []

    def look(x: Tensor) -> Tensor:
        seen.append(
            (
                (x.dtype, torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
                torch.are_deterministic_algorithms_enabled(),
                (
                    torch.is_inference_mode_enabled(),
                    is_rerun(),
                    torch._C._len_torch_function_stack(),
                ),
            )
        )
        return x

    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    net.register_forward_hook(lambda module, args, output: pytest.fail("hooks are not run"))
    torch.use_deterministic_algorithms(True)
    with torch.autocast("cpu", torch.bfloat16):
        surroundings = Surroundings(Randomness([CPU]))
        same = Twin(net, ((torch.ones(64, 3),), {}), surroundings, {}, {})
    torch.use_deterministic_algorithms(False)
    net.eval()
    with torch.inference_mode(), torch.device("cpu"):
        z = same.run({}, lambda module, call: look(call()))
        assert torch.is_inference_mode_enabled()
        assert torch._C._len_torch_function_stack() == 1
    assert seen == [((torch.bfloat16, True, False), True, (False, True, 0))]
    assert 0 < int((z == 0).sum()) < z.numel()  # dropped entries
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert not is_rerun()


def test_what_runs_within_another_leaves_that_a_repetition() -> None:
    found = untouched((), (), lambda: (untouched((), (), is_rerun), is_rerun()))
    assert found == (True, True)
    assert not is_rerun()


class Pair(NamedTuple):
    first: Tensor
    second: object


def test_arguments_keep_their_structure() -> None:
    one = torch.ones(())
    given = ([one, {"a": one}], OrderedDict(b=one), Pair(one, "text"), {1: (one,)}, {one})
    found = mapped(given, lambda tensor: tensor + 1, lambda value: type(value).__name__)
    assert found == ([2, {"a": 2}], OrderedDict(b=2), Pair(2, "str"), {1: (2,)}, "set")
    assert [type(x) for x in found[:3]] == [list, OrderedDict, Pair]


GLOBAL = torch.Generator()
GLOBAL_OF_NUMPY = np.random.default_rng(0)
DRAWS: dict[str, Callable[["Drawing"], float]] = {
    "a global": lambda module: float(torch.rand((), generator=GLOBAL)),
    "a global of numpy": lambda module: GLOBAL_OF_NUMPY.random(),
    "of the class": lambda module: float(torch.rand((), generator=module.shared)),
    "in a dictionary": lambda module: float(torch.rand((), generator=module.kept["noise"])),
    "in a list": lambda module: module.listed[0].random(),
    "in an object": lambda module: float(torch.rand((), generator=module.held.noise)),
    "in a partial": lambda module: float(module.draw()),
}


class Drawing(nn.Module):
    """Measured as a whole, as no rule describes `cdist`; draws from a generator of its own."""

    shared = torch.Generator()

    def __init__(self, draws: Callable[["Drawing"], float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.draws = draws
        self.kept = {"noise": torch.Generator()}
        self.listed = [np.random.default_rng(0)]
        self.held = SimpleNamespace(noise=torch.Generator(), count=0)
        self.draw = partial(torch.rand, (), generator=torch.Generator())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x * (1 + self.draws(self)), self.weight)


@pytest.mark.parametrize("realised", [False, True], ids=["", "realised"])
@pytest.mark.parametrize("name", DRAWS)
def test_generators_outside_of_torchs_own_are_put_back(name: str, realised: bool) -> None:
    def build() -> nn.Module:
        for generator in (GLOBAL, Drawing.shared):
            generator.manual_seed(0)
        GLOBAL_OF_NUMPY.bit_generator.state = np.random.default_rng(0).bit_generator.state
        return nn.Sequential(nn.Linear(3, 6), Drawing(DRAWS[name]))

    assert_trains_as_alone(build, realised)


class Noise:
    """An object that is called, and draws."""

    def __init__(self, own: torch.Generator) -> None:
        self.own = own

    def __call__(self, module: nn.Module) -> float:
        return float(torch.rand((), generator=self.own))

    def draw(self, module: nn.Module) -> float:
        return self(module)


def of_forward(own: torch.Generator) -> nn.Module:
    class Local(Drawing):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(x * (1 + float(torch.rand((), generator=own))), self.weight)

    return Local(len)


def of_hook(own: torch.Generator) -> nn.Module:
    module = Drawing(lambda _: 0.0)
    module.register_forward_pre_hook(lambda _, args: args[0] + float(torch.rand((), generator=own)))
    return module


def inside(own: torch.Generator) -> Callable[[nn.Module], float]:
    def draws(module: nn.Module) -> float:
        def inner() -> float:
            return float(torch.rand((), generator=own))

        return inner()

    return draws


def called(function: Callable[[nn.Module], float]) -> Callable[[nn.Module], float]:
    return lambda module: function(module)


SEEN: dict[str, Callable[[torch.Generator], nn.Module]] = {
    "closure of a forward": of_forward,
    "closure of a hook": of_hook,
    "closure": lambda own: Drawing(lambda _: float(torch.rand((), generator=own))),
    "function inside": lambda own: Drawing(inside(own)),
    "function that is called": lambda own: Drawing(called(inside(own))),
    "partial": lambda own: Drawing(partial(inside(own))),
    "default": lambda own: Drawing(lambda _, of=own: float(torch.rand((), generator=of))),
    "keyword": lambda own: Drawing(lambda _, *, of=own: float(torch.rand((), generator=of))),
    "object": lambda own: Drawing(Noise(own)),
    "method": lambda own: Drawing(Noise(own).draw),
}


@pytest.mark.parametrize("realised", [False, True], ids=["", "realised"])
@pytest.mark.parametrize("name", SEEN)
def test_generators_that_functions_see_are_put_back(name: str, realised: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 6), SEEN[name](torch.Generator().manual_seed(0)))

    assert_trains_as_alone(build, realised)


def assert_trains_as_alone(build: Callable[[], nn.Module], realised: bool) -> None:
    """Train for three steps without and with a monitor, and compare all parameters."""
    runs = []
    for monitored in (False, True):
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        around: Any = nullcontext()
        if monitored:
            around = Monitor(model, optimizer, every_n_steps=1, realised=realised)
        with around:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(5, 3)).square().sum().backward()
                optimizer.step()
        runs.append([*model.parameters()])
    assert all(map(torch.equal, *runs))


SYSTEM = random.SystemRandom()  # it has no state


def test_generators_without_a_state_are_left_alone() -> None:
    random.seed(0)
    saved = Randomness([], [Drawing(DRAWS["a global"])])
    drawn = random.random()
    saved.set()
    assert random.random() == drawn


class Averaged(nn.Module):
    """A student, and a frozen teacher that the forward itself moves, as that of MoCo does."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 4), nn.Linear(3, 4)
        self.teacher.requires_grad_(False)
        self.weight = nn.Parameter(torch.randn(4, 4))  # no rule: measured through this module
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for mine, other in pairs:
                if self.in_place:
                    mine.lerp_(other, 0.1)
                else:
                    mine.data = 0.9 * mine.data + 0.1 * other.data
        return torch.cdist(self.student(x), self.weight) - self.teacher(x)


@pytest.mark.parametrize("realised", [False, True], ids=["", "realised"])
@pytest.mark.parametrize("in_place", [False, True])
def test_frozen_parameters_that_a_forward_moves_are_moved_by_the_run_alone(
    in_place: bool, realised: bool
) -> None:
    assert_trains_as_alone(lambda: Averaged(in_place), realised)
