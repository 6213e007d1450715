"""Atomic file writing: no guessable temporary name, no link followed, files alone replaced."""

import os
import stat
from pathlib import Path

import pytest
from example_reports import report

from adiv_monitor.files import write_whole
from adiv_monitor.sinks import HtmlSink

for package in ("jinja2", "matplotlib"):
    pytest.importorskip(package)
pytestmark = pytest.mark.filterwarnings("default")  # from libraries that draw the page


def running_page(folder: Path) -> Path:
    sink = HtmlSink(folder / "run.html")
    sink.write(report())
    sink.close()
    return folder / "run.html"


def replacing(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """Record the files that are replaced, and the mode of what replaces each."""
    modes: dict[Path, int] = {}
    plain = Path.replace

    def heard(path: Path, target: Path) -> Path:
        modes[target] = stat.S_IMODE(path.stat().st_mode)
        return plain(path, target)

    monkeypatch.setattr(Path, "replace", heard)
    return modes


def test_a_name_that_is_taken_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link planted under the temporary name causes an error, and its target is untouched."""
    (tmp_path / "victim").write_text("mine")
    path = running_page(tmp_path)
    before = path.read_bytes()
    replaced = replacing(monkeypatch)
    plain = Path.open

    def planted(path: Path, *args: str, **how: str) -> object:
        if path.name.startswith(".") and not path.exists():
            path.symlink_to(tmp_path / "victim")
        return plain(path, *args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", planted)
    with pytest.raises((FileExistsError, AssertionError)):
        running_page(tmp_path)
    assert (tmp_path / "victim").read_text() == "mine"
    assert not replaced and path.read_bytes() == before


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    path = running_page(tmp_path)
    (tmp_path / "victim").write_text("mine")
    path.unlink()
    path.symlink_to(tmp_path / "victim")
    running_page(tmp_path)
    assert (tmp_path / "victim").read_text() == "mine"
    assert not path.is_symlink() and path.read_bytes().startswith(b"<!doctype html")


def test_what_is_no_regular_file_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "replace", lambda *_: pytest.fail("it would be gone"))
    with pytest.raises(OSError, match="got /dev/stdout, expected a regular file"):
        write_whole({Path("/dev/stdout"): "", Path("/dev/fd/1"): ""})
    monkeypatch.undo()
    path = running_page(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises((OSError, AssertionError), match=r"expected a regular file|returns 2"):
        running_page(tmp_path)
    assert stat.S_ISFIFO(path.lstat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_has_the_mode_that_the_user_asks_for(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        path = running_page(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_that_is_replaced_keeps_its_mode(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = running_page(tmp_path)
    path.chmod(mode)
    replaced = replacing(monkeypatch)
    running_page(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == replaced[path] == mode


def test_text_that_has_no_utf8_is_written_as_escapes(tmp_path: Path) -> None:
    write_whole({tmp_path / "text": "é\ud800"})
    assert (tmp_path / "text").read_bytes() == "é\\ud800".encode()
