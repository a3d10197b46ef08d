"""All sections in their order."""

from trak_core.report.conditions import projection
from trak_core.report.elements import Html, section
from trak_core.report.evaluation import evaluation
from trak_core.report.facts import Facts
from trak_core.report.glance import glance
from trak_core.report.how_to_read import reading
from trak_core.report.page import page
from trak_core.report.run import what_was_run
from trak_core.report.warnings import cautions, warnings_section


def document(facts: Facts, examples: Html) -> str:
    """Return the report as one HTML document.

    Args:
        facts: All that is known.
        examples: The section with targets and their strongest training samples.
    """
    found = cautions(facts)
    parts = [
        ("glance", "At a glance", glance(facts, found)),
        ("reading", "How to read a score", reading(facts)),
        ("examples", "Targets and the examples that moved them", examples),
        ("evaluation", "Evaluation: do the scores predict retraining?", evaluation(facts)),
        ("projection", "Projection and condition numbers", projection(facts)),
        ("warnings", "Warnings", warnings_section(found)),
        ("run", "What was run", what_was_run(facts)),
    ]
    study = facts.config["study"]
    lead = f"Training-data attribution with TRAK, written by Snakemake. Study: {study}"
    sections = [(a, title, section(a, title, markup)) for a, title, markup in parts]
    return page("Which training examples made these predictions?", lead, sections)
