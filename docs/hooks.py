"""What MkDocs is told beside mkdocs.yml: pages of the repository's root are pages of the site too."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# Pages of the root, by their place in the site.
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
PLACES = {source: place for place, source in PAGES.items()} | {"LICENSE": "license.txt"}


def on_files(files: Files, config: Any) -> Files:
    """Adds the root's pages, and the licence as it is."""
    for place, source in PAGES.items():
        files.append(File.generated(config, place, content=relinked((ROOT / source).read_text(), root=True)))
    files.append(File.generated(config, "license.txt", content=(ROOT / "LICENSE").read_text()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links of pages in docs/ to those of the root."""
    return relinked(markdown, root=False)


def relinked(text: str, root: bool) -> str:
    """`text` with links as the site has them.

    >>> relinked("[plans](docs/plans.md#together), [changes](CHANGELOG.md)", root=True)
    '[plans](plans.md#together), [changes](changelog.md)'
    >>> relinked("[start](../README.md)", root=False)
    '[start](index.md)'
    """

    def place(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        if root and target.startswith("docs/"):
            return f"]({target.removeprefix('docs/')}{anchor})"
        name = target if root else target.removeprefix("../")
        return f"]({PLACES[name]}{anchor})" if name in PLACES and (root or target != name) else found[0]

    return re.sub(r"\]\(([^)\s#]+)(#[^)\s]*)?\)", place, text)
