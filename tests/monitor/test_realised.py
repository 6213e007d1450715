"""The realised effect of a step on the probe agrees with runs of copies by hand; float64.

The probe is the first eight samples of the first forward pass, in evaluation mode but for batch
norms.
"""

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import setups
import torch
from cases import OPTIMIZERS
from computes import Computes
from setups import cosine
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from adiv_monitor import Monitor, StepReport
from adiv_monitor.report import REALISED_MEASURES

EXACT = {"rel": 1e-9, "abs": 1e-9}
CRITERION = nn.CrossEntropyLoss()
Run = Callable[[nn.Module], Tensor]  # a forward pass that returns its loss


class Residual(nn.Module):
    """Linear layers with a skip, a norm, dropout, and one layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(8)
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        for _ in range(2):
            branch = functional.dropout(self.twice(self.norm(hidden)), 0.3, self.training)
            hidden = hidden + torch.tanh(branch)
        return self.head(hidden)


def block() -> nn.Module:
    """Return a transformer's layer with a head."""
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True)
    return Computes(lambda m, x: m.head(m.block(x).mean(1)), block=layer, head=nn.Linear(6, 3))


def batch_norm() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), nn.SiLU(), nn.Flatten()),
        *(nn.Dropout(0.2), nn.Linear(24, 3)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (5,)),
    "block": (block, (4, 6)),
    "batch norm": (batch_norm, (3, 5, 6)),
}


def made(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return a model and three batches."""
    torch.manual_seed(4)
    build, shape = MODELS[name]
    model = build().double()
    shapes = [(size, *shape) for size in (12, 5, 7)]
    return model, [(torch.randn(s, dtype=torch.float64), torch.randint(3, s[:1])) for s in shapes]


def loop(batches: Iterable[tuple[Tensor, Tensor]], criterion: Any = CRITERION) -> Run:
    """Return a function of forward passes, as those of micro-batches."""
    return lambda model: torch.stack([criterion(model(x), y) for x, y in batches]).mean()


def first_eight(batches: Iterable[tuple[Tensor, Tensor]]) -> Run:
    """Return a function of the probe's forward pass."""
    x, y = next(iter(batches))
    return lambda model: CRITERION(model(x[:8]), y[:8])


def at_rest(model: nn.Module) -> nn.Module:
    """Return a copy as it runs on the probe."""
    model = copy.deepcopy(model)
    for module in model.modules():
        module.training = isinstance(module, _NormBase)
    return model


def rows_of(module: nn.Module, tensor: Tensor) -> Tensor:
    if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(-1, tensor.shape[-1])


class Seen:
    """Records of inputs, outputs and gradients of all called layers in one run."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        self.inputs: dict[str, list[Tensor]] = defaultdict(list)
        self.z: dict[str, list[Tensor]] = defaultdict(list)
        self.G: dict[str, list[Tensor]] = defaultdict(list)
        handles = [
            module.register_forward_hook(self._save(path))
            for path, module in model.named_modules()
            if module._parameters and not isinstance(module, nn.MultiheadAttention)
        ]
        self.loss = run(model)
        self.loss.backward()
        for handle in handles:
            handle.remove()
        model.zero_grad()

    def _save(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            self.inputs[path].append(args[0].detach().clone())
            self.z[path].append(rows_of(module, output.detach()).clone())
            G = self.G[path]
            G.append(torch.zeros_like(self.z[path][-1]))
            place = len(G) - 1
            output.register_hook(lambda g: G.__setitem__(place, rows_of(module, g)))

        return hook


def truth(old: nn.Module, new: nn.Module, run: Run) -> dict[str, dict[str, float]]:
    """Compute the measures from the definitions: the same run with old, new and mid-way weights."""
    half = copy.deepcopy(old)
    for parameter, end in zip(half.parameters(), new.parameters(), strict=True):
        parameter.data += (end.detach() - parameter.data) / 2
    before, middle, after = (Seen(at_rest(model), run) for model in (old, half, new))
    found = {}
    for path in before.z:
        z, z_half, z_new = (torch.cat(seen.z[path]) for seen in (before, middle, after))
        moved = at_rest(new).get_submodule(path)
        old_inputs = before.inputs[path]
        with torch.no_grad():
            effective = torch.cat([rows_of(moved, moved(x)) for x in old_inputs]) - z
        G = torch.cat(before.G[path])
        active = G.norm(dim=1) > 0
        realised = (z_new - z)[active]
        error = 2 * realised - 4 * (z_half - z)[active]
        found[path] = {
            "realised_cosine": cosine(-realised, G[active]),
            "single_layer_share": cosine(realised, effective[active]),
            "first_order_error": float(error.norm() / realised.norm()),
        }
    return found


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, **options: Any
) -> StepReport:
    options = {"realised": CRITERION, "max_rows": None, **options}
    return setups.trained(model, run, optimizer=optimizer, **options)[0]


def check(report: StepReport, expected: dict[str, dict[str, float]]) -> None:
    assert not [note for note in report.notes if "probe" in note]
    assert expected.keys() <= report.layers.keys()
    for path, values in expected.items():
        for name, value in values.items():
            assert getattr(report.layers[path], name) == pytest.approx(value, **EXACT), (name, path)
    for reading in report.layers.values():  # also of layers inside an attention
        assert set(REALISED_MEASURES) <= reading.measures().keys()


@pytest.mark.slow(one_in=5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_measures_are_those_of_a_run_by_hand(name: str, optimizer: str) -> None:
    """Also of a loop with micro-batches, of which the first has the probe."""
    model, batches = made(name)
    old = copy.deepcopy(model)
    report = trained(model, OPTIMIZERS[optimizer](model.parameters()), loop(batches))
    check(report, truth(old, model, first_eight(batches)))


def test_the_probe_stays_that_of_the_first_measured_step() -> None:
    model, batches = made("residual")
    rest, old = iter(batches), []

    def run(model: nn.Module) -> Tensor:
        old[:] = [copy.deepcopy(model)]
        return loop([next(rest)])(model)

    *_, last = setups.trained(model, run, 3, realised=CRITERION, max_rows=None)
    assert last.step == 2
    check(last, truth(old[0], model, first_eight(batches)))


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_changes_as_in_a_second_run(name: str) -> None:
    model, batches = made(name)
    old = at_rest(model)
    report = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), loop(batches))
    x, y = batches[0][0][:8], batches[0][1][:8]
    losses = [functional.cross_entropy(m(x), y).item() for m in (old, at_rest(model))]
    change = losses[1] - losses[0]
    assert report.realised_loss_change == pytest.approx(change, **EXACT)
    assert report.to_dict()["realised_loss_change"] == report.realised_loss_change


def test_a_loss_that_the_model_gives() -> None:
    """With the output, as Hugging Face's do."""

    def forward(whole: nn.Module, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = whole.model(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    model, batches = made("residual")
    whole = Computes(forward, model=model.eval())
    x, y = batches[0]
    old, sgd = copy.deepcopy(whole), torch.optim.SGD(whole.parameters(), lr=0.1)
    of_output: Any = lambda output: output["loss"]  # noqa: E731
    report = trained(whole, sgd, lambda m: of_output(m(x, labels=y)), realised=of_output)
    expected = of_output(whole(x[:8], labels=y[:8])) - of_output(old(x[:8], labels=y[:8]))
    assert report.realised_loss_change == pytest.approx(expected.item(), **EXACT)
    assert report.layers["model.head"].realised_cosine is not None


def test_of_a_model_that_is_called_in_parts_the_first_is_known() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"encoder": nn.Linear(5, 4), "decoder": nn.Linear(4, 3)}).double()
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randint(3, (6,))
    run: Run = lambda m: CRITERION(m["decoder"](m["encoder"](x)), y)  # noqa: E731
    report = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), run)
    assert report.layers["encoder"].single_layer_share == pytest.approx(1, **EXACT)
    assert report.layers["decoder"].single_layer_share is None
    assert report.layers["decoder"].update_cosine is not None
    assert report.realised_loss_change is None
    assert any("The loss on the probe is not known" in note for note in report.notes)


