"""All questions: importing their files registers them."""

from importlib import import_module

for _name in (
    *("activations", "answers", "axes", "backward", "beginning", "data", "exchange"),
    *("loss_inputs", "modules", "places", "state", "terms"),
):
    import_module(f"{__name__}.{_name}")
