"""Write a list of training samples to act on, best first, as a CSV."""

from collections.abc import Sequence
from pathlib import Path

from trak_core.artifacts import SCORES, SELF_INFLUENCE, check_made_for, check_same, open_artifact
from trak_core.scoring.lists import best_in_turn, few_targets, most_harmful, suspects
from trak_core.spec import ScoresSpec
from trak_core.system.files import write_csv


def write_list(
    *,
    listed: Path,
    scores: Path,
    self_influence: Sequence[Path] = (),
    spec: ScoresSpec,
    kind: str,
    fraction: float = 1.0,
    study_file: Path | None = None,
    code: str,
) -> None:
    """Write ``suspects``, ``drop`` or ``select`` (``kind``) of an experiment's scores.

    ``fraction`` is the part of the samples, which may be a pool's, that ``select`` takes.
    ``self_influence`` is a file with one more column for ``suspects``, and ``study_file`` a study
    that names classes.
    """
    with open_artifact(scores, SCORES) as file:
        of_pool = "_pool" if spec.pool_digest else ""
        check_made_for(file, spec, f"{SCORES.rule}{of_pool}")
        train, top_influences = file.table("train"), file.table("top_influences")
        targets = file.table("targets")
        model_output = file.spec["model_output"]
    for path in self_influence:
        with open_artifact(path, SELF_INFLUENCE) as file:
            check_made_for(file, spec.of_self_influence(), SELF_INFLUENCE.rule)
            own = file.table("train")
        ids = train["id"].tolist(), own["id"].tolist()
        check_same("training samples", *ids, path, SELF_INFLUENCE.rule)
        train["self_influence"] = own["self_influence"]
    if kind == "suspects":
        rows = suspects(train)
        n_looks = rows["worth_a_look"].to_numpy().sum()
        said = "push targets down more than up: look at these first, in their order"
    elif kind == "select":
        rows = best_in_turn(train, top_influences, fraction)
        n_looks, said = len(rows), "are what targets take in turn"
    else:
        rows = most_harmful(train)
        n_looks, said = len(rows), "push targets down on the whole"
    if study_file is not None:
        # Only here, because it brings torch.
        from trak_core.study.sample_columns import with_class_names

        columns = ("label", "prediction", "suggested_label")
        rows = with_class_names(rows, columns, study_file, model_output)
    write_csv(listed, rows)
    print(f"{n_looks} of {len(train)} samples {said}.")
    if kind == "suspects" and few_targets(targets):
        order = "self_influence" if self_influence else "output, lowest first"
        n = f"{len(targets)} target{'s' * (len(targets) != 1)}"
        print(
            f"Warning: suspects from {n}: mostly chance. Take `targets: all`, or sort by {order}."
        )
