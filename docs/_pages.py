"""MkDocs hook: publishes the pages and programs outside `docs/`, so that links to them are checked like all others."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]


def on_files(files, config):
    """Adds the README as the first page, the other pages at the root, and the examples."""
    for source in [*ROOT.glob("*.md"), *ROOT.glob("examples/*.py"), ROOT / "LICENSE"]:
        page = "index.md" if source.name == "README.md" else str(source.relative_to(ROOT))
        files.append(File.generated(config, page, content=source.read_text()))


def on_page_markdown(markdown, **_):
    """Makes links relative to the site, in which `docs/` is the root."""
    return re.sub(r"\]\((docs|\.\.)/", "](", markdown)
