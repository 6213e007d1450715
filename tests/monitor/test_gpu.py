"""On a GPU the monitor reads what it reads on a CPU, and changes nothing."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import cases
import function_cases
import pytest
import setups
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from zoo import ZOO
from zoo.marks import filtered
from zoo.runs import run

from adiv_monitor import Monitor, StepReport, audit
from adiv_monitor.alignment import Probe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = "cuda"
FUNCTIONS = [name for name in function_cases.CASES if not name.startswith("grouped")]


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """Make convolutions exact, and all operations that can be deterministic."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield
    torch.use_deterministic_algorithms(False)


def there(value: Any, device: str) -> Any:
    """Return copies of all tensors on the device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), value)


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def as_on_a_cpu(
    model: nn.Module,
    batches: list[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    make: Callable[[Any], torch.optim.Optimizer],
    **asked: Any,
) -> list[tuple[StepReport, StepReport]]:
    """Train there and on a CPU, and return the reports of each step; their readings agree.

    Of `asked`, the options of the monitor, functions for `alignment` are called with the device.
    """
    found = {}
    for device in ("cpu", GPU):
        own = copy.deepcopy(model).to(device)
        rest = iter(there(batches, device))
        options = dict(asked)
        if "alignment" in asked:
            options["alignment"] = asked["alignment"](device)
        optimizer = make(own.parameters())
        found[device] = setups.trained(
            own,
            lambda model, rest=rest: loss(model, next(rest)),
            len(batches),
            optimizer=optimizer,
            **options,
        )
    pairs = list(zip(found[GPU], found["cpu"], strict=True))
    for mine, theirs in pairs:
        assert (mine.unsupported, mine.coverage) == (theirs.unsupported, theirs.coverage)
        assert mine.notes == theirs.notes
        setups.same(mine, theirs, loosely=True)
    return pairs


# --- as on a CPU ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("max_rows", [3, None], ids=["sampled", "all-rows"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_reads_as_on_a_cpu(name: str, max_rows: int | None) -> None:
    case = function_cases.CASES[name]

    def loss(model: nn.Module, inputs: Any) -> Tensor:
        z = model(*inputs)
        aims = torch.linspace(-1.0, 2.0, z.numel(), dtype=z.dtype, device=z.device).view(z.shape)
        return (z - aims).square().sum() + (z * aims).sin().sum()

    adamw = partial(torch.optim.AdamW, lr=0.01)
    asked = {"max_rows": max_rows, "attainable": max_rows is None, "realised": True}
    ((found, _),) = as_on_a_cpu(case.model(), [case.data()], loss, adamw, **asked)
    assert found.coverage == 1.0 and not found.unsupported


@pytest.mark.parametrize("max_rows", [5, None], ids=["sampled", "all-rows"])
@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
@pytest.mark.parametrize("name", cases.CASES)
def test_a_model_reads_as_on_a_cpu(name: str, optimizer: str, max_rows: int | None) -> None:
    case = cases.CASES[name]
    batches, make = case.batches(3), cases.OPTIMIZERS[optimizer]
    asked: Any = {"max_rows": max_rows, "attainable": max_rows is None, "realised": True}
    asked["alignment"] = lambda device: Probe(there(case.batches(1)[0][0], device))
    for mine, theirs in as_on_a_cpu(case.model(), batches, cases.loss_of, make, **asked):
        assert mine.alignment.keys() == theirs.alignment.keys()
        for path, reading in mine.alignment.items():
            for measure, value in vars(reading).items():
                assert alike(value, vars(theirs.alignment[path])[measure]), (path, measure)


class Recurrent(nn.Module):
    """All that PyTorch's recurrent modules can do, and its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(8, 5, batch_first=True)
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.rnn = nn.RNN(5, 4, batch_first=True)
        self.cell = nn.GRUCell(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(tokens), [5, 4, 2], batch_first=True
        )
        seen = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]
        seen = self.gru(seen)[0]
        seen = self.rnn(self.attention(seen, seen, seen)[0])[0]
        return self.cell(seen[:, 0], self.cell(seen[:, 1]))


@pytest.mark.parametrize("max_rows", [4, None], ids=["sampled", "all-rows"])
def test_recurrent_modules_read_as_on_a_cpu(max_rows: int | None) -> None:
    torch.manual_seed(0)
    batch = torch.randint(7, (3, 5)), torch.randint(3, (3,))
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    asked: Any = {"max_rows": max_rows, "attention": True}
    as_on_a_cpu(Recurrent().double(), [batch] * 2, cases.loss_of, momentum, **asked)


# --- nothing is changed --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [filtered(name) for name in ZOO])
@pytest.mark.filterwarnings("ignore:.* does not have a deterministic implementation")
def test_a_model_of_the_zoo_trains_as_without_a_monitor(name: str) -> None:
    plain = run(ZOO[name], monitored=False, device=GPU)
    again = run(ZOO[name], monitored=False, device=GPU)
    assert again.losses == plain.losses, "without a monitor it trains differently each time"
    seen = run(ZOO[name], monitored=True, device=GPU, realised=True)
    seen.assert_same(plain)
    for report in (report for reports in seen.reports for report in reports):
        # cuDNN's dropout between recurrent layers can't be repeated: docs/limits.md.
        unseen = {path for path in report.unmeasured if not path.startswith("lstm.")}
        assert unseen == set(ZOO[name].unseen)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.LayerNorm(8 * 36),
        nn.Linear(8 * 36, 5),
    ).to(GPU)


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(16, 3, 8, 8, generator=generator)
    return x.to(GPU), torch.randint(5, (16,), generator=generator).to(GPU)


