"""Configuration of the documentation site, which ``make docs`` builds from the repository's pages.

The source folder is the repository itself, so that links between pages work in the site and on the
site that hosts the code.
"""

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

sys.path.insert(0, str(Path(__file__).parent))

from generate.check_site import faults_of
from generate.pages import filled_in

import trak_core

project = "trak-core"
author = "the trak-core maintainers"
version = release = trak_core.__version__
root_doc = "docs/index"
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *("benchmarks/RESULTS.md", "config/README.md", "docs/*.md", "docs/**/*.md"),
    "docs/notebooks/*.ipynb",
]
exclude_patterns = [".*", "build", "results*", "tests", "docs/package.md"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
nb_execution_mode = "off"  # a test runs the notebooks; the site shows their stored outputs
myst_heading_anchors = 4  # the same anchors as on the code's host

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"trak-core {release}"
html_extra_path = ["site"]  # redirects the site's root to its first page
html_copy_source = False
html_show_copyright = False
html_show_search_summary = False  # browsers load no further file for a page on disk
pygments_style = "tango"


def read_source(_app: Sphinx, name: str, source: list[str]) -> None:
    """Fill in the generated parts of a page."""
    source[0] = filled_in(source[0], name)


def leave_files_as_text(_app: Sphinx, tree: nodes.document) -> None:
    """Remove links to files that are not pages, because the site doesn't contain these files."""
    for link in list(tree.findall(addnodes.download_reference)):
        link.replace_self(link.children)


def take_signs_literally(_app: Sphinx, *given: Any) -> None:
    """Escape formulas of a docstring, such as |x|^2 and a * b, so that they are not markup."""
    lines: list[str] = given[-1]
    for i, line in enumerate(lines):
        parts = line.split("``")
        parts[::2] = [re.sub(r"[*|]", lambda sign: f"\\{sign[0]}", part) for part in parts[::2]]
        if not line.lstrip().startswith((">>>", "...")):
            lines[i] = "``".join(parts)


def check_site(app: Sphinx, error: Exception | None) -> None:
    """Raise an error if the site has a dead link or loads anything from a network."""
    if error is None and (faults := faults_of(Path(app.outdir).resolve())):
        raise ExtensionError("Every link of the site must work. Found: " + "; ".join(faults))


def setup(app: Sphinx) -> None:
    """Register this file's functions with Sphinx."""
    app.connect("source-read", read_source)
    app.connect("doctree-read", leave_files_as_text, priority=100)
    app.connect("autodoc-process-docstring", take_signs_literally, priority=100)
    app.connect("build-finished", check_site)
