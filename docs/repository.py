"""Hooks of mkdocs: what pages link to elsewhere in the repository becomes a page of the site.

So one link serves both readers: in the repository `../examples/plain_loop.py` is the file, on the
site it is a page that shows it. Text and pictures only; Markdown is followed further. A link to a
file that there is not is left as it stands, and the strict build complains. A notebook becomes a
page with its code and its outputs.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = "docs/"
ROOM = "repository/"  # where files from elsewhere stand among the docs
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
SOURCES: dict[str, str] = {}  # page that was made → the file that it shows
LANGUAGES = {".py": "python", ".yml": "yaml", ".toml": "toml"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the findings into the navigation, in the order of their index."""
    index = "findings/README.md"
    linked = (name.removeprefix(DOCS) for name in _targets(DOCS + index, _read(DOCS + index)))
    pages = [name for name in linked if name.startswith("findings/")]
    _put(index, [index, *dict.fromkeys(pages)], config.nav or [])
    return config


def _put(index: str, pages: list[str], entries: list[Any]) -> None:
    """Replace the section that names nothing but its index by one that lists its pages."""
    for entry in entries:
        for title, listed in entry.items() if isinstance(entry, dict) else ():
            if listed == [index]:
                entry[title] = pages
            elif isinstance(listed, list):
                _put(index, pages, listed)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to from elsewhere in the repository."""
    pages = {DOCS + file.src_uri: file.content_string for file in files.documentation_pages()}
    wanted = ["CONTRIBUTING.md", "CHANGELOG.md"]  # in the navigation
    wanted += [target for path, text in pages.items() for target in _targets(path, text)]
    added: set[str] = set()
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        path = DOCS + notebook.src_uri
        SOURCES[_place(path)] = path
        files.append(File.generated(config, _place(path), content=_shown(_read(path))))
        files.remove(notebook)
    while wanted:
        path = wanted.pop()
        if path in added or path.startswith(DOCS):
            continue
        added.add(path)
        SOURCES[_place(path)] = path
        source = ROOT / path
        if source.suffix == ".png":
            files.append(File.generated(config, _place(path), abs_src_path=str(source)))
            continue
        text = _read(path)
        if source.suffix == ".md":
            wanted += _targets(path, text)
        else:
            text = f"# {path}\n\n````{LANGUAGES.get(source.suffix, 'text')}\n{text}````\n"
        files.append(File.generated(config, _place(path), content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where files stand among the docs."""
    here = page.file.src_uri
    path = SOURCES.get(here, DOCS + here)

    def led(link: re.Match[str]) -> str:
        target = _target(path, link[2])
        if target is None:
            return link[0]
        relative = posixpath.relpath(_place(target), posixpath.dirname(here))
        return f"{link[1]}{relative}{link[3] or ''}{link[4]}"

    return LINK.sub(led, markdown)


def _shown(notebook: str) -> str:
    """A notebook as Markdown: its texts, code, and what the code printed and drew."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                text = "".join(output["text"]).rstrip()
                parts.append(f"```{{.text .wrapped}}\n{text}\n```")
            elif "image/png" in output["data"]:
                drawn = output["data"]["image/png"].replace("\n", "")
                parts.append(
                    f'<img alt="What the code above draws" src="data:image/png;base64,{drawn}">'
                )
    return "\n\n".join(parts) + "\n"


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _place(path: str) -> str:
    """Where a file of the repository stands among the docs."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS).replace(".ipynb", ".md")
    path = path.replace("/README.md", ".md")  # else it would be the index of its section
    return f"{ROOM}{path}" if path.endswith((".md", ".png")) else f"{ROOM}{path}.md"


def _targets(path: str, text: str) -> Iterator[str]:
    for link in LINK.finditer(text):
        if (target := _target(path, link[2])) is not None:
            yield target


def _target(path: str, link: str) -> str | None:
    """The file that a link in another one means, from the root of the repository."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return target if (ROOT / target).is_file() else None
