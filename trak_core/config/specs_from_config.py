"""Build the specs of all jobs from a config: every setting that can change their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from trak_core.config.checkpoint_list import (
    Checkpoint,
    checkpoint_table,
    come_from_along_runs,
    runs_of,
    shared_training,
)
from trak_core.config.cross_checks import (
    check_conditions,
    check_evaluation,
    check_exact,
    check_lists,
    check_means,
    check_preconditioner,
    check_removals,
    lists_of,
    removals_of,
)
from trak_core.config.read_config import (
    ALL_TARGETS,
    module_folders,
    output_file,
    python_modules,
    target_ids,
)
from trak_core.config.scoring_settings import features_spec, fill_in_scoring, scores_spec
from trak_core.dependency_digests import content_digest, mentions, study_digest
from trak_core.errors import InputError
from trak_core.model_outputs.about_outputs import About, about_output, output_name
from trak_core.spec import (
    GAUSS_NEWTON,
    LESS,
    POOL,
    TRAIN,
    Combine,
    FeaturesSpec,
    NormalSpec,
    RetrainedSpec,
    ScoresSpec,
    Setting,
    ordered,
    settings_of,
)
from trak_core.system.files import data_digests, file_digest

# Subsets, and targets with their removals, that one job trains for.
_SUBSETS_A_JOB, _REMOVALS_A_JOB = 10, 5
# Random removals of each number, trainings without each set of samples; the seed of what is drawn.
_DRAWS, _REMOVAL_SEEDS, _SEED = 3, 3, 0
# Functions of a study for columns of its own.
_COLUMNS = ("train_columns", "target_columns")


def targets_digest(
    ids: Sequence[int | str] | None, question: Path | None = None, study: Path = Path()
) -> str:
    """Return the hash of target ids, in order, and of the file that the targets come from.

    The ids are None for all of the ``question``'s file, which is None for the study.
    """
    own = [] if question is None else [_question_digest(question, study)]
    return content_digest(ids and [str(i) for i in ids], *own)


@cache
def _question_digest(path: Path, study: Path) -> str:
    """Hash a question once: all jobs of a start are planned for what it said then."""
    if not path.is_file():
        raise InputError(
            f"experiments: `data` must be a file. Found nothing at {path}.",
            code="config.missing_question",
        )
    if path.suffix != ".py":
        return file_digest(path)
    return study_digest(path, folders=module_folders(path, study))


@dataclass(frozen=True, slots=True)
class Specs:
    """A config with its defaults, and what follows from it.

    Attributes:
        experiments: Names with the ids of their targets, None for all; ``means`` has the others.
        study_digest: Hash of the study's code and of all data files.
        files: The study's source and data files, and tables and questions that the config names.
        defaults: What the config left to the model output and the checkpoints, in words.
        output_digest: Hash of the file that has a model output of its own; None without such.
    """

    config: Mapping[str, Any]
    checkpoints: Mapping[str, Checkpoint]
    experiments: Mapping[str, Sequence[int | str] | None]
    study_digest: str
    files: Sequence[Path]
    defaults: str = ""
    output_digest: str | None = None

    @property
    def columns(self) -> str:
        """What tables say of samples, in plain words."""
        return self.output.columns

    @property
    def output(self) -> About:
        """What is known of the model output, in words among others."""
        return about_output(self.config["model_output"])

    @property
    def output_words(self) -> dict[str, Any] | None:
        """What the config says of a model output of its own; None for one that has a name here."""
        if not self.output.is_own:
            return None
        return {} if isinstance(given := self.config["model_output"], str) else ordered(given)

    @property
    def made_of(self) -> str:
        """Hash of the study and of the file of a model output of its own."""
        own = self.output_digest
        return content_digest(self.study_digest, own) if own else self.study_digest

    @property
    def is_projected(self) -> bool:
        """Whether scores come from projected gradients."""
        return not isinstance(self.config["projection"], str)

    @property
    def is_newton(self) -> bool:
        """Whether an experiment's scores come from the model, by the Gauss-Newton matrix."""
        return self.config["projection"] == GAUSS_NEWTON

    @property
    def evaluation(self) -> Mapping[str, Any]:
        """The config's evaluation, empty for none."""
        return self.config.get("evaluation", {})

    @property
    def shards(self) -> dict[str, int]:
        """Jobs that each split's features are cut into."""
        shards = {name: self.config["experiments"][name]["shards"] for name in self.experiments}
        pool = {} if self.pool is None else {POOL: 1}
        return {TRAIN: self.config["compute"]["shards"], **shards, **pool}

    @property
    def reported(self) -> dict[str, Any]:
        """What of the config decides numbers: what runs where, and what pages show, does not."""
        return ordered({k: v for k, v in self.config.items() if k not in ("compute", "answers")})

    @property
    def reported_first(self) -> dict[str, Any]:
        """What of that decides scores: how they are measured is in the last report."""
        measured = {"evaluation"} & set(self.reported)
        return ordered(self.reported | dict.fromkeys(measured, "see report.html"))

    @property
    def runs(self) -> dict[str, list[str]]:
        """Runs, sorted, with the ids of their checkpoints in the order they were saved."""
        return runs_of(self.checkpoints)

    @property
    def training(self) -> dict[str, Any]:
        """Arguments of the study's ``train`` that all runs share."""
        return {key: value for key, value in self.config["training"].items() if key != "at"}

    def training_arguments(self, run: str) -> dict[str, Any]:
        """Return what the study's ``train`` gets for one run."""
        return ordered(self.training | dict(self.checkpoints[self.runs[run][0]].arguments))

    def times(self, run: str) -> list[float] | None:
        """Return when a training leaves a checkpoint, in order; None for at its end alone."""
        times = [self.checkpoints[name].at for name in self.runs[run]]
        return None if None in times else [at for at in times if at is not None]

    @property
    def trained_together(self) -> list[tuple[list[str], list[str]]]:
        """Runs whose files are named alike: what follows a run's name in each, and the runs."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for run, ids in self.runs.items():
            alike.setdefault(tuple(name.removeprefix(run) for name in ids), []).append(run)
        return [(list(ends), runs) for ends, runs in alike.items()]

    @property
    def questions(self) -> dict[str, str]:
        """Files of targets that experiments bring by themselves, and of the pool to select from."""
        about = self.config["experiments"]
        own = {name: about[name]["data"] for name in about if "data" in about[name]}
        return own if self.pool is None else own | {POOL: self.pool}

    @property
    def pool(self) -> str | None:
        """The file of samples to select from; None where these are the training samples."""
        return self.lists.get("select", {}).get("pool")

    @property
    def conditions(self) -> dict[str, str]:
        """What experiments say of their targets, by name, where they don't name any."""
        experiments = self.config["experiments"].items()
        return {name: about["where"] for name, about in experiments if "where" in about}

    @property
    def means(self) -> dict[str, list[str]]:
        """Experiments of one target: what it is the mean of, and of what else it is less that."""
        means = {n: e for n, e in self.config["experiments"].items() if "mean" in e}
        return {n: [e[key] for key in ("mean", "minus") if key in e] for n, e in means.items()}

    @property
    def scored(self) -> list[str]:
        """All experiments, in the config's order."""
        return [*self.config["experiments"]]

    def mean_of(self, experiment: str) -> str | None:
        """Return in words what an experiment's one target is the mean of."""
        return LESS.join(self.means.get(experiment, ())) or None

    @property
    def has_columns(self) -> bool:
        """Whether the study, or a question in Python, may have columns of its own."""
        files = [self.config["study"], *self.questions.values()]
        return any(mentions(Path(path), *_COLUMNS) for path in files if path.endswith(".py"))

    @property
    def lists(self) -> dict[str, dict[str, Any]]:
        """Lists to act on, by name: each with the experiment whose targets count."""
        return lists_of(self.config)

    def targets_digest(self, split: str) -> str | None:
        """Return the hash of an experiment's targets, None for the training samples."""
        if split in self.means:
            named = [(name, self.targets_digest(name)) for name in self.means[split]]
            return content_digest("mean", *named)
        if split not in {*self.experiments, *self.questions}:
            return None
        if split in self.conditions:
            return content_digest(["where", self.conditions[split]])
        question = Path(self.questions[split]) if split in self.questions else None
        study = Path(self.config["study"])
        return targets_digest(self.experiments.get(split), question, study)

    @property
    def all_features(self) -> FeaturesSpec:
        """What decides the features, or Gramians, of all checkpoints and splits."""
        parts = {n: s for n, c in self.checkpoints.items() if (s := c.state_dict)}
        return features_spec(self.config, self.made_of, parts)

    def features(self, checkpoint: str, split: str) -> FeaturesSpec:
        """Return what decides one file of features, or one Gramian."""
        return self.all_features.under(checkpoint).of(split, self.targets_digest(split))

    @property
    def embeddings(self) -> FeaturesSpec:
        """What decides the embeddings of all checkpoints."""
        return replace(
            self.all_features,
            projection={"kind": "embedding"},
            dtype="float32",
            study_digest=self.study_digest,
            preconditioner=None,
            split="all",
        )

    @property
    def outputs(self) -> FeaturesSpec:
        """What decides the model outputs of all possible targets, of all checkpoints."""
        return replace(
            self.all_features,
            parameter_patterns=None,
            projection={"kind": "none"},
            dtype="float32",
            preconditioner=None,
            split="all",
        )

    def normal_matrix(self, checkpoint: str) -> NormalSpec:
        """Return what decides one checkpoint's normal matrix."""
        return self.self_influence.under(checkpoint).of_normal_matrix()

    def checkpoint_scores(self, experiment: str, checkpoint: str) -> ScoresSpec:
        """Return what decides one checkpoint's scores of an experiment."""
        return self.scores(experiment).under(checkpoint)

    def scores(self, experiment: str) -> ScoresSpec:
        """Return what decides an experiment's scores."""
        digest = self.targets_digest(experiment)
        return replace(self.self_influence, experiment=experiment, targets_digest=digest)

    def list_scores(self, kind: str) -> ScoresSpec:
        """Return what decides the scores that a list is made of, which may be a pool's."""
        digest = self.targets_digest(POOL) if kind == "select" else None
        return replace(self.scores(self.lists[kind]["experiment"]), pool_digest=digest)

    @property
    def self_influence(self) -> ScoresSpec:
        """What decides self-influences, and the scores of every experiment."""
        return scores_spec(self.config, self.all_features, self.runs)

    @property
    def measured(self) -> list[str]:
        """Experiments whose scores are compared with retrained models."""
        if not {"subsets", "ground_truth"} & set(self.evaluation):
            return []
        own = [name for name in self.experiments if name not in self.questions]
        return list(self.evaluation.get("experiments", own))

    @property
    def measures_features(self) -> bool:
        """Whether something is measured that scores alone can't say."""
        if not self.measured:
            return False
        several = len(self.runs) < len(self.checkpoints) and self.is_projected
        return several or "sweep" in self.evaluation or self.measures("gradient_dot")

    def measures(self, baseline: str) -> bool:
        """Return whether scores are measured beside a baseline, by LDS or by removals."""
        by_lds = self.evaluation["baselines"] if self.measured else []
        return baseline in [*by_lds, *self.evaluation.get("removals", {}).get("baselines", [])]

    @property
    def sweep(self) -> dict[str, Any] | None:
        """Values of other settings of scoring; None for no sweep."""
        return ordered(self.evaluation.get("sweep"))

    @property
    def settings(self) -> list[Setting]:
        """Other settings of scoring to measure, the study's own among them; none for no sweep."""
        scoring, sweep = self.config["scoring"], self.sweep
        if sweep is None:
            return []
        own = Setting(
            scoring["damping"],
            scoring["loss_weight_power"],
            Combine(scoring["combine"]),
            self.config["projection"]["proj_dim"],
        )
        return settings_of(sweep, own)

    @property
    def random_subsets(self) -> RetrainedSpec:
        """What decides models retrained on random subsets."""
        subsets = self.evaluation["subsets"]
        spec = self._retrained("random", subsets["seeds"], subsets["seed"])
        runs = self.config["checkpoints"]
        more = shared_training(runs, self.training, spec.seeds) if subsets["same_seeds"] else {}
        return replace(spec, fraction=subsets["fraction"], **more)

    def subset_groups(self) -> list[tuple[int, int]]:
        """Return the first and last subset of each job."""
        starts = range(0, count := self.evaluation["subsets"]["count"], _SUBSETS_A_JOB)
        return [(start, min(start + _SUBSETS_A_JOB, count) - 1) for start in starts]

    @property
    def removals(self) -> dict[str, dict[str, Any]]:
        """What is compared with random removals, by the name of its file: see ``removals_of``."""
        return removals_of(self.config)

    def removals_spec(self, by: str) -> RetrainedSpec:
        """Return what decides models retrained without samples, or on them, that a choice names."""
        if by in self.lists:
            return self._retrained("list", 1, _SEED)
        spec = self._retrained(f"without {by}", _REMOVAL_SEEDS, _SEED)
        return replace(spec, n_removed=self.evaluation["removals"]["n_removed"], draws=_DRAWS)

    @property
    def removal_jobs(self) -> dict[str, list[dict[str, Any]]]:
        """What names the samples of each job that retrains: the stage's ``naming``, by choice."""
        jobs: dict[str, list[dict[str, Any]]] = {}
        for about in self.removals.values():
            if by := about.get("list"):
                own = {"kind": by, "fractions": about["fractions"]}
                jobs[by] = [own | {"draw": draw} for draw in range(about["seeds"])]
                continue
            naming = {
                "top": {"scores_spec": self.scores(about["experiment"]).as_dict()},
                "bm25": {},
                "embedding_cosine": {
                    "checkpoints": self.self_influence.ends,
                    "embeddings_spec": self.embeddings.as_dict(),
                },
            }
            targets = list(self.experiments[about["experiment"]] or [])[: about["targets"]]
            starts = range(0, len(targets), _REMOVALS_A_JOB)
            groups = [{"target_ids": targets[i : i + _REMOVALS_A_JOB]} for i in starts]
            for by in about["by"]:
                jobs[by] = [naming[by] | group for group in groups] if by in naming else [{}]
        return jobs

    def _retrained(self, subsets: str, seeds: int, seed: int) -> RetrainedSpec:
        return RetrainedSpec(
            subsets=subsets,
            arguments=self.training,
            model_output=output_name(self.config["model_output"]),
            study_digest=self.made_of,
            seeds=seeds,
            seed=seed,
        )


