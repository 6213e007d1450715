"""Counts the operations of a block, as torch's profiler sees them."""

from types import TracebackType

from torch.profiler import ProfilerActivity, profile

# Views, and what looks at types alone: nothing is launched for them.
FREE = ("aten::detach", "aten::promote_types")


class Operations:
    """Context that counts the operations called from Python; a dispatch mode misses our hooks'."""

    count = 0

    def __enter__(self) -> "Operations":
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._profile.__exit__(kind, error, traceback)
        events = {id(e): e for e in self._profile.events() if e.name.startswith("aten::")}
        outer = [e for e in events.values() if id(e.cpu_parent) not in events]
        self.count = sum(e.name not in FREE for e in outer)
