"""MkDocs' hooks: a link that leaves docs/ goes to the repository."""

import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[1]
# An inline link or image, or the definition of one.
LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )([^)\s#]+)", re.MULTILINE)


def on_page_markdown(markdown, page, config, files):
    here = posixpath.dirname(f"docs/{page.file.src_uri}")

    def outside(found):
        before, target = found.groups()
        path = posixpath.normpath(posixpath.join(here, target))
        if ":" in target or target.startswith("/") or path.startswith("docs/"):
            return found[0]
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: there is no {path}")
        return f"{before}{config.repo_url}/blob/main/{path}"

    return LINK.sub(outside, markdown)
