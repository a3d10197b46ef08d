"""Render HTML pages of results from templates, and determine which warnings the pages show.

The folder templates/warnings/ contains the texts of the warnings. Templates escape all texts that
they insert, and an undefined name in a template raises an error.
"""

import base64
import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trak_core.config.cross_checks import lists_of
from trak_core.lists.lists import ENOUGH_TARGETS
from trak_core.report import charts, template_filters
from trak_core.report.explore_data import EACH_ON_PAGE, PageContents
from trak_core.report.read_results import (
    NEAR_ZERO,
    File,
    Results,
    condition_number,
    output_of,
    rows_with,
)
from trak_core.settings import EXACT, Combine

# The limits beyond which warnings are shown. Features are float32, with a relative error of 6e-8. A
# condition number of 1e6 can increase this error to 6 % of a score.
LIMITS = {"checkpoints": 5, "loss_weight": NEAR_ZERO, "condition": 1e6, "targets": ENOUGH_TARGETS}
# With fewer targets, the standard deviation of model outputs between targets is too uncertain for a
# warning that model outputs differ more between runs.
_ENOUGH_TARGETS = 8
# The largest number n of training samples for which a warning suggests exact scores. They need
# three n x n matrices in float64, which take 0.6 GB for n = 5000.
_MOST_EXACT = 5000


@dataclass(frozen=True, slots=True)
class StudyWarning:
    """A warning, with the name of its template and the values that the template shows."""

    name: str
    shown: Mapping[str, Any] = field(default_factory=dict)


def study_warnings(results: Results) -> list[StudyWarning]:
    """Return the warnings about the results of a study, with the most important ones first."""
    scores = results.experiments
    return [
        *_predictions(scores[0]),
        *_lds(results),
        *_suspects(results),
        *_checkpoints(scores[0]),
        *(warning for experiment in scores for warning in _trained_on(experiment)),
        *_loss_weights(scores[0]),
        *_matrices(results),
        *_disagreement(scores),
    ]


def score_warnings(experiment: File) -> list[StudyWarning]:
    """Return the warnings about the scores of one experiment."""
    kinds = (_predictions, _checkpoints, _trained_on, _loss_weights)
    warnings = [warning for kind in kinds for warning in kind(experiment)]
    return [*warnings, *_disagreement([experiment])]


def _predictions(scores: File) -> Iterator[StudyWarning]:
    """Yield a warning if the models predict their training samples badly."""
    fit = scores.attributes.get("fit")
    if fit and fit.is_doubtful:
        yield StudyWarning("no_fit", {"fit": fit})


def _lds(results: Results) -> Iterator[StudyWarning]:
    for name, evaluation in results.evaluations.items():
        scores = evaluation.row("summary", kind="scores")
        shown = {"experiment": name, "scores": scores}
        if scores.low <= 0:
            yield StudyWarning("predicts_nothing", shown)
        baselines = rows_with(evaluation.tables["summary"], kind="baseline")
        better = [row for row in baselines if row.lds > scores.lds]
        # The baseline ends_of_runs uses some of the checkpoints of the scores. Its LDS is therefore
        # similar, and may be higher by chance. This baseline counts as better only if the interval
        # of the difference is below 0.
        better = [row for row in better if row.method != "ends_of_runs" or row.behind_high < 0]
        if better:
            yield StudyWarning("simpler_rule", shown | {"better": better})


def _suspects(results: Results) -> Iterator[StudyWarning]:
    """Yield a warning if the list of suspects is computed from too few targets."""
    named = lists_of(results.config).get("suspects", {}).get("experiment")
    worst_fitted = output_of(results.experiments[0]).worst_fitted
    for file in results.experiments:
        targets = file.tables["targets"]
        if file.spec["experiment"] == named and len(targets) < ENOUGH_TARGETS:
            yield StudyWarning("few_targets", {"worst_fitted": worst_fitted, "n": len(targets)})