def specs_of(config: dict[str, Any], results: Path, *, writes: bool = True) -> Specs:
    """Return the specs of a config that has its schema's defaults; check what a schema cannot.

    Defaults that depend on the model output and the checkpoints are filled in. The folder
    ``results`` keeps a record of data files, which is read alone where ``writes`` is false.
    """
    checkpoints = checkpoint_table(config["checkpoints"], config.get("training"))
    defaults = fill_in_scoring(config, along=come_from_along_runs(checkpoints))
    check_exact(config)
    check_preconditioner(config)
    check_conditions(config)
    check_means(config)
    experiments = {
        name: target_ids(experiment["targets"]) if "targets" in experiment else None
        for name, experiment in config["experiments"].items()
        if "mean" not in experiment
    }
    check_lists(config)
    check_removals(config)
    if "evaluation" in config:
        check_evaluation(config)
    study = Path(config["study"])
    data = data_digests(config["data_files"], results / "data_files.json", writes=writes)
    tables = [config["checkpoints"], lists_of(config).get("select", {}).get("pool")]
    for experiment in config["experiments"].values():
        tables += [experiment.get("targets"), experiment.get("data")]
    tables = [path for path in tables if isinstance(path, str) and path != ALL_TARGETS]
    output = output_file(config["model_output"], study)
    code = [Path(path) for path in tables if path.endswith(".py")]
    modules = python_modules(study, [*code, *([output] if output else [])])
    files = [*dict.fromkeys([*modules, *map(Path, [*data, *tables])])]
    output_digest = study_digest(output, folders=module_folders(output, study)) if output else None
    return Specs(
        config, checkpoints, experiments, study_digest(study, data), files, defaults, output_digest
    )
