"""Fails if a page of a built site links to a page or an anchor of the site that does not exist.

Usage: check_links.py FOLDER
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects the links and anchors of a tag."""
        for name, value in attrs:
            if value and name in ("href", "src") and tag in ("a", "img", "link", "script"):
                self.links.append(value)
            if value and name in ("id", "name"):
                self.anchors.add(value)


def problems(site: Path) -> list[str]:
    """Broken links, as `page: link`."""
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        # `print.html` repeats the pages, and `404.html` has a base of its own.
        if path.name in ("print.html", "404.html"):
            continue
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            exists = target.exists()
            anchored = (
                not url.fragment or target not in pages or url.fragment in pages[target].anchors
            )
            if not (exists and anchored):
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


def main() -> int:
    """Prints the broken links and returns the exit code."""
    site = Path(sys.argv[1]).resolve()
    broken = problems(site)
    for line in broken:
        print(f"broken link: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
