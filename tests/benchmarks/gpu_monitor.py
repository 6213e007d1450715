"""The monitor's cost on a GPU, at realistic sizes, in bfloat16 by autocast.

Ratios are those of monitor.py: each step lies between two plain ones, eager or compiled as it is
itself. The measured steps of a compiled model run eagerly. Host time is that of a step on one
sample, for which the device waits for the host: the extra time of a measured step, per layer.
"""

import gc
import statistics
from collections.abc import Callable
from functools import partial

import torch
from models import GPT, Task, Trainer, ViT, images, text, vision
from monitor import Subject, peak, ratios, spread, timed, wait
from timing import here
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

MEASURED: dict[str, object] = {"every_n_steps": 1}
NOT_MEASURED: dict[str, object] = {"every_n_steps": 10**9}
TASKS = [
    Task(
        "GPT-2 small, 8×1,024 tokens",
        lambda: GPT(vocabulary=50257, length=1024, width=768, depth=12, heads=12),
        lambda: text(50257, 8, 1024),
        is_half=True,
    ),
    Task(
        "ResNet-50, 128×3×224×224",
        lambda: vision.resnet50(num_classes=10),
        lambda: images(128, 3, 224, 224),
        is_half=True,
    ),
    Task(
        "ViT-B/16, 64×3×224×224",
        partial(ViT, side=224, patch=16, channels=3, width=768, depth=12, heads=12, packed=True),
        lambda: images(64, 3, 224, 224),
        is_half=True,
    ),
]


class Llama(nn.Module):
    """A Llama of 1.2 billion parameters (1.5 with a head of its own), all of them in bfloat16."""

    def __init__(self, tied: bool) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
        config = LlamaConfig(**shape, **heads, tie_word_embeddings=tied, use_cache=False)
        self.model = LlamaForCausalLM(config).bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


# Batches that leave the device more to do than the host, and a model whose parameters are large.
LARGE = [
    Task("Llama 1.2 B, tied, 4×2,048 tokens", partial(Llama, True), partial(text, 128256, 4, 2048)),
    Task("GPT-2 small, 32×1,024 tokens", TASKS[0].model, partial(text, 50257, 32, 1024), True),
    Task("ResNet-50, 512×3×224×224", TASKS[1].model, partial(images, 512, 3, 224, 224), True),
    Task("ViT-B/16, 256×3×224×224", TASKS[2].model, partial(images, 256, 3, 224, 224), True),
    Task("Llama 1.5 B, 4×2,048 tokens", partial(Llama, False), partial(text, 128256, 4, 2048)),
]
TINY = [
    Task(
        "GPT, 2×8 tokens",
        lambda: GPT(vocabulary=16, length=8, width=8, depth=1, heads=2),
        lambda: text(16, 2, 8),
        is_half=True,
    ),
]


def measure(task: Task, compiled: bool, tiny: bool, emit: Callable[..., None]) -> None:
    """Yield all measurements of one model, a row at a time."""
    if compiled:
        torch.compiler.reset()
    device = here()
    eager = "eager" if tiny else "inductor"  # the backend for the compiled model
    backend = eager if compiled else None

    def trainer(monitor: dict[str, object] | None = None) -> Trainer:
        return Trainer(task, monitor, device, backend)

    plain = trainer()
    variants: dict[str, Subject] = {
        "not measured": trainer(NOT_MEASURED),
        "measured": trainer(MEASURED),
    }
    if not compiled:
        variants["plain again"] = trainer()
    rounds, seconds = (2, 0.0) if tiny else (30, 8.0)
    found = ratios(plain, variants, rounds, seconds, device)
    taken = statistics.median(timed(plain, device) for _ in range(3))
    mode = "compiled" if compiled else "eager"
    for name, values in found.items():
        emit(
            model=task.title,
            step=f"{mode}, {name}",
            **{"x plain": spread(values), "rounds": len(values), "plain, ms": f"{1e3 * taken:.1f}"},
        )
    del plain, variants
    if not compiled:
        costs(task, tiny, emit)
    gc.collect()


def costs(task: Task, tiny: bool, emit: Callable[..., None]) -> None:
    """Return launches, copies to the host, memory and host time of a plain and a measured step."""
    device = here()
    plain, measured = Trainer(task, None, device), Trainer(task, MEASURED, device)
    steps: dict[str, Subject] = {"plain": plain, "measured": measured}
    for subject in steps.values():
        for _ in range(3):
            subject.step()
            wait(device)  # a report is complete when the device has computed it
    assert measured.monitor is not None and measured.monitor.latest is not None
    layers = len(measured.monitor.latest.layers)
    for name, subject in steps.items():
        kernels, copies, waits, busy = launches(subject, device)
        emit(
            model=task.title,
            layers=layers,
            step=name,
            kernels=kernels,
            **{"copies to the host": copies, "waits for the device": waits},
            **{"device's work, ms": f"{busy:.1f}"},
        )
    for held in (plain, measured):
        held.x, held.y = held.x[:1], held.y[:1]
    times = {name: host_time(subject, device, 3 if tiny else 20) for name, subject in steps.items()}
    for name, one in times.items():
        each = (one - times["plain"]) / layers
        emit(
            model=task.title,
            **{"on one sample": name, "ms": f"{1e3 * one:.1f}"},
            **{"more than plain, µs per layer": f"{1e6 * each:.0f}"},
        )
    for subject in steps.values():
        subject.close()
    del plain, measured, steps, subject
    gc.collect()
    peaks = [peak(task, monitor, device) / 2**20 for monitor in (None, MEASURED)]
    names = ("peak of a plain step, MiB", "of a measured one")
    emit(model=task.title, **dict(zip(names, (f"{p:.1f}" for p in peaks), strict=True)))


def host_time(subject: Subject, device: str, rounds: int) -> float:
    """Return the median time of a step."""
    subject.step()
    return statistics.median(timed(subject, device) for _ in range(rounds))


def launches(subject: Subject, device: str) -> tuple[int, int, int, float]:
    """Return a step's kernel launches, copies to the host, waits, and the milliseconds of all."""
    activities = [ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        subject.step()
        wait(device)
    events = [
        event
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    copies = sum(event.name.startswith("Memcpy DtoH") for event in events)
    # The one by which this function waits for the step is that of the whole device.
    waits = sum(
        e.name in ("cudaStreamSynchronize", "cudaEventSynchronize") for e in profiler.events()
    )
    kernels = sum(not event.name.startswith(("Memcpy", "Memset")) for event in events)
    return kernels, copies, waits, sum(e.time_range.elapsed_us() for e in events) / 1e3
