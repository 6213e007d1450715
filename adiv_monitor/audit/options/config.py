"""Settings of an audit: options of the command line, which are also the keys of a YAML file."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from adiv_monitor.audit.options.fail_if import parse
from adiv_monitor.audit.options.usage import UsageError, needed, one_line
from adiv_monitor.diagnosis.hidden import without_secrets

# Lightning's names; float16 needs a scaled loss, which the audit's loop does not have.
PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")

Reader = Callable[
    [Any], Any
]  # from text or from a YAML value; raises ValueError with the expected form


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _whole(least: int) -> Reader:
    def read(value: Any) -> int:
        number = _number(value)
        if number != int(number) or number < least:
            raise ValueError(f"a whole number of at least {least}")
        return int(number)

    def checked(value: Any) -> int:
        try:
            return read(value)
        except (ValueError, OverflowError):
            raise ValueError(f"a whole number of at least {least}") from None

    return checked


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError("a number") from None


def _seconds(value: Any) -> float:
    number = _number(value)
    if not number >= 0:
        raise ValueError("a number of at least 0")
    return number


def _finite(value: Any) -> float:
    number = _number(value)
    if not 0 < number < math.inf:
        raise ValueError("a finite number above 0")
    return number


def _shape(value: Any) -> tuple[int, ...]:
    sizes = re.split(r"[,x×]", value.strip("()[] ")) if isinstance(value, str) else value
    sizes = [sizes] if isinstance(sizes, int) else sizes
    expected = "sizes of one sample without the batch, such as 3,64,64"
    try:
        return tuple(_whole(1)(size) for size in sizes)
    except (TypeError, ValueError):
        raise ValueError(expected) from None


def _arguments(value: Any) -> dict[str, Any]:
    expected = """arguments by name as JSON, such as '{"lr": 0.1}'"""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{expected} ({one_line(error)})") from None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(expected)
    return dict(value)


def _precision(value: Any) -> str:
    if value not in PRECISIONS:
        raise ValueError(f"one of {', '.join(PRECISIONS)}")
    return str(value)


def _rules(value: Any) -> tuple[str, ...]:
    rules = (value,) if isinstance(value, str) else tuple(map(_text, value))
    for rule in rules:
        parse(rule)
    return rules


def _option(default: Any, read: Reader, help: str, metavar: str = "") -> Any:
    about = {"read": read, "help": help, "metavar": metavar}
    if callable(default):
        return field(default_factory=default, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Config:
    """The model, the settings of its audit, and the place of the report; see each option's help."""

    model: str = _option(
        "",
        _text,
        "import path of a torch.nn.Module class, of a function that returns a module, or of an "
        "instance (torchvision.models.resnet18, my_project.train:build, train.py:model); "
        "timm:NAME; or hf:PATH of a config.json of transformers, or of its folder. Building it "
        "runs its code.",
        "MODEL",
    )
    run_script: bool = _option(
        False,
        _flag,
        "let code that is imported or called for the model, the data, the loss and the optimizer "
        "train and write over files of this folder; weights that it trained are audited as such",
    )
    model_args: Mapping[str, Any] = _option(
        dict,
        _arguments,
        "arguments of the class or function; values that look like secrets (api_key, password, "
        "token) are in no file of the report",
        "JSON",
    )
    checkpoint: str | None = _option(
        None, _text, "weights: .safetensors, or a state dict by torch.save", "FILE"
    )
    trust_checkpoint: bool = _option(
        False,
        _flag,
        "load a pickle that runs code; only from people you trust; not an option of --config",
    )
    data: str = _option(
        "random",
        _text,
        "random (learnable, in the shape that the model takes), digits, cifar10:ROOT, "
        "imagefolder:DIR, text:FILE, or package.module:function, called without arguments, for an "
        "iterable of batches: (inputs…, target), or dicts of the model's arguments",
        "DATA",
    )
    download: bool = _option(False, _flag, "fetch CIFAR-10 into ROOT if it is not there")
    input_shape: tuple[int, ...] | None = _option(
        None,
        _shape,
        "shape of one sample (3,64,64); by default the shape that the model accepts",
        "SIZES",
    )
    num_classes: int | None = _option(
        None,
        _whole(1),
        "number of classes of random data; by default the number of the model's outputs, at most "
        "10. To change the model's outputs, use --model-args",
        "N",
    )
    batch_size: int = _option(16, _whole(1), "number of samples in a batch", "N")
    loss: str | None = _option(
        None,
        _text,
        "cross_entropy, nll, mse, l1, smooth_l1, huber, binary_cross_entropy_with_logits; or the "
        "import path of a loss class, or of a function (output, target) or (model, batch) → "
        "scalar. By default cross_entropy for targets that are whole numbers, else mse; models of "
        "transformers use their own",
        "LOSS",
    )
    optimizer: str = _option(
        "AdamW",
        _text,
        "name in torch.optim, or import path of an optimizer class, or of a function model → "
        "optimizer",
        "NAME",
    )
    optimizer_args: Mapping[str, Any] = _option(
        dict, _arguments, """arguments of the optimizer, such as '{"lr": 0.1}'""", "JSON"
    )
    clip_norm: float | None = _option(None, _finite, "clip the gradient to this norm", "NORM")
    steps: int = _option(60, _whole(1), "number of steps to train a copy for", "N")
    seed: int = _option(0, _whole(0), "seed of initial weights, data and training", "N")
    device: str | None = _option(
        None, _text, "cpu, cuda, cuda:1, mps …; by default cuda if available", "DEVICE"
    )
    precision: str = _option("32-true", _precision, ", ".join(PRECISIONS), "P")
    realised: bool = _option(
        False,
        _flag,
        "also measure the actual change of the activations in each step, with all layers moved; "
        "costs two forward passes",
    )
    attention: bool = _option(False, _flag, "also measure attention scores")
    alignment: bool = _option(
        False,
        _flag,
        "also measure the alignment of weights, updates and activations, on the first batch",
    )
    try_fixes: bool = _option(
        True, _flag, "try the first fixes in short runs before recommending them (on by default)"
    )
    try_seconds: float = _option(
        math.inf,
        _seconds,
        "begin no trial that would end later than this many seconds after the first; the report "
        "says if that left a trial out. Otherwise the number of trials follows from steps and "
        "model, not from a clock",
        "SECONDS",
    )
    losses: str | None = _option(
        None,
        _text,
        "losses of the first steps of your own run: a JSON list, a metrics.csv of Lightning's "
        "CSVLogger, or a trainer_state.json; the verdict says if the copy behaves otherwise",
        "FILE",
    )
    fail_if: tuple[str, ...] = _option(
        tuple,
        _rules,
        "exit with code 1 if this rule holds: '[LAYERS:] MEASURE > NUMBER' (or >=, <, <=) at any "
        "layer and measured step, by more than two standard errors ('encoder.*: update_cosine < "
        "0'); the name of a finding (rate-too-high); or the least strength of a finding (act). May "
        "be repeated",
        "RULE",
    )
    out: str = _option("adiv-audit", _text, "folder of the report", "DIR")


