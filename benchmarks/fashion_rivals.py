"""Score benchmarks/fashion.py's images with other packages: TRAK, dattri, kronfluence, captum.

    /tmp/peers/bin/python benchmarks/fashion_rivals.py --list

benchmarks/fashion.py calls this script with ``--peers``. That Python needs the packages and torch,
but not this project. Arguments that the code does not set have their default values.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fashion import (
    N_TARGETS,
    N_TRAIN,
    SETTINGS,
    Method,
    Setting,
    compute,
    file_of,
    images,
    make_checkpoints,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

_BATCH = 250
Splits = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def _loaders(splits: Splits, batch_size: int = _BATCH) -> list[DataLoader[Any]]:
    return [DataLoader(TensorDataset(*split), batch_size=batch_size) for split in splits]


def _loaded(setting: Setting, path: str) -> nn.Module:
    model = setting.make_model().eval()
    model.load_state_dict(torch.load(path))
    return model


def traker(group: str, count: int, proj_dim: int) -> Method:
    """Return the scores of TRAK's package, with its CPU projection."""

    def scores(setting: Setting, paths: Mapping[str, list[str]], splits: Splits) -> np.ndarray:
        TRAKer = import_module("trak").TRAKer

        train, targets = _loaders(splits)
        model = setting.make_model().eval()
        with tempfile.TemporaryDirectory() as folder:
            tracer = TRAKer(
                model=model,
                task="image_classification",
                train_set_size=len(splits[0][0]),
                save_dir=folder,
                device="cpu",
                proj_dim=proj_dim,
                use_half_precision=False,
            )
            states = [torch.load(path) for path in paths[group][:count]]
            for model_id, state in enumerate(states):
                tracer.load_checkpoint(state, model_id=model_id)
                for batch in train:
                    tracer.featurize(batch=batch, num_samples=len(batch[0]))
            tracer.finalize_features()
            for model_id, state in enumerate(states):
                tracer.start_scoring_checkpoint("all", state, model_id, len(splits[1][0]))
                for batch in targets:
                    tracer.score(batch=batch, num_samples=len(batch[0]))
            return np.array(tracer.finalize_scores(exp_name="all"))

    return count, scores


def _log_p(model: nn.Module, parameters: Any, sample: tuple[Tensor, Tensor]) -> Tensor:
    """Return the log-probability of one sample's label."""
    image, label = (values[None] for values in sample)
    logits = torch.func.functional_call(model, parameters, image)
    return -nn.functional.cross_entropy(logits, label)


def _task(model: nn.Module, paths: list[str], loss: Callable[..., Tensor]) -> Any:
    """Return dattri's task."""
    states = [torch.load(path) for path in paths]
    task = import_module("dattri.task").AttributionTask
    return task(loss_func=loss, model=model, checkpoints=states)


def dattri_trak(group: str, count: int, proj_dim: int) -> Method:
    """Return scores of dattri's TRAK, with the margin as target function as in its examples."""

    def scores(setting: Setting, paths: Mapping[str, list[str]], splits: Splits) -> np.ndarray:
        TRAKAttributor = import_module("dattri.algorithm.trak").TRAKAttributor
        model = setting.make_model().eval()

        def margin(parameters: Any, sample: tuple[Tensor, Tensor]) -> Tensor:
            log_p = _log_p(model, parameters, sample)
            return log_p - torch.log(1 - torch.exp(log_p))

        def probability(parameters: Any, sample: tuple[Tensor, Tensor]) -> Tensor:
            return torch.exp(_log_p(model, parameters, sample))

        task = _task(model, paths[group][:count], margin)
        projector = {"device": "cpu", "proj_dim": proj_dim}
        attributor = TRAKAttributor(
            task, correct_probability_func=probability, projector_kwargs=projector
        )
        train, targets = _loaders(splits)
        with torch.no_grad():
            attributor.cache(train)
            return attributor.attribute(targets).numpy()

    return count, scores


