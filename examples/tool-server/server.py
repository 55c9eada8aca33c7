"""A tool server that searches and shows the pages of a folder. Needs the package `mcp`, version 2.

python server.py FOLDER PORT
"""

import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

ROOT = Path(sys.argv[1]).resolve()
server = MCPServer("documentation")


@server.tool()
def search(text: str, limit: int | None = None) -> str:
    """Find the lines of the documentation that contain a text, with their pages."""
    found = [
        f"{page.relative_to(ROOT)}: {line.strip()}"
        for page in sorted(ROOT.rglob("*.md"))
        for line in page.read_text().splitlines()
        if text.lower() in line.lower()
    ]
    return "\n".join(found[: limit or 20]) or "nothing found"


@server.tool()
def read(page: str) -> str:
    """Show one page of the documentation."""
    path = (ROOT / page).resolve()
    if ROOT not in path.parents or not path.is_file():
        raise ToolError(f"no page {page}")
    return path.read_text()


if __name__ == "__main__":
    server.run("streamable-http", port=int(sys.argv[2]))
