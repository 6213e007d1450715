"""Other operations on the model during a measured step: copies, pickles, functional transforms.

None of them is affected by the monitor, and none changes the step's readings.
"""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from cases import loss_of
from setups import mlp, one_step, plain_step, same
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from adiv_monitor import Monitor
from adiv_monitor.capture.hook import Hook, trains

Batch = tuple[Tensor, Tensor]


def losses(model: nn.Module, batch: Batch) -> Callable[..., Tensor]:
    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, parameters, (x,))
        return nn.functional.cross_entropy(outputs, y)

    return loss


def fake(model: nn.Module, batch: Batch) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(batch[0])
        model(x)
    assert not trains(x)
    model(x)


def meta(model: nn.Module, batch: Batch) -> None:
    state = {name: p.detach().to("meta").requires_grad_() for name, p in model.named_parameters()}
    losses(model, batch)(state, batch[0].to("meta"), batch[1].to("meta")).backward()


def other_weights(model: nn.Module, batch: Batch) -> None:
    state = {name: torch.ones_like(p).requires_grad_() for name, p in model.named_parameters()}
    losses(model, batch)(state, *batch).backward()


def batched_gradients(model: nn.Module, batch: Batch) -> None:
    z = model(batch[0])
    each = torch.eye(z.numel(), dtype=z.dtype).view(-1, *z.shape)
    torch.autograd.grad(z, list(model.parameters()), each, is_grads_batched=True)


FUNCTIONS: dict[str, Callable[[nn.Module, Batch], object]] = {
    "jacrev": lambda model, batch: torch.func.jacrev(model)(batch[0]),
    "jacfwd": lambda model, batch: torch.func.jacfwd(model)(batch[0]),
    "hessian": lambda model, batch: torch.func.hessian(lambda x: model(x).sum())(batch[0]),
    "gradients per sample": lambda model, batch: torch.func.vmap(
        torch.func.grad(losses(model, batch)), in_dims=(None, 0, 0)
    )(dict(model.named_parameters()), *batch),
    "nothing batched in vmap": lambda model, batch: torch.func.vmap(
        lambda factor: model(batch[0]).sum() * factor
    )(torch.ones(2)),
    "batched gradients": batched_gradients,
    "export": lambda model, batch: torch.export.export(model, batch[:1]),
    "make_fx": lambda model, batch: make_fx(model)(batch[0]),
    "other weights": other_weights,
    "jit.trace": lambda model, batch: torch.jit.trace(model, batch[:1]),
    "jit.script": lambda model, batch: torch.jit.script(model),
    "jit.script of a copy": lambda model, batch: torch.jit.script(copy.deepcopy(model)),
    "fake tensors": fake,
    "meta tensors": meta,
    "symbolic trace": lambda model, batch: torch.fx.symbolic_trace(model),
}


@pytest.mark.slow(one_in=9)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of fake parameters
def test_a_function_over_the_model_is_looked_past(name: str) -> None:
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        for _ in range(2):
            FUNCTIONS[name](model, batch)
            loss_of(model, batch).backward()
            FUNCTIONS[name](model, batch)
            optimizer.step()
            optimizer.zero_grad()
            FUNCTIONS[name](model, batch)  # while a report is pending
    assert len(monitor.reports) == 2
    same(monitor.reports[0], plain_step())


def test_what_is_traced_is_the_model_alone() -> None:
    model, batch = mlp()
    plain = make_fx(model)(batch[0]).code
    with Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), on_error="raise"):
        assert make_fx(model)(batch[0]).code == plain