def scaled(half: torch.dtype) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    """Return a loop in mixed precision, whose scaler finds infinities at first in float16."""

    def loop(model: nn.Module, own: torch.optim.Optimizer) -> None:
        x, y = images()
        scaler = torch.amp.GradScaler(GPU, init_scale=2.0**40, enabled=half == torch.float16)
        for _ in range(40):
            own.zero_grad()
            with torch.autocast(GPU, dtype=half):
                loss = functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(own)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(own)
            scaler.update()

    return loop


def plainly(model: nn.Module, own: torch.optim.Optimizer) -> None:
    x, y = images()
    for _ in range(4):
        own.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        own.step()


def on_a_side_stream(model: nn.Module, own: torch.optim.Optimizer) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        plainly(model, own)
    torch.cuda.current_stream().wait_stream(side)


def compiled(mode: str) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    def loop(model: nn.Module, own: torch.optim.Optimizer) -> None:
        plainly(torch.compile(model, mode=mode), own)

    return loop


LOOPS = {
    "plain": plainly,
    "bfloat16": scaled(torch.bfloat16),
    "float16": scaled(torch.float16),
    "side-stream": on_a_side_stream,
}


def taken(
    loop: Callable[[nn.Module, torch.optim.Optimizer], None],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    monitored: bool = True,
    **options: Any,
) -> tuple[nn.Module, list[StepReport]]:
    model = small()
    own = optimizer(model.parameters(), lr=1e-3)
    torch.manual_seed(5)
    if not monitored:
        loop(model, own)
        return model, []
    with Monitor(model, own, every_n_steps=1, on_error="raise", **options) as monitor:
        loop(model, own)
    return model, list(monitor.reports)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_as_without_a_monitor(loop: str) -> None:
    expected, _ = taken(LOOPS[loop], monitored=False)
    model, reports = taken(LOOPS[loop], realised=True)
    assert_equal(model, expected)
    assert reports and reports[-1].coverage == 1.0
    if loop == "float16":  # the first steps were left out by the scaler
        assert 0 < len(reports) < 40


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_is_measured(mode: str) -> None:
    """Captured CUDA graphs write into memory of their own, which a step that is measured may not
    keep."""
    _, reports = taken(compiled(mode))
    assert [report.coverage for report in reports] == [1.0] * 4
    for mine, theirs in zip(reports, taken(plainly)[1], strict=True):
        for path, reading in mine.layers.items():
            assert reading.scale_mean == pytest.approx(theirs.layers[path].scale_mean, rel=1e-2)


def test_a_step_in_a_cuda_graph_is_not_measured_and_not_broken() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(GPU)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(6, 4, device=GPU), torch.randint(3, (6,), device=GPU)

    def step() -> None:
        functional.cross_entropy(model(x), y).backward()
        own.step()
        own.zero_grad(set_to_none=False)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with Monitor(model, own, every_n_steps=1, on_error="raise") as monitor:
        for _ in range(3):
            graph.replay()
        assert not monitor.reports
        step()
    assert monitor.latest is not None and monitor.latest.coverage == 1.0


def test_a_graph_that_is_captured_under_a_monitor_trains_as_without_one() -> None:
    def weights(*, monitored: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(GPU)
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = torch.randn(6, 4, device=GPU), torch.randint(3, (6,), device=GPU)

        def step() -> None:
            own.zero_grad(set_to_none=False)
            functional.cross_entropy(model(x), y).backward()
            own.step()

        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with Monitor(model, own, every_n_steps=1) if monitored else nullcontext():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                step()
            for _ in range(3):
                graph.replay()
        return [p.detach() for p in model.parameters()]

    plain = weights(monitored=False)
    with pytest.warns(UserWarning, match="captured in a CUDA graph"):
        assert all(map(torch.equal, weights(monitored=True), plain))


def test_a_measured_step_does_not_wait_for_the_device() -> None:
    """Only the report of the step before is waited for."""
    model = small()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = images()
    with Monitor(model, own, every_n_steps=1, on_error="raise") as monitor:
        for step in range(6):
            own.zero_grad()
            if step > 0:
                monitor.complete_report()
            torch.cuda.set_sync_debug_mode("error" if step > 3 else "default")
            try:
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            own.step()


def audited(device: str, *, rate: float) -> list[str]:
    torch.manual_seed(0)
    x = torch.randn(8, 32, 10)
    y = (x[..., :3].sum(-1) > 0).long()
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    report = audit(
        model,
        list(zip(x, y, strict=True)),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), rate),
        steps=24,
        realised=True,
        alignment=True,
    )
    return [finding.name for finding in report.findings]


@pytest.mark.parametrize("rate", [0.1, 300.0, 1e-5])
def test_an_audit_finds_what_it_finds_on_a_cpu(rate: float) -> None:
    assert audited(GPU, rate=rate) == audited("cpu", rate=rate)
