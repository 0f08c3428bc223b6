"""Hooks of MkDocs: the navigation, links to files of the repository, and a check that the site loads nothing else."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = "https://github.com/quire-llm/quire/blob/main/"
_DOCS = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()(\.\./[^)#\s]+)")
_LOADED = re.compile(
    r"<(?:script|img|iframe|link(?=[^>]*rel=.?(?:stylesheet|preload|icon)))"
    r"[^>]*(?:src|href)=.?(?:https?:)?//[^>]*>"
)


def on_config(config: Any) -> Any:
    """Add the decisions, and pages that the navigation does not name."""
    named = set(_pages(config.nav))
    pages = sorted(path.name for path in _DOCS.glob("*.md") if path.name not in named)
    if pages:
        config.nav.append({"More": pages})
    decisions = sorted(path.relative_to(_DOCS).as_posix() for path in (_DOCS / "decisions").glob("*.md"))
    config.nav.append({"Decisions": decisions})
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Let links that leave the docs lead to the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def absolute(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, link[2]))
        return link[0] if path.startswith("docs/") else f"{link[1]}{REPOSITORY}{path}"

    return _LINK.sub(absolute, markdown)


def on_post_build(config: Any) -> None:
    """Show the navigation on narrower windows; fail if a page loads something from another site."""
    # The theme's limit is 1,220 pixels, which leaves out windows of 1,200.
    for path in Path(config.site_dir, "assets").rglob("*.min.*"):
        if path.suffix in (".css", ".js"):
            text = path.read_text()
            path.write_text(text.replace("76.25em", "70em").replace("76.234375em", "69.984375em"))
    for page in Path(config.site_dir).rglob("*.html"):
        if loaded := _LOADED.search(page.read_text()):
            raise ValueError(f"{page} loads {loaded[0]}, must load nothing from elsewhere")


def _pages(nav: Any) -> Iterator[str]:
    """Yield the paths in a navigation, which nests lists and dictionaries."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(entry)