def dattri_influence(kind: str, **settings: Any) -> Method:
    """Return dattri's influence functions with the Hessian of the loss."""

    def scores(setting: Setting, paths: Mapping[str, list[str]], splits: Splits) -> np.ndarray:
        algorithms = import_module("dattri.algorithm.influence_function")
        AttributionTask = import_module("dattri.task").AttributionTask

        model = setting.make_model().eval()

        def loss(parameters: Any, samples: tuple[Tensor, Tensor]) -> Tensor:
            logits = torch.func.functional_call(model, parameters, samples[0])
            return nn.functional.cross_entropy(logits, samples[1])

        state = torch.load(paths["runs"][0])
        task = AttributionTask(loss_func=loss, model=model, checkpoints=state)
        attributor = getattr(algorithms, kind)(task, **settings)
        train, targets = _loaders(splits, batch_size=N_TRAIN)
        attributor.cache(train)
        return attributor.attribute(train, targets).detach().numpy()

    return 1, scores


def dattri_logra(damping: float | None) -> Method:
    """Return dattri's LoGra scores, with 16 x 16 numbers for each linear layer."""

    def scores(setting: Setting, paths: Mapping[str, list[str]], splits: Splits) -> np.ndarray:
        LoGraAttributor = import_module("dattri.algorithm.logra").LoGraAttributor
        AttributionTask = import_module("dattri.task").AttributionTask

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor], device: str) -> Tensor:
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        model = _loaded(setting, paths["runs"][0])
        layers = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
        states = model.state_dict()
        task = AttributionTask(loss_func=loss, model=model, checkpoints=states, target_func=loss)
        train, targets = _loaders(splits)
        with tempfile.TemporaryDirectory() as folder:
            attributor = LoGraAttributor(
                task, layer_names=layers, damping=damping, proj_dim=256, cache_dir=folder
            )
            attributor.cache(train)
            return attributor.attribute(train, targets).float().numpy()

    return 1, scores


def dattri_tracin(count: int) -> Method:
    """Return the scores of dattri's TracIn from the first ``count`` checkpoints along the runs."""

    def scores(setting: Setting, paths: Mapping[str, list[str]], splits: Splits) -> np.ndarray:
        TracInAttributor = import_module("dattri.algorithm.tracin").TracInAttributor

        model = setting.make_model().eval()
        chosen = paths["along"][:count]

        def loss(parameters: Any, sample: tuple[Tensor, Tensor]) -> Tensor:
            return -_log_p(model, parameters, sample)

        attributor = TracInAttributor(
            _task(model, chosen, loss), weight_list=torch.ones(len(chosen)), normalized_grad=False
        )
        train, targets = _loaders(splits)
        with torch.no_grad():
            return attributor.attribute(train, targets).numpy()

    return count, scores


def kronfluence_ekfac(damping: float | None) -> Method:
    """Return kronfluence's EK-FAC scores; damping None means a tenth of the mean eigenvalue."""

    def scores(setting: Setting, paths: Mapping[str, list[str]], splits: Splits) -> np.ndarray:
        Analyzer = import_module("kronfluence.analyzer").Analyzer
        prepare_model = import_module("kronfluence.analyzer").prepare_model
        FactorArguments = import_module("kronfluence.arguments").FactorArguments
        ScoreArguments = import_module("kronfluence.arguments").ScoreArguments
        Task = import_module("kronfluence.task").Task

        class Classification(Task):
            def compute_train_loss(
                self, batch: Any, model: nn.Module, sample: bool = False
            ) -> Tensor:
                logits, labels = model(batch[0]), batch[1]
                if sample:
                    with torch.no_grad():
                        labels = torch.multinomial(logits.softmax(dim=-1), 1).flatten()
                return nn.functional.cross_entropy(logits, labels, reduction="sum")

            def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
                logits, labels = model(batch[0]), batch[1]
                own = logits.gather(1, labels[:, None])[:, 0]
                others = logits.scatter(1, labels[:, None], -torch.inf)
                return -(own - others.logsumexp(dim=1)).sum()

        task = Classification()
        model = prepare_model(_loaded(setting, paths["runs"][0]), task)
        with tempfile.TemporaryDirectory() as folder:
            analyzer = Analyzer("a", model, task, cpu=True, disable_tqdm=True, output_dir=folder)
            train, targets = (TensorDataset(*split) for split in splits)
            analyzer.fit_all_factors(
                "f", train, per_device_batch_size=500, factor_args=FactorArguments("ekfac")
            )
            analyzer.compute_pairwise_scores(
                "s",
                "f",
                targets,
                train,
                per_device_query_batch_size=100,
                per_device_train_batch_size=500,
                score_args=ScoreArguments(damping_factor=damping),
            )
            return analyzer.load_pairwise_scores("s")["all_modules"].float().numpy().T

    return 1, scores


