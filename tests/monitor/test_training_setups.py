"""What other monitors get wrong: accumulation, AMP, clipping, compile, tied and re-used layers, …

Every test compares with a plain run of the same step, or with the truth computed by hand.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import pytest
import torch
from cases import CASES, loss_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from adiv_monitor import LayerReading, Monitor, StepReport

EXACT = {"rel": 1e-9, "abs": 1e-12, "nan_ok": True}


def same(a: StepReport, b: StepReport, *, but: tuple[str, ...] = ()) -> None:
    assert a.layers.keys() == b.layers.keys()
    for path, reading in a.layers.items():
        expected = b.layers[path].measures()
        assert reading.measures().keys() == expected.keys()
        for name, value in reading.measures().items():
            if name not in but:
                assert value == pytest.approx(expected[name], **EXACT), f"{name} of '{path}'"


def one_step(
    model: nn.Module,
    backward: Callable[[nn.Module], None],
    between: Callable[[nn.Module], None] = lambda model: None,
    **options: object,
) -> StepReport:
    """A measured SGD step with something between backward pass and step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, on_error="raise", **options) as monitor:
        backward(model)
        between(model)
        optimizer.step()
    assert monitor.latest is not None
    return monitor.latest


def mlp() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return CASES["mlp"].model(), CASES["mlp"].batches(1, size=6)[0]


def test_micro_batches_are_one_batch() -> None:
    """Three accumulated micro-batches, one of them smaller, read like the whole batch."""
    model, (x, y) = mlp()
    twin = copy.deepcopy(model)

    def in_parts(model: nn.Module) -> None:
        for part in (slice(0, 3), slice(3, 5), slice(5, 6)):
            logits = model(x[part])
            (functional.cross_entropy(logits, y[part], reduction="sum") / len(x)).backward()

    whole = one_step(twin, lambda m: loss_of(m, (x, y)).backward())
    parts = one_step(model, in_parts)
    same(parts, whole)
    assert {r.rows_total for r in parts.layers.values()} == {6}


def test_amp_scaled_gradients_are_shown_unscaled() -> None:
    model, batch = mlp()
    plain = one_step(copy.deepcopy(model), lambda m: loss_of(m, batch).backward())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
    assert monitor.latest is not None
    same(monitor.latest, plain)
    for reading in monitor.latest.layers.values():
        assert reading.gradient_factor == pytest.approx(2.0**-12)


def test_a_fused_optimizer_unscales_by_itself() -> None:
    model, batch = mlp()
    plain = one_step(copy.deepcopy(model), lambda m: loss_of(m, batch).backward())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
    assert monitor.latest is not None
    same(monitor.latest, plain)
    for reading in monitor.latest.layers.values():
        assert reading.gradient_factor == pytest.approx(2.0**-12)


def test_a_step_that_the_scaler_skips_is_dropped_and_said() -> None:
    model, batch = mlp()
    twin = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        scaler.scale(loss_of(model, batch) * torch.inf).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert not monitor.reports
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
    assert monitor.latest is not None
    assert monitor.latest.step == 0
    assert "zeroed before a step" in monitor.latest.notes[0]
    same(monitor.latest, one_step(twin, lambda m: loss_of(m, batch).backward()))