def _checkpoints(scores: File) -> Iterator[StudyWarning]:
    n, n_train = len(scores.spec["checkpoints"]), scores.attributes["n_train"]
    if n < LIMITS["checkpoints"]:
        is_of_texts = output_of(scores).place.startswith("language_modelling.")
        is_exact = scores.spec["projection"]["kind"] == EXACT
        may_be_exact = n == 1 and is_of_texts and n_train <= _MOST_EXACT and not is_exact
        shown = {"n": n, "n_train": n_train, "may_be_exact": may_be_exact}
        yield StudyWarning("few_checkpoints", shown)
    # Checkpoints are equal if their files are equal, or if the outputs of all runs are equal.
    ids: dict[str, list[str]] = {}
    for checkpoint in scores.spec["checkpoints"]:
        if not isinstance(checkpoint, str):  # Answers of ``trak ask`` contain only the id.
            ids.setdefault(checkpoint["sha256"], []).append(checkpoint["id"])
    equal = [f"{', '.join(same[:-1])} and {same[-1]}" for same in ids.values() if len(same) > 1]
    deviations = scores.tables["targets"]["output_sd"].to_numpy()
    if not equal and len(scores.spec["runs"]) > 1 and not deviations.any():
        equal = ["The last checkpoints of all runs"]
    if equal:
        yield StudyWarning("equal_checkpoints", {"equal": "; ".join(equal)})


def _trained_on(scores: File) -> Iterator[StudyWarning]:
    """Yield a warning if most targets are training samples."""
    n, n_targets = scores.attributes.get("n_trained_on", 0), len(scores.tables["targets"])
    if n > n_targets / 2:
        shown = {"n": n, "n_targets": n_targets, "experiment": scores.spec["experiment"]}
        yield StudyWarning("trained_on", shown)


def _loss_weights(scores: File) -> Iterator[StudyWarning]:
    # Answers of ``trak ask`` do not have this attribute.
    saturated = scores.attributes.get("saturated", 0)
    # Loss weights that are residuals have the unit of the label, so a fixed limit is meaningless.
    if saturated > 0.5 and output_of(scores).weight_is_probability:
        along = scores.spec["combine"] == Combine.UNIT_AVERAGE
        shown = {"part": saturated, "power": scores.spec["loss_weight_power"], "along": along}
        yield StudyWarning("saturated", shown)


def _matrices(results: Results) -> Iterator[StudyWarning]:
    damping = results.config["scoring"]["damping"]
    conditions = [(condition_number(m, damping), m) for m in results.matrices]
    bad = [pair for pair in conditions if pair[0] > LIMITS["condition"]]
    if bad:
        condition, matrix = max(bad, key=lambda pair: pair[0])
        checkpoint = matrix.spec["checkpoint"]["id"]
        shown = {"n": len(bad), "condition": condition, "checkpoint": checkpoint}
        yield StudyWarning("near_singular", shown)


def _disagreement(scores: Sequence[File]) -> Iterator[StudyWarning]:
    """Yield a warning if model outputs differ more between runs than between targets."""
    targets = [row for file in scores for row in rows_with(file.tables["targets"])]
    if len(scores[0].spec["runs"]) > 1 and len(targets) >= _ENOUGH_TARGETS:
        within = sqrt(fmean(target.output_sd**2 for target in targets))
        between = pstdev(target.output for target in targets)
        if within > between:
            yield StudyWarning("disagreement", {"within": within, "between": between})


_FOLDER = Path(__file__).parent
_KINDS = ("ceiling", "scores", "baseline")
# The largest number of entries that are shown of a list or a mapping in the config.
_LONG = 40


def ranked(evaluation: File) -> list[Any]:
    """Return the rows of the summary: noise ceiling, scores, and baselines from best to worst."""
    rows = rows_with(evaluation.tables["summary"])
    return sorted(rows, key=lambda row: (_KINDS.index(row.kind), -row.lds))