def captum_tracin() -> Method:
    """Return the scores of captum's TracInCP from the checkpoints of one run."""

    def scores(setting: Setting, paths: Mapping[str, list[str]], splits: Splits) -> np.ndarray:
        TracInCP = import_module("captum.influence").TracInCP

        model, (x, y) = setting.make_model().eval(), splits[1]

        def load(model: nn.Module, path: str) -> float:
            model.load_state_dict(torch.load(path))
            return 1.0

        influence = TracInCP(
            model,
            TensorDataset(*splits[0]),
            paths["along"][:2],
            checkpoints_load_func=load,
            loss_fn=nn.CrossEntropyLoss(reduction="sum"),
            batch_size=_BATCH,
            sample_wise_grads_per_batch=True,
        )
        return influence.influence((x, y)).numpy().T

    return 2, scores


RIVALS: dict[str, Method] = {
    "TRAK 0.3.2, 1 half, k = 512": traker("halves", 1, 512),
    "TRAK 0.3.2, 10 halves, k = 512": traker("halves", 10, 512),
    "TRAK 0.3.2, 10 runs, k = 512": traker("runs", 10, 512),
    "TRAK 0.3.2, 10 runs, k = 2048": traker("runs", 10, 2048),
    "dattri TRAK, 10 halves, k = 512": dattri_trak("halves", 10, 512),
    "dattri TRAK, 50 halves, k = 512": dattri_trak("halves", 50, 512),
    "dattri influence, CG, 1e-2": dattri_influence(
        "IFAttributorCG", max_iter=10, regularization=1e-2
    ),
    "dattri influence, explicit, 1e-2": dattri_influence(
        "IFAttributorExplicit", regularization=1e-2
    ),
    "dattri LoGra": dattri_logra(None),
    "dattri LoGra, damping .1": dattri_logra(0.1),
    "dattri TracIn, 2 checkpoints": dattri_tracin(2),
    "kronfluence EK-FAC": kronfluence_ekfac(1e-8),
    "kronfluence EK-FAC, damped by .1 of the mean": kronfluence_ekfac(None),
    "captum TracInCP, 2 checkpoints": captum_tracin(),
}


def main() -> None:
    """Compute one method's scores, or list the methods with their numbers of checkpoints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--setting", choices=SETTINGS)
    parser.add_argument("--only")
    asked, _ = parser.parse_known_args()
    if asked.list:
        print(json.dumps({name: count for name, (count, _) in RIVALS.items()}))
        return
    torch.set_num_threads(1)
    setting = SETTINGS[asked.setting]
    splits = images(asked.data, "train", N_TRAIN), images(asked.data, "t10k", N_TARGETS)
    paths = make_checkpoints(setting, splits[0], asked.folder / "checkpoints")
    _, method = RIVALS[asked.only]
    compute(lambda: method(setting, paths, splits), file_of(asked.folder, asked.only))


if __name__ == "__main__":
    main()