@pytest.mark.parametrize("zero_first", [True, False], ids=["zero-forward", "forward-zero"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_zeroed_without_a_step(set_to_none: bool, zero_first: bool) -> None:
    """Whatever the order of zero_grad and the forward pass, zeroed gradients take their rows."""
    model, batch = mlp()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        loss_of(model, batch).backward()
        if zero_first:
            optimizer.zero_grad(set_to_none)
        loss = loss_of(model, batch)
        if not zero_first:
            optimizer.zero_grad(set_to_none)
        loss.backward()
        optimizer.step()
    assert monitor.latest is not None
    assert "zeroed before a step" in monitor.latest.notes[0]
    same(monitor.latest, one_step(twin, lambda m: loss_of(m, batch).backward()))


def test_clipped_gradients_are_those_the_optimizer_sees() -> None:
    model, batch = mlp()
    plain = one_step(copy.deepcopy(model), lambda m: loss_of(m, batch).backward())
    norm = torch.zeros(())

    def clip(model: nn.Module) -> None:
        nonlocal norm
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    clipped = one_step(model, lambda m: loss_of(m, batch).backward(), clip)
    factor = 0.01 / (norm.item() + 1e-6)
    same(clipped, plain, but=("update_ratio", "descent"))
    for path, reading in clipped.layers.items():
        assert reading.gradient_factor == pytest.approx(factor)
        assert reading.descent == pytest.approx(plain.layers[path].descent * factor**2)


class TwiceUsed(nn.Module):
    """One layer called three times, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.again.weight

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.tied(x)


def test_reused_and_tied_layers() -> None:
    """All calls' rows count, and e is what the one shared gradient does to each layer's rows."""
    model = TwiceUsed().double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(4, (5,))
    inputs: dict[str, list[Tensor]] = {"again": [], "tied": []}
    outputs: dict[str, list[Tensor]] = {"again": [], "tied": []}
    hooks = [
        m.register_forward_hook(
            lambda _, args, out, name=name: (
                inputs[name].append(args[0].detach()),
                out.retain_grad(),
                outputs[name].append(out),
            )[0]
        )
        for name, m in model.named_children()
    ]
    report = one_step(model, lambda m: functional.cross_entropy(m(x), y).backward())
    for hook in hooks:
        hook.remove()
    assert report.layers["again"].rows_seen == 15
    assert report.layers["tied"].rows_seen == 5
    gradient = model.again.weight.grad
    assert gradient is not None and model.again.bias.grad is not None
    for name, bias in (("again", model.again.bias.grad), ("tied", 0)):
        G = torch.cat([z.grad for z in outputs[name]])
        e = torch.cat(inputs[name]) @ gradient.T + bias
        cosine = functional.cosine_similarity(e.flatten(), G.flatten(), dim=0).item()
        assert report.layers[name].gradient_cosine == pytest.approx(cosine, **EXACT)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_neither_loses_nor_doubles(reentrant: bool) -> None:
    model, batch = mlp()
    plain = one_step(copy.deepcopy(model), lambda m: loss_of(m, batch).backward(), max_rows=4)
    x, y = batch

    def checkpointed(model: nn.Module) -> None:
        hidden = model[0](x)
        hidden = checkpoint(model[1:4], hidden, use_reentrant=reentrant)
        functional.cross_entropy(model[4:](hidden), y).backward()

    report = one_step(model, checkpointed, max_rows=None)
    assert {r.rows_total for r in report.layers.values()} == {6}
    assert {r.rows_seen for r in report.layers.values()} == {6}
    twin, _ = mlp()
    same(report, one_step(twin, lambda m: loss_of(m, batch).backward()))
    assert {r.rows_seen for r in plain.layers.values()} == {4}


def test_two_losses_through_one_graph_add_up() -> None:
    model, (x, y) = mlp()

    def twice(model: nn.Module) -> None:
        logits = model(x)
        functional.cross_entropy(logits, y).backward(retain_graph=True)
        logits.square().mean().backward()

    def once(model: nn.Module) -> None:
        logits = model(x)
        (functional.cross_entropy(logits, y) + logits.square().mean()).backward()

    same(one_step(copy.deepcopy(model), twice), one_step(model, once))


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile(m)", "m.compile()"])
def test_compiled_models_are_measured_and_not_recompiled(in_place: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def train(monitored: bool) -> list[StepReport]:
        torch._dynamo.reset()
        graphs.clear()
        model, batch = mlp()
        compiled: nn.Module = model
        if in_place:
            model.compile(backend=backend)
        else:
            compiled = torch.compile(model, backend=backend)  # type: ignore[assignment]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = Monitor(compiled, optimizer, every_n_steps=2, on_error="raise")
        if monitored:
            monitor.attach()
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(compiled, batch).backward()
            optimizer.step()
        monitor.close()
        return list(monitor.reports)

    train(monitored=False)
    unmonitored = len(graphs)  # 1, but for m.compile() under torch 2.6: 0
    reports = train(monitored=True)
    assert len(graphs) == unmonitored
    assert [report.step for report in reports] == [0, 2, 4]
    plain, batch = mlp()
    expected = one_step(plain, lambda m: loss_of(m, batch).backward())
    same(reports[0], expected)
    assert all(report.layers.keys() == expected.layers.keys() for report in reports)


def test_two_monitors_that_overlap_leave_compilation_as_it_was() -> None:
    """Armed in one order and released in the same: neither may restore what the other had set."""
    torch._dynamo.reset()
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with ExitStack() as stack:
        for model, optimizer in zip(models, optimizers, strict=True):
            stack.enter_context(Monitor(model, optimizer, on_error="raise"))
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        torch.compile(models[0], backend=backend)(torch.ones(1, 3))
    assert graphs == 1


def test_frozen_unreached_and_foreign_parameters() -> None:
    model = nn.ModuleDict(
        {
            "frozen": nn.Linear(4, 4),
            "partly": nn.Linear(4, 4),
            "used": nn.Linear(4, 3),
            "idle": nn.Linear(4, 4),
            "foreign": nn.Linear(3, 3),
            "attention": nn.MultiheadAttention(4, 1),
        }
    ).double()
    model["frozen"].requires_grad_(False)
    model["partly"].weight.requires_grad_(False)
    mine = [p for n, p in model.named_parameters() if "foreign" not in n and p.requires_grad]
    groups = [{"params": mine[:1], "lr": 0.5}, {"params": mine[1:]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    x = torch.randn(5, 4, dtype=torch.float64)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        hidden = model["partly"](model["frozen"](x))
        hidden = hidden + model["attention"](hidden, hidden, hidden)[0]
        model["foreign"](model["used"](hidden)).square().sum().backward()
        optimizer.step()
    report = monitor.latest
    assert report is not None
    assert report.layers.keys() == {"partly", "used"}
    assert report.layers["partly"].scale_mean == 1  # only the bias is trained
    assert report.layers["partly"].bias_share == 1
    assert report.unsupported.keys() == {"idle", "foreign", "attention", "attention.out_proj"}
    assert report.unsupported["idle"] == "no gradient reached it in this step"
    assert "holds none" in report.unsupported["foreign"]
    assert "forward was not called" in report.unsupported["attention.out_proj"]
    assert "attention=True" in report.unsupported["attention"]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert report.coverage == pytest.approx((4 + 15) / trainable)


def test_a_closure_is_measured_and_lbfgs_refused() -> None:
    model, batch = mlp()
    expected = one_step(copy.deepcopy(model), lambda m: loss_of(m, batch).backward())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        assert optimizer.step(closure) is not None
        optimizer.step(closure=closure)
    same(monitor.reports[0], expected)
    assert [len(report.layers) for report in monitor.reports] == [3, 3]

    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    with (
        pytest.warns(UserWarning, match="evaluated its closure"),
        Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor,
    ):
        optimizer.step(closure)
    assert monitor.latest is not None
    assert not monitor.latest.layers
    assert "no single gradient belongs to its update" in monitor.latest.notes[0]

    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1, max_eval=1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        optimizer.step(closure)
    assert monitor.latest is not None
    assert len(monitor.latest.layers) == 3


def test_without_an_optimizer_only_the_gradient_is_measured() -> None:
    model, batch = mlp()
    expected = one_step(copy.deepcopy(model), lambda m: loss_of(m, batch).backward())
    with Monitor(model, None, every_n_steps=2, on_error="raise") as monitor:
        for _ in range(3):
            model.zero_grad()
            loss_of(model, batch).backward()
            monitor.end_step()
    assert [report.step for report in monitor.reports] == [0, 2]
    for path, reading in monitor.reports[0].layers.items():
        assert reading.update_cosine is None
        assert reading.projection_cosine is None
        for name in ("gradient_cosine", "diagonal_cosine", "scale_cv", "interference_ratio"):
            value = getattr(expected.layers[path], name)
            assert getattr(reading, name) == pytest.approx(value, **EXACT)


Projection = Callable[[Tensor], Tensor]
PROJECTIONS: dict[str, Projection] = {
    "rows": lambda w: w / w.norm(dim=1, keepdim=True),
    "columns": lambda w: w / w.norm(dim=0, keepdim=True),
    "clipping": lambda w: w.clamp(-0.05, 0.05),
    "none": lambda w: w,
}


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_projections_after_the_step(projection: str, through_data: bool) -> None:
    """cos(a, u) and cos(a, −γ), where code rescales or clips the weights after each step."""
    model = nn.Linear(6, 4, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))
    expected = []
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            before, gamma = model.weight.detach().clone(), model.weight.grad.clone()
            optimizer.step()
            u = model.weight.detach() - before
            projected = PROJECTIONS[projection](model.weight.detach())
            if projection != "none" and through_data:
                model.weight.data = projected
            elif projection != "none":
                with torch.no_grad():
                    model.weight.copy_(projected)
            a = model.weight.detach() - before
            expected.append([cosine(a, u), cosine(a, -gamma), cosine(u, -gamma)])
    for report, values in zip(monitor.reports, expected, strict=True):
        reading = report.layers[""]
        found = [reading.projection_cosine, reading.applied_cosine, reading.parameter_cosine]
        assert found == pytest.approx(values, **EXACT)
        assert (values[0] < 0.999) == (projection != "none")


def test_a_projection_that_begins_later_is_noticed() -> None:
    """Its first report says what is missing; the next one has it."""
    model = nn.Linear(6, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 6, dtype=torch.float64)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        for step in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step >= 2:
                model.weight.data *= 0.9
    readings: list[LayerReading] = [report.layers[""] for report in monitor.reports]
    assert readings[1].projection_cosine == 1
    assert readings[2].projection_cosine is None
    assert "weights changed after the optimizer's step" in monitor.reports[2].notes[0]
    for reading in readings[3:]:
        assert reading.projection_cosine is not None
        assert reading.projection_cosine < 0.9


def cosine(a: Tensor, b: Tensor) -> float:
    return ((a * b).sum() / a.norm() / b.norm()).item()


def test_gradients_that_reach_no_parameter_are_no_part_of_the_step() -> None:
    """An attack on the input first, as in adversarial training: only the training pass counts."""
    model, (x, y) = mlp()

    def attacked(model: nn.Module) -> None:
        probe = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(functional.cross_entropy(model(probe), y), probe)
        functional.cross_entropy(model(x + 0 * slope), y).backward()

    expected = one_step(copy.deepcopy(model), lambda m: loss_of(m, (x, y)).backward())
    same(one_step(copy.deepcopy(model), attacked), expected)
    attained = one_step(copy.deepcopy(model), attacked, attainable=True)
    alone = one_step(model, lambda m: loss_of(m, (x, y)).backward(), attainable=True)
    same(attained, alone)


def test_gradients_taken_without_accumulating_are_no_part_of_the_step() -> None:
    """`autograd.grad` for the weights, with `.grad` zeroed in place: nothing is lost."""
    model, batch = mlp()
    expected = one_step(copy.deepcopy(model), lambda m: loss_of(m, batch).backward())

    def probe_then_train(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(2):
            torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
        loss_of(model, batch).backward()

    same(one_step(model, probe_then_train), expected)


def test_a_layer_frozen_during_another_networks_step() -> None:
    """A discriminator is frozen while its generator steps: those passes are not its own."""
    critic, generator = nn.Linear(4, 1).double(), nn.Linear(3, 4).double()
    optimizers = {
        "critic": torch.optim.SGD(critic.parameters(), lr=0.1),
        "generator": torch.optim.SGD(generator.parameters(), lr=0.1),
    }
    noise = torch.randn(6, 3, dtype=torch.float64)
    with Monitor(critic, optimizers["critic"], on_error="raise") as monitor:
        critic.requires_grad_(False)
        critic(generator(noise)).sum().backward()
        optimizers["generator"].step()
        critic.requires_grad_(True)
        fake = generator(noise).detach()
        critic(fake).square().sum().backward()
        optimizers["critic"].step()
    assert monitor.latest is not None
    assert monitor.latest.layers[""].rows_total == 6
    assert monitor.latest.layers[""].gradient_cosine > 0.5


def test_evaluation_with_gradients_on_does_not_use_up_the_rows() -> None:
    model, batch = mlp()
    expected = one_step(copy.deepcopy(model), lambda m: loss_of(m, batch).backward(), max_rows=6)

    def after_rollouts(model: nn.Module) -> None:
        for _ in range(20):
            model(batch[0])
        loss_of(model, batch).backward()

    same(one_step(model, after_rollouts, max_rows=6), expected)


class Inner(torch.optim.Optimizer):
    """A base class that torch hooks, with a subclass whose step calls it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1)


class Outer(Inner):
    """Steps through its base class."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()


def test_a_step_within_a_step_counts_once() -> None:
    model, batch = mlp()
    expected = one_step(copy.deepcopy(model), lambda m: loss_of(m, batch).backward())
    Inner(model.parameters())  # torch puts hooks on a class's step when it is first used
    optimizer = Outer(model.parameters())
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    assert [report.step for report in monitor.reports] == [0, 1, 2]
    same(monitor.reports[0], expected)


class Replacing(torch.optim.SGD):
    """Throws `.grad` away when it has stepped."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = super().step(closure)
        self.zero_grad()
        return loss


class Scaling(torch.optim.SGD):
    """From its 3rd step on changes `.grad` without a trace in its version counter."""

    count = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        self.count += 1
        loss = super().step(closure)
        if self.count > 2:
            for p in self.param_groups[0]["params"]:
                p.grad.data.mul_(-2)
        return loss


@pytest.mark.parametrize("optimizer", [Replacing, Scaling])
def test_what_the_optimizer_does_to_grad(optimizer: type[torch.optim.SGD]) -> None:
    model, batch = mlp()
    own = optimizer(model.parameters(), lr=0.1)
    with Monitor(model, own, every_n_steps=1, on_error="raise") as monitor:
        for _ in range(5):
            own.zero_grad()
            loss_of(model, batch).backward()
            own.step()
    cosines = [report.layers["0"].parameter_cosine for report in monitor.reports]
    lost = [2] if optimizer is Scaling else []
    for step, value in enumerate(cosines):
        assert value is None if step in lost else value == pytest.approx(1, **EXACT)
    if lost:
        assert "changed .grad during its step" in monitor.reports[2].notes[0]


class MovesFirst(torch.optim.Optimizer):
    """Asks for the gradient somewhere else than where the step begins, as SAM does."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(0.1)
        with torch.enable_grad():
            closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1).sub_(p.grad, alpha=0.1)


def test_an_optimizer_that_moves_the_weights_first_is_refused() -> None:
    model, batch = mlp()
    optimizer = MovesFirst(model.parameters())

    def closure(scale: float = 1.0) -> Tensor:
        loss = loss_of(model, batch) * scale
        loss.backward()
        return loss

    with Monitor(model, optimizer, on_error="raise") as monitor:
        optimizer.step(closure)
    assert monitor.latest is not None
    assert not monitor.latest.layers
    assert "as SAM does" in monitor.latest.notes[0]


def test_closures_get_their_arguments_and_unused_ones_are_told() -> None:
    model, batch = mlp()

    class Asks(MovesFirst):
        def step(self, closure: Callable[[bool], Tensor]) -> None:  # type: ignore[override]
            assert closure(True).item() == 1

    def closure(flag: bool) -> Tensor:
        assert flag
        return torch.ones(())

    optimizer = Asks(model.parameters())
    with Monitor(model, optimizer, on_error="raise"):
        optimizer.step(closure)

    class Ignores(MovesFirst):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            return None

    ignoring = Ignores(model.parameters())
    with (
        pytest.warns(UserWarning, match="evaluated its closure 0 times"),
        Monitor(model, ignoring) as monitor,
    ):
        loss_of(model, batch).backward()
        ignoring.step(closure)
    assert monitor.latest is not None
    assert "0 times" in monitor.latest.notes[0]


def test_a_fused_step_that_is_skipped_is_not_reported_as_a_step() -> None:
    model, batch = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        for factor in (torch.inf, 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not monitor.reports[0].layers
    assert "skipped the step" in monitor.reports[0].notes[0]
    for report in list(monitor.reports)[1:]:
        assert all(0 < r.parameter_cosine < 1 for r in report.layers.values())


def test_a_step_inside_autocast_is_measured_in_full_precision() -> None:
    model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    found = []
    for inside in (False, True):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        with Monitor(twin, optimizer, on_error="raise") as monitor:
            functional.cross_entropy(twin(x), y).backward()
            with torch.autocast("cpu", enabled=inside):
                optimizer.step()
        assert monitor.latest is not None
        found.append(monitor.latest)
    same(*found)


def test_only_rows_of_an_embedding_that_were_used_tell_the_loss_scale() -> None:
    """Of a large table nearly every gradient entry is zero; the factor is right all the same."""
    model = nn.Embedding(50_000, 8)
    tokens = torch.tensor([3, 17, 49_000])
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        scaler.scale(model(tokens).square().sum()).backward()
        scaler.step(optimizer)
    assert monitor.latest is not None
    reading = monitor.latest.layers[""]
    assert reading.gradient_factor == pytest.approx(1 / 4096)
    assert reading.effective_lr == pytest.approx(0.1, rel=1e-4)


def test_names_of_wrappers_are_dropped_but_not_the_users_own() -> None:
    class Residual(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.module(x))

    inner = nn.Sequential()
    inner.add_module("norm", nn.LayerNorm(4))
    model = nn.Sequential(Residual(inner))
    report = one_step(nn.DataParallel(model), lambda m: m(torch.randn(3, 4)).sum().backward())
    assert report.layers.keys() == {"0.norm", "0.module.norm"}


def test_inputs_far_from_zero_do_not_upset_the_normalisers() -> None:
    """A mean thousands of deviations away: x̂ is still right in float32."""
    x = 2000 + 0.3 * torch.randn(16, 4, 5, 5)
    for norm in (nn.BatchNorm2d(4), nn.GroupNorm(2, 4)):
        report = one_step(norm, lambda m: (m(x) * torch.randn(16, 4, 5, 5)).sum().backward())
        assert report.layers[""].scale_mean == pytest.approx(2, rel=1e-2)


def test_a_raw_model_trained_through_a_compiled_one() -> None:
    """The monitor holds the raw model: its hooks must not break the compiled graph."""
    torch._dynamo.reset()
    model, batch = mlp()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, every_n_steps=3, on_error="raise") as monitor:
        for _ in range(7):
            optimizer.zero_grad()
            loss_of(compiled, batch).backward()
            optimizer.step()
    assert [report.step for report in monitor.reports] == [0, 3, 6]
    assert all(len(report.layers) == 3 for report in monitor.reports)


def test_a_compiled_optimizer_step() -> None:
    torch._dynamo.reset()
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    with Monitor(model, optimizer, every_n_steps=2, on_error="raise") as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            step()
    assert [report.step for report in monitor.reports] == [0, 2, 4]
    assert all(len(report.layers) == 3 for report in monitor.reports)