def test_without_a_loss_the_activations_are_known() -> None:
    model, batches = made("residual")
    old, sgd = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
    report = trained(model, sgd, loop(batches), realised=True)
    for path, values in truth(old, model, first_eight(batches)).items():
        reading = report.layers[path]
        assert reading.realised_cosine is None
        if path != "head":  # a loss leaves rows of it out, if they are idle
            for name in ("single_layer_share", "first_order_error"):
                assert getattr(reading, name) == pytest.approx(values[name], **EXACT)
    assert report.realised_loss_change is None
    assert any(
        "realised_cosine and the cosines of attention are missing: they need the loss" in note
        for note in report.notes
    )
    assert (
        trained(model, sgd, loop(batches), realised=True, loss=CRITERION)
        .layers["head"]
        .realised_cosine
    )


def test_a_scripted_module_can_not_run_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = nn.Sequential(nn.Linear(5, 4), scripted)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    report = trained(model, sgd, lambda m: m(torch.ones(2, 5)).sum(), realised=True)
    assert report.layers["0"].single_layer_share is None
    assert any("is scripted, so its buffers can't be restored" in note for note in report.notes)


def test_a_model_that_overwrites_its_input_runs_again_on_a_copy() -> None:
    class Overwrites(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(1))

    model = Overwrites(5, 3).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 5, dtype=torch.float64)
    report = trained(model, sgd, lambda m: m(x.clone()).sum(), realised=lambda z: z.sum())
    assert report.layers[""].single_layer_share == pytest.approx(1, **EXACT)
    assert report.layers[""].realised_cosine == pytest.approx(1, **EXACT)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    class Checkpointed(Residual):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(self.enter(x))
            if self.checkpointed:
                return self.head(checkpoint(self.twice, hidden, use_reentrant=reentrant))
            return self.head(self.twice(hidden))

    torch.manual_seed(0)
    plain = Checkpointed().double()
    model = copy.deepcopy(plain)
    plain.checkpointed, model.checkpointed = False, True
    run = loop(made("residual")[1])
    expected, report = (
        trained(m, torch.optim.SGD(m.parameters(), lr=0.1), run) for m in (plain, model)
    )
    assert report.realised_loss_change == pytest.approx(expected.realised_loss_change, **EXACT)
    for path, reading in expected.layers.items():
        for name in REALISED_MEASURES:
            found = getattr(report.layers[path], name)
            if reentrant and name == "realised_cosine":
                assert found is None
            else:
                assert found == pytest.approx(getattr(reading, name), **EXACT), (path, name)
    assert any("The probe's gradient is not known" in n for n in report.notes) is reentrant


