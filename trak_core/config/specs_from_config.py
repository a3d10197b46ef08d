"""Derive from a config the spec of each job: all settings on which the job's result depends."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from trak_core.config.checkpoint_list import checkpoint_table, have_several_times, runs_of
from trak_core.config.cross_checks import check_relations, lists_of, removals_of
from trak_core.config.read_config import (
    ALL_TARGETS,
    module_folders,
    output_file,
    python_modules,
    target_ids,
)
from trak_core.config.scoring_defaults import features_spec, fill_in_scoring, scores_spec
from trak_core.dependency_digests import content_digest, mentions, study_digest
from trak_core.errors import InputError
from trak_core.model_outputs.about_outputs import about_output, output_name
from trak_core.runtime.files import data_digests, file_digest
from trak_core.settings import (
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

# The largest number of random subsets on which one retraining job trains models, and of targets
# for which one such job removes training samples.
_SUBSETS_A_JOB, _TARGETS_A_JOB = 10, 5
# For `evaluation.removals`: the number of random removals of each size, the number of models that
# are trained without the removed samples, and the seed.
_DRAWS, _REMOVAL_SEEDS, _SEED = 3, 3, 0
# The keys of a config on which no result depends.
_NO_RESULTS = ("compute", "answers")
# Functions of a study that return additional columns for the tables of samples.
_COLUMNS = ("train_columns", "target_columns")


@cache
def _question_digest(path: Path, study: Path) -> str:
    """Return a hash of an experiment's ``data``, cached so that all jobs get the same hash."""
    if not path.is_file():
        raise InputError(
            f"experiments: `data` must be an existing file. Found no file at {path}.",
            code="config.missing_question",
        )
    if path.suffix != ".py":
        return file_digest(path)
    return study_digest(path, folders=module_folders(path, study))


