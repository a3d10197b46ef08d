"""Templates show what they are given, as text, and miss nothing without a word."""

import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from reported import facts, lds

import trak_core.report
from trak_core.report.render import rendered

TEMPLATES = Path(trak_core.report.__file__).parent / "templates"


def test_a_name_asked_for_in_vain_is_an_error():
    with pytest.raises(UndefinedError, match="facts"):
        rendered("trust")


def test_text_is_escaped():
    evaluations = {"<b> & 'more'": lds(0.3, 0.2, 0.1, 0.6)["mine"]}
    markup = rendered("trust", facts=facts(evaluations=evaluations))
    assert "Experiment &lt;b&gt; &amp; &#39;more&#39;: LDS 0.30" in markup


def test_nothing_but_the_style_is_taken_for_markup():
    found = {path.name: path.read_text() for path in TEMPLATES.rglob("*.j2")}
    assert len(found) > 10
    taken = {name: n for name, text in found.items() if (n := len(re.findall(r"\|\s*safe", text)))}
    assert taken == {"head.html.j2": 1}
    assert not [name for name, text in found.items() if "autoescape" in text]