ARGUMENTS = ("model_args", "optimizer_args")
NAMING = ("model", "data", "loss", "optimizer")  # these may be import paths
NAMES = {"try" if f.name == "try_fixes" else f.name: f for f in fields(Config)}  # as users write


def read(given: Mapping[str, Any], where: Callable[[str], str]) -> dict[str, Any]:
    """Return the values of options, checked.

    Args:
        given: option → text of the command line, or a value from YAML.
        where: function from an option's name to the name that its user knows, for errors.

    Raises:
        UsageError: there is no such option, or its value is not as expected.
    """
    values = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in NAMES:
            close = get_close_matches(name, NAMES, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(NAMES)}"
            raise UsageError(f"{where(name)}: there is no such option{hint}")
        option = NAMES[name]
        if value is None and option.default is None:
            continue
        try:
            values[option.name] = option.metadata["read"](value)
        except UsageError as error:
            raise UsageError(f"{where(name)}: {error}") from error
        except (ValueError, TypeError) as error:
            raise UsageError(f"{where(name)}: got {one_line(value)!r}, expected {error}") from error
    return values


def load(file: str) -> dict[str, Any]:
    """Return the options in a YAML file.

    Raises:
        UsageError: the file can't be read, or has other content.
    """
    yaml = needed("yaml", "--config")

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        """Reads 1e-3 as a number, which YAML 1.1 reads as text."""

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
        list("-+0123456789"),
    )
    try:
        content = yaml.load(Path(file).read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise UsageError(f"--config {file}: can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {file}: is no YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UsageError(
            f"--config {file}: holds a {type(content).__name__}, expected lines such as steps: 60"
        )
    return read(content, lambda name: f"--config {file}: {name}")


def dumped(config: Config) -> str:
    """Return the settings as YAML that `load` reads back, without secrets among arguments."""
    yaml = needed("yaml", "config.yaml")
    values = asdict(config)
    values |= {name: without_secrets(values[name]) for name in ARGUMENTS}
    plain = {
        name: list(value) if isinstance(value, tuple) else value
        for name, option in NAMES.items()
        for value in [values[option.name]]
    }
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return text


def default(name: str) -> Any:
    """Return the default of an option."""
    option = NAMES[name]
    if option.default_factory is not MISSING:
        return option.default_factory()
    return option.default
