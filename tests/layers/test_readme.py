"""Every Python block of the README runs unchanged and by itself."""

import blocks
import pytest

README = blocks.ROOT / "layers" / "README.md"
BLOCKS = blocks.python_blocks(README)


@pytest.mark.parametrize("source", BLOCKS, ids=lambda source: source.splitlines()[-1][:40])
def test_block(source):
    exec(compile(source, str(README), "exec"), {})


def test_every_public_name_is_explained():
    import adiv_layers

    text = README.read_text()
    assert [name for name in adiv_layers.__all__ if f"`{name}" not in text] == []
    assert len(BLOCKS) == 7
