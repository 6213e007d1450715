"""All questions: importing their files registers them."""

from importlib import import_module

for _name in ("answers", "axes", "backward", "data", "exchange", "fits", "free",
              "loss_inputs", "modules", "places", "state", "terms"):  # fmt: skip
    import_module(f"{__name__}.{_name}")
