"""Find dead links in the built site, and resources that it loads from the network."""

import re
from pathlib import Path
from urllib.parse import unquote

_LINK = re.compile(r'<(?:a|img|script|link)\b[^>]*?(?:href|src)="([^"]+)"')
_LOADED = re.compile(r'<(?:img|script|link rel="stylesheet")\b[^>]*?(?:href|src)="(https?:[^"]+)"')
_ID = re.compile(r'\bid="([^"]+)"')


def faults_of(site: Path) -> list[str]:
    """Return a line for each link to a missing file or anchor, and each network resource."""
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    ids = {page: set(_ID.findall(text)) for page, text in pages.items()}
    faults = []
    for page, text in pages.items():
        name = page.relative_to(site)
        faults += [f"{name}: loads {address}" for address in _LOADED.findall(text)]
        for link in set(_LINK.findall(text)):
            path, _, anchor = unquote(link.replace("&amp;", "&")).partition("#")
            if re.match(r"[a-z]+:", path):
                continue
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            if not target.exists():
                faults.append(f"{name}: no file for {link}")
            elif anchor and target in ids and anchor not in ids[target]:
                faults.append(f"{name}: no anchor for {link}")
    return sorted(faults)
