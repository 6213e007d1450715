"""The page of two reports, side by side."""


def compare() -> None:
    raise NotImplementedError