class KeptInTheHost(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks that count how often a tensor is unpacked, as from a disk."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, self._fetch)
        self.fetched = 0

    def _fetch(self, tensor: Tensor) -> Tensor:
        self.fetched += 1
        return tensor


def test_what_hooks_hold_for_the_backward_pass_is_fetched_by_that_alone() -> None:
    """batch_norm saves x̂, but the monitor does not unpack it: a hook may have to recompute it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.Flatten()).double()
    batch = torch.randn(6, 2, 3, dtype=torch.double), torch.randint(12, (6,))
    expected = one_step(copy.deepcopy(model), lambda m: loss_of(m, batch).backward())

    def kept(model: nn.Module) -> None:
        kept = KeptInTheHost()
        with kept:
            loss = loss_of(model, batch)
        assert kept.fetched == 0
        loss.backward()

    same(one_step(model, kept), expected)


def pickled(model: nn.Module) -> bytes:
    stream = io.BytesIO()
    torch.save(model, stream)
    return stream.getvalue()


COPIES: dict[str, Callable[[nn.Module], bytes]] = {
    "pickle": pickle.dumps,
    "pickle in Python": pickle._dumps,  # type: ignore[attr-defined]
    "torch.save": pickled,
}


@pytest.mark.parametrize("name", COPIES)
def test_pickles_say_nothing_of_the_monitor(name: str) -> None:
    model, batch = mlp()
    kept = model[0].register_forward_hook(nothing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        other = Monitor(model, optimizer, on_error="raise")
        other.attach()
        armed = COPIES[name](model), pickle.dumps(optimizer)
        other.close()  # the first monitor's hooks stay hidden
        armed += (COPIES[name](model),)
        twin = pickle.loads(pickle.dumps(model))
        loss_of(model, batch).backward()
        optimizer.step()
        waiting = COPIES[name](model)
    for data in (*armed, waiting, pickle.dumps(Hook(print))):
        assert b"adiv_monitor" not in data
    assert list(twin[0]._forward_hooks.values()) == [nothing]
    assert not twin[0]._forward_hooks_with_kwargs
    kept.remove()
    assert not model[0]._forward_hooks
    assert not vars(model[0]._forward_hooks)
    assert not vars(model[0]._forward_pre_hooks)
    assert monitor.latest is not None


def nothing(module: nn.Module, args: object, output: object) -> None: ...


def test_a_parameter_goes_to_another_process_without_a_warning() -> None:
    model, _ = mlp()
    with Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), on_error="raise"):
        ForkingPickler.dumps(model.state_dict(keep_vars=True))  # a warning would be an error


def through_pickle(monitor: Monitor) -> Monitor:
    found: Monitor = pickle.loads(pickle.dumps(monitor))
    return found


TWINS: dict[str, Callable[[Monitor], Monitor]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
}


@pytest.mark.parametrize("name", TWINS)
def test_a_closed_monitor_can_be_copied_with_its_reports(name: str) -> None:
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        loss_of(model, batch).backward()
        optimizer.step()
    twin = TWINS[name](monitor)
    assert twin.latest.layers.keys() == monitor.latest.layers.keys()
    twin.close()


class AnalogNoise(TorchDispatchMode):
    """Noise on every product, as a simulated analog chip has it; counts all functions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        result = func(*args, **(kwargs or {}))
        is_product = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return result + 0.01 * torch.randn_like(result) if is_product else result


class NoisyFunctions(TorchFunctionMode):
    """The same noise, by a function mode."""

    calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_product = func in (nn.functional.linear, torch.matmul, Tensor.matmul, torch.mm)
        return result + 0.01 * torch.randn_like(result) if is_product else result


def selective(model: nn.Module, x: Tensor) -> Tensor:
    def policy(context: object, function: object, *args: object, **kwargs: object) -> object:
        kept = "mm" in str(function) or "mul" in str(function)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    result: Tensor = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    return result


FORWARDS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda model, x: model(x),
    "checkpointed": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "selectively checkpointed": selective,
}


@pytest.mark.slow(one_in=11)
@pytest.mark.parametrize("realised", [False, True], ids=["", "realised"])
@pytest.mark.parametrize("around", [nullcontext, AnalogNoise, NoisyFunctions])
@pytest.mark.parametrize("forward", FORWARDS)
def test_modes_and_checkpoints_around_the_training_do_not_see_the_monitor(
    forward: str, around: Callable[[], Any], realised: bool
) -> None:
    runs = []
    for monitored in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        measures: Any = nullcontext()
        if monitored:
            options: Any = {"realised": realised, "on_error": "raise"}
            measures = monitor = Monitor(model, optimizer, every_n_steps=1, **options)
        counts = []
        with measures, warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                with around() as mode:
                    loss = FORWARDS[forward](model, torch.randn(5, 6)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                counts.append(getattr(mode, "calls", 0))
        runs.append([*model.parameters(), torch.get_rng_state(), torch.tensor(counts)])
    assert len(monitor.reports) == 3
    assert all(map(torch.equal, *runs))


def test_warnings_of_other_code_are_shown_once() -> None:
    """Every new filter would make Python repeat what it has shown."""
    model, batch = mlp()
    model.register_forward_hook(lambda *_: warnings.warn("of the model", stacklevel=1))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Monitor(model, optimizer, every_n_steps=1):
            for _ in range(4):
                loss_of(model, batch).backward()
                optimizer.step()
    assert [str(warning.message) for warning in shown].count("of the model") == 1