def per_target(evaluation: File) -> list[tuple[Any, float, float | None]]:
    """Return a tuple for each target: id, correlation, and noise ceiling (None if unknown)."""
    scores, ceilings = (
        {
            row.target_id: row.correlation
            for row in rows_with(evaluation.tables["targets"], method=m)
        }
        for m in ("scores", "noise_ceiling")
    )
    return [(i, value, ceilings.get(i)) for i, value in scores.items()]


def worked_example(experiment: File) -> Mapping[str, Any] | None:
    """Return an example of a target that has a positive and a negative score, or None.

    The key ``target`` contains the target's row. ``helpful`` and ``harmful`` contain the rows of
    its largest and its lowest score, and ``ratio`` is the absolute ratio of these two scores.
    """
    for target in rows_with(experiment.tables["shown"]):
        helpful, harmful = (experiment.strongest(target.id, sign)[:1] for sign in (1, -1))
        if helpful and harmful:
            ratio = abs(helpful[0].score / harmful[0].score)
            return {"target": target, "helpful": helpful[0], "harmful": harmful[0], "ratio": ratio}
    return None


def _shortened(value: Any) -> Any:
    """Return a value of the config, with long lists and mappings in it shortened."""
    if isinstance(value, Mapping):
        items = [(str(k), _shortened(v)) for k, v in value.items()]
        more = {"...": f"{len(items) - _LONG:,} more"} if len(items) > _LONG else {}
        return dict(items[:_LONG]) | more
    if isinstance(value, list | tuple):
        more = [f"... {len(value) - _LONG:,} more"] if len(value) > _LONG else []
        return [_shortened(v) for v in value[:_LONG]] + more
    return value


def config_text(config: Mapping[str, Any]) -> str:
    """Return a config as YAML, with long lists shortened."""
    # Flow style at the leaves puts many ids of a list on one line.
    return yaml.safe_dump(
        _shortened(config), sort_keys=False, default_flow_style=None, width=90, allow_unicode=True
    ).rstrip()


def _made(provenance: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the provenance of a file and of the files from which it was computed, in a list."""
    return [provenance, *(m for part in provenance.get("made_from", ()) for m in _made(part))]


def versions(files: Sequence[File]) -> list[tuple[str, str]]:
    """Return the names and versions of all software and devices that computed the files."""
    versions: dict[str, set[str]] = {}
    for provenance in (made for file in files for made in _made(file.provenance)):
        for key, value in provenance.items():
            if key not in ("made_from", "code", "join"):
                versions.setdefault(key, set()).update(str(value).split(", "))
    return [(name, ", ".join(sorted(values))) for name, values in sorted(versions.items())]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Templates call these functions, as in `{% for chart in lds_charts(evaluation) %}`.
    functions = (
        *(charts.lds_charts, charts.removal_charts, charts.group_charts),
        *(output_of, ranked, per_target, worked_example, config_text, versions, condition_number),
        *(script_hash, study_warnings, score_warnings),
    )
    # Templates use these functions as filters, as in `{{ n | plural("target") }}`.
    environment.filters |= dict(inspect.getmembers(template_filters, inspect.isfunction))
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals |= {
        "limits": LIMITS,
        "style": (_FOLDER / "style.css").read_text(encoding="utf-8"),
    }
    return environment


def script_hash(template: str) -> str:
    """Return the hash of a script, by which a page's security policy allows only this script."""
    script = _environment().get_template(template).render()
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def rendered(template: str, **shown: Any) -> str:
    """Return the HTML of the template ``{template}.html.j2`` with the given values."""
    return _environment().get_template(f"{template}.html.j2").render(shown)


def experiment_page(shown: PageContents, study: str, each: int = EACH_ON_PAGE) -> str:
    """Return the HTML page of an experiment: its targets and their strongest training samples.

    For each target, at most ``each`` training samples with a positive score and ``each`` with a
    negative score are shown. The experiment has an empty file name if the page is for ``trak ask``.
    """
    return rendered("answer", shown=shown, study=study, each=each)