def test_a_pass_that_fails_is_said_and_a_lost_move_too() -> None:
    """Nothing fails but the probe's reading; a move below the outputs' rounding is noted."""

    class Once(nn.Linear):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise RuntimeError("not again")
            return super().forward(x)

    model = Once(5, 3)
    before = {name: dict(table) for name, table in vars(model).items() if isinstance(table, dict)}
    sgd = torch.optim.SGD(model.parameters(), lr=1e-6)
    with Monitor(model, sgd, realised=True, every_n_steps=1) as monitor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(2, 5)).sum()
        loss.backward()
        sgd.step()
        model(torch.ones(2, 5)).sum().backward()
        model.fails = True
        with pytest.warns(UserWarning, match="not again; training goes on"):
            sgd.step()
    first, last = monitor.reports
    assert any("lost in rounding, or hardly larger" in note for note in first.notes)
    assert any("failed when it ran again: RuntimeError: not again" in n for n in last.notes)
    assert last.layers[""].update_cosine is not None
    now = {name: dict(table) for name, table in vars(model).items() if isinstance(table, dict)}
    assert now == before


def test_a_compiled_model() -> None:
    """The forward passes run eagerly, and nothing is compiled because of the hooks."""
    model, batches = made("residual")
    twin = copy.deepcopy(model.eval())
    compiled, run = torch.compile(model, backend="eager"), loop(batches[:1])
    expected = trained(twin, torch.optim.SGD(twin.parameters(), lr=0.1), run)
    report = trained(compiled, torch.optim.SGD(model.parameters(), lr=0.1), run)
    for path, reading in expected.layers.items():
        for name in REALISED_MEASURES:
            found = getattr(report.layers[path], name)
            assert found == pytest.approx(getattr(reading, name), **EXACT)


def test_a_loss_that_was_not_seen_is_said() -> None:
    """Nor is one that is computed from the output by code outside of the model."""
    model, batches = made("residual")
    x, y = batches[0]
    log = nn.NLLLoss()
    for criterion, run in (
        (nn.CrossEntropyLoss(), loop(batches)),
        (log, lambda m: log(m(x).log_softmax(1), y)),
    ):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        report = trained(model, sgd, run, realised=criterion)
        assert report.realised_loss_change is None
        assert any("Loss was not seen to be called with the output" in n for n in report.notes)
        assert report.layers["head"].realised_cosine is None
        assert report.layers["head"].single_layer_share is not None


@pytest.mark.slow
def test_sampled_readings_keep_to_their_errors() -> None:
    """Sampled readings lie within three standard errors of the exact ones, up to a heavy tail."""
    model, _ = made("residual")
    model.eval()
    torch.manual_seed(1)
    x, y = torch.randn(8, 75, 5, dtype=torch.float64), torch.randint(3, (8, 75))

    def of_tokens(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits.transpose(1, 2), y)

    def run(model: nn.Module) -> Tensor:
        return of_tokens(model(x))

    def measured(max_rows: int | None, seed: int) -> StepReport:
        twin = copy.deepcopy(model)
        sgd = torch.optim.SGD(twin.parameters(), lr=0.1)
        return trained(twin, sgd, run, max_rows=max_rows, seed=seed, realised=of_tokens)

    whole = measured(None, 0)
    deviations = defaultdict(list)
    for seed in range(20):
        for path, reading in measured(128, seed).layers.items():
            for name in REALISED_MEASURES:
                exact, value = getattr(whole.layers[path], name), getattr(reading, name)
                if path == "enter" and name != "realised_cosine":  # its inputs have not moved
                    assert value == pytest.approx(exact, abs=1e-9)
                else:
                    deviations[name].append((value - exact) / reading.standard_error[name])
    for name, found in deviations.items():
        beyond = sum(abs(deviation) > 3 for deviation in found) / len(found)
        assert beyond <= (0.02 if name == "realised_cosine" else 0.07), name
        assert 0.6 < np.std(found) < 1.6, name


def test_a_function_judges_no_part_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, realised=lambda z: z.square().mean()) as monitor:
        model[1](model[0](torch.randn(6, 5))).sum().backward()
        optimizer.step()
        assert monitor.latest is not None
        assert monitor.latest.realised_loss_change is None
        assert "a part of the model, Linear, was called first" in monitor.latest.notes[0]