class Specs:
    """A config with its defaults, and the settings of jobs that are derived from it.

    Attributes:
        config: The config, in which missing scoring settings are filled in.
        defaults: A text that lists the scoring settings that were filled in, with reasons.
        checkpoints: The checkpoints by id.
        runs: The ids of each run's checkpoints, sorted by time. Runs are sorted by name.
        training: The arguments of the study's ``train`` that all runs share.
        reported: The config without ``compute`` and ``answers``, on which no result depends.
        output: The model output's properties and the words that describe it.
        output_words: The settings of a user-defined model output. None for a built-in one.
        is_projected: Whether scores are computed from projected gradients.
        experiments: The target ids of each experiment, or None if all its samples are targets.
        conditions: The ``where`` conditions of experiments, by experiment.
        lists: The settings of each list in the config's ``lists``, by name. See ``lists_of``.
        pool: The file of samples that ``lists.select`` ranks, or None if it ranks training samples.
        questions: The paths of experiments' ``data``, by experiment. The path of ``pool``, if there
            is a pool, has the key ``POOL``.
        shards: The number of jobs that compute each split's features, by split.
        evaluation: The config's ``evaluation``, empty if there is none.
        sweep: The values of scoring settings to compare, or None if the config has no sweep.
        removals: The settings of ``evaluation.removals``, by file of results. See ``removals_of``.
        measured: The experiments whose scores are compared with retrained models.
        measures_features: Whether the evaluation needs features in addition to scores.
        study_digest: A hash of the study's code and of all data files.
        study_and_output_digest: A hash of the study's code, of all data files, and of the code of a
            user-defined model output.
        files: The study's source and data files, and the tables and files that the config names.
        all_features: The settings of features, or of Gramians, that do not depend on the checkpoint
            and the split.
        embeddings: The settings of embeddings that do not depend on the checkpoint.
        outputs: The settings of the models' outputs for ``target_data()`` that do not depend on the
            checkpoint.
        self_influence: The settings of self-influences. The specs of other scores add an experiment
            to them.
    """

    def __init__(self, config: dict[str, Any], results: Path, *, writes: bool = True) -> None:
        """Check relations between the keys of a config, and derive the settings of all jobs.

        The config must already satisfy the schema. Unless ``writes`` is false, the folder
        ``results`` stores digests of data files, so that unchanged files are not read again.
        """
        self.config = config
        self.checkpoints = checkpoint_table(config["checkpoints"], config.get("training"))
        self.runs = runs_of(self.checkpoints)
        self.defaults = fill_in_scoring(config, several_times=have_several_times(self.checkpoints))
        check_relations(config)
        self.training = {k: v for k, v in config.get("training", {}).items() if k != "at"}
        self.reported = ordered({k: v for k, v in config.items() if k not in _NO_RESULTS})
        self.output = about_output(config["model_output"])
        is_name = isinstance(config["model_output"], str)
        words = {} if is_name else ordered(config["model_output"])
        self.output_words = words if self.output.is_own else None
        self.is_projected = not isinstance(config["projection"], str)
        self._read_experiments()
        self.evaluation: Mapping[str, Any] = config.get("evaluation", {})
        self.sweep = ordered(self.evaluation.get("sweep"))
        self.removals = removals_of(config)
        self.measured: list[str] = []
        if {"subsets", "ground_truth"} & set(self.evaluation):
            own = [name for name in self.experiments if name not in self.questions]
            self.measured = list(self.evaluation.get("experiments", own))
        has_ends = len(self.runs) < len(self.checkpoints) and self.is_projected
        needs_features = has_ends or self.sweep is not None or self.measures("gradient_dot")
        self.measures_features = bool(self.measured) and needs_features
        self._read_files(results, writes=writes)
        keys = {n: key for n, c in self.checkpoints.items() if (key := c.state_dict)}
        self.all_features = features_spec(config, self.study_and_output_digest, keys)
        self.self_influence = scores_spec(config, self.all_features, self.runs)
        # Embeddings and outputs do not depend on settings of gradients, and one file contains them
        # for all samples. The settings of gradients and splits are therefore replaced by constants.
        # Otherwise, Snakemake would compute embeddings and outputs again when such a setting
        # changes.
        more: Any = {"dtype": "float32", "preconditioner": None, "label_draws": 0, "split": "all"}
        values = replace(self.all_features, projection={"kind": "embedding"}, **more)
        self.embeddings = replace(values, study_digest=self.study_digest)
        self.outputs = replace(values, projection={"kind": "none"}, parameter_patterns=None)

    def _read_experiments(self) -> None:
        experiments = self.config["experiments"]
        self.conditions = {n: e["where"] for n, e in experiments.items() if "where" in e}
        self.experiments = {
            name: target_ids(about["targets"]) if "targets" in about else None
            for name, about in experiments.items()
        }
        self.lists = lists_of(self.config)
        self.pool: str | None = self.lists.get("select", {}).get("pool")
        self.questions = {n: e["data"] for n, e in experiments.items() if "data" in e}
        self.shards = {TRAIN: self.config["compute"]["shards"]}
        self.shards |= {name: about["shards"] for name, about in experiments.items()}
        if self.pool is not None:
            self.questions[POOL], self.shards[POOL] = self.pool, 1

    def _read_files(self, results: Path, *, writes: bool) -> None:
        config, study = self.config, Path(self.config["study"])
        data = data_digests(config["data_files"], results / "data_files.json", writes=writes)
        self.study_digest = self.study_and_output_digest = study_digest(study, data)
        targets = [about.get("targets") for about in config["experiments"].values()]
        named = [config["checkpoints"], *targets, *self.questions.values()]
        tables = [path for path in named if isinstance(path, str) and path != ALL_TARGETS]
        code = [Path(path) for path in tables if path.endswith(".py")]
        if output := output_file(config["model_output"], study):
            code.append(output)
            of_output = study_digest(output, folders=module_folders(output, study))
            self.study_and_output_digest = content_digest(self.study_digest, of_output)
        files = [*python_modules(study, code), *map(Path, [*data, *tables])]
        self.files = [*dict.fromkeys(files)]

    def training_arguments(self, run: str) -> dict[str, Any]:
        """Return the arguments that the study's ``train`` gets for one run."""
        return ordered(self.training | dict(self.checkpoints[self.runs[run][0]].arguments))

    def times(self, run: str) -> list[float] | None:
        """Return the times at which a run saves checkpoints, in ascending order.

        Return None if the run saves only one checkpoint, at its end.
        """
        times = [self.checkpoints[name].at for name in self.runs[run]]
        return None if None in times else [at for at in times if at is not None]

    @property
    def trained_together(self) -> list[tuple[list[str], list[str]]]:
        """Groups of runs that save checkpoints at the same times.

        Each group is a pair of lists: the suffixes that the times add to the ids of checkpoints,
        such as "-10" for the time 10, and the runs.
        """
        groups: dict[tuple[str, ...], list[str]] = {}
        for run, ids in self.runs.items():
            groups.setdefault(tuple(name.removeprefix(run) for name in ids), []).append(run)
        return [(list(suffixes), runs) for suffixes, runs in groups.items()]

    @property
    def has_columns(self) -> bool:
        """Whether a Python file of the study or of targets can add columns to tables of samples."""
        files = [self.config["study"], *self.questions.values()]
        return any(mentions(Path(path), *_COLUMNS) for path in files if path.endswith(".py"))

    def targets_digest(self, split: str) -> str | None:
        """Return a hash of the settings that select a split's samples, and of their file.

        ``split`` is an experiment, the pool, or the training samples, for which the result is None.
        """
        if split not in {*self.experiments, *self.questions}:
            return None
        if split in self.conditions:
            return content_digest(["where", self.conditions[split]])
        ids, digests = self.experiments.get(split), []
        if split in self.questions:
            digests = [_question_digest(Path(self.questions[split]), Path(self.config["study"]))]
        return content_digest(ids and [str(i) for i in ids], *digests)

    def features(self, checkpoint: str, split: str) -> FeaturesSpec:
        """Return the settings of the features or the Gramian of one checkpoint and split."""
        return self.all_features.under(checkpoint).of(split, self.targets_digest(split))

    def normal_matrix(self, checkpoint: str) -> NormalSpec:
        """Return the settings of one checkpoint's normal matrix."""
        return self.self_influence.under(checkpoint).of_normal_matrix()

    def scores(self, experiment: str) -> ScoresSpec:
        """Return the settings of an experiment's scores from all checkpoints."""
        digest = self.targets_digest(experiment)
        return replace(self.self_influence, experiment=experiment, targets_digest=digest)

    def list_scores(self, kind: str) -> ScoresSpec:
        """Return the settings of the scores by which the samples of a list are chosen."""
        digest = self.targets_digest(POOL) if kind == "select" else None
        return replace(self.scores(self.lists[kind]["experiment"]), pool_digest=digest)

    def measures(self, baseline: str) -> bool:
        """Return whether the evaluation compares the scores with a baseline of this name."""
        by_lds = self.evaluation["baselines"] if self.measured else []
        return baseline in [*by_lds, *self.evaluation.get("removals", {}).get("baselines", [])]

    @property
    def settings(self) -> list[Setting]:
        """All combinations of the sweep's and the config's values, or [] if there is no sweep."""
        if self.sweep is None:
            return []
        scoring, proj_dim = self.config["scoring"], self.config["projection"]["proj_dim"]
        combine = Combine(scoring["combine"])
        power = scoring["loss_weight_power"]
        return settings_of(self.sweep, Setting(scoring["damping"], power, combine, proj_dim))

    @property
    def random_subsets(self) -> RetrainedSpec:
        """The settings of the models that are retrained on random subsets."""
        subsets = self.evaluation["subsets"]
        spec = self._retrained("random", subsets["seeds"], subsets["seed"])
        return replace(spec, fraction=subsets["fraction"])

    def subset_groups(self) -> list[tuple[int, int]]:
        """Return the numbers of the first and the last random subset for each retraining job."""
        starts = range(0, count := self.evaluation["subsets"]["count"], _SUBSETS_A_JOB)
        return [(start, min(start + _SUBSETS_A_JOB, count) - 1) for start in starts]

    def removals_spec(self, by: str) -> RetrainedSpec:
        """Return the settings of models that are retrained without the samples that ``by`` chose.

        ``by`` is a method that chooses samples to remove, or the name of a list.
        """
        if by in self.lists:
            return self._retrained("list", 1, _SEED)
        spec = self._retrained(f"without {by}", _REMOVAL_SEEDS, _SEED)
        return replace(spec, n_removed=self.evaluation["removals"]["n_removed"], draws=_DRAWS)

    @property
    def removal_jobs(self) -> dict[str, list[dict[str, Any]]]:
        """The argument ``naming`` of each retraining job, by the method that chooses samples."""
        jobs: dict[str, list[dict[str, Any]]] = {}
        for about in self.removals.values():
            if by := about.get("list"):
                naming = {"kind": by, "fractions": about["fractions"]}
                jobs[by] = [naming | {"draw": draw} for draw in range(about["seeds"])]
                continue
            namings = {
                "top": {"scores_spec": self.scores(about["experiment"]).as_dict()},
                "bm25": {},
                "embedding_cosine": {
                    "checkpoints": self.self_influence.ends,
                    "embeddings_spec": self.embeddings.as_dict(),
                },
            }
            targets = list(self.experiments[about["experiment"]] or [])[: about["targets"]]
            starts = range(0, len(targets), _TARGETS_A_JOB)
            groups = [{"target_ids": targets[i : i + _TARGETS_A_JOB]} for i in starts]
            for by in about["by"]:
                jobs[by] = [namings[by] | group for group in groups] if by in namings else [{}]
        return jobs

    def _retrained(self, subsets: str, seeds: int, seed: int) -> RetrainedSpec:
        return RetrainedSpec(
            subsets=subsets,
            arguments=self.training,
            model_output=output_name(self.config["model_output"]),
            study_digest=self.study_and_output_digest,
            seeds=seeds,
            seed=seed,
        )
