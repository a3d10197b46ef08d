"""What a TRAKer is made of, checked: task, classes of its parts, projector, checkpoints."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trak_core.compat.batches import integer
from trak_core.compat.modelout_functions import TASK_TO_MODELOUT, AbstractModelOutput
from trak_core.compat.projectors import (
    AbstractProjector,
    BasicProjector,
    ChunkedCudaProjector,
    CudaProjector,
    ProjectionType,
    known_projection,
)
from trak_core.compat.savers import AbstractSaver
from trak_core.errors import InputError
from trak_core.study.checkpoints import load_state_dict, state_dict_sha256

Projector = AbstractProjector | ChunkedCudaProjector


def checked_class(value: Any, usual: type, name: str) -> Any:
    """Return a class whose instance TRAKer makes; the usual one for None.

    Raises:
        InputError: If it is an instance, or anything else.
    """
    if value is None:
        return usual
    if not isinstance(value, type):
        raise InputError(
            f"`{name}` must be a class, such as {usual.__name__}; TRAKer makes the instance. Found "
            f"{value!r}."
        )
    return value


def checked_task(task: AbstractModelOutput | str) -> AbstractModelOutput:
    """Return a model output, by its name or as it is.

    Raises:
        InputError: If the name is unknown, or if it is no instance of a model output.
    """
    if isinstance(task, str):
        if task not in TASK_TO_MODELOUT:
            raise InputError(
                f"`task` must be one of {', '.join(TASK_TO_MODELOUT)}, or an AbstractModelOutput. "
                f"Found {task!r}."
            )
        return TASK_TO_MODELOUT[task]()
    methods = ("get_output", "get_out_to_loss_grad")
    if isinstance(task, type) or not all(hasattr(task, method) for method in methods):
        raise InputError(
            "`task` must be the name of a task, or an instance with the methods of "
            f"AbstractModelOutput. Found {task!r}."
        )
    return task


def checked_projector(
    projector: Projector | None,
    *,
    n_params: int,
    proj_dim: int | None,
    seed: int,
    max_batch_size: int,
    device: str | torch.device,
) -> tuple[Projector, int]:
    """Return the projector and its proj_dim: the one given, or a rademacher projection.

    Raises:
        InputError: If the projector is a class, or made for another number of parameters; if there
            is neither projector nor ``proj_dim``; if a projection is to be made on a CUDA device
            that is not there.
    """
    if projector is not None:
        if isinstance(projector, type) or not hasattr(projector, "project"):
            raise InputError(f"`projector` must be an instance or None. Found {projector!r}.")
        made_for = getattr(projector, "grad_dim", 0)
        if made_for not in {0, None, n_params}:
            raise InputError(
                "The projector's grad_dim must be the number of parameters that gradients are "
                f"taken for, {n_params}. Found {made_for}."
            )
        # 0 is what a projector says that does not project.
        return projector, projector.proj_dim or n_params
    if proj_dim is None:
        raise InputError("Without a `projector`, `proj_dim` must be given. Found None.")
    proj_dim, where = integer(proj_dim, "proj_dim", 1, 2**31), torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"`device` is {str(where)!r}, so torch must find a CUDA device. Found none: give "
            "device='cpu', or check `nvidia-smi` and that torch is a CUDA build."
        )
    common = (n_params, proj_dim, seed, ProjectionType.rademacher, where)
    if where.type == "cuda":
        return CudaProjector(*common, max_batch_size=max_batch_size), proj_dim
    return BasicProjector(*common), proj_dim


def store_metadata(
    projector: Projector, proj_dim: int, train_set_size: int, parameters: Mapping[str, torch.Size]
) -> dict[str, Any]:
    """Return what all who share a folder must agree in."""
    known = known_projection(projector, sum(size.numel() for size in parameters.values()), 0)
    fields = {} if known is None else known.as_dict()
    return {
        "JL dimension": proj_dim,
        "JL matrix type": str(getattr(projector, "proj_type", "custom")),
        "train set size": train_set_size,
        # Folders of the original lack this: their matrices cannot be made again.
        "matrix": {key: value for key, value in fields.items() if key != "stream"},
        "parameters": list(parameters),
    }


def put_weights(model: nn.Module, checkpoint: Mapping[str, Tensor], model_id: int) -> str:
    """Load a state dict into the model.

    Returns:
        The digest of the model's weights.

    Raises:
        InputError: If it is no state dict, or doesn't fit the model.
    """
    if not isinstance(checkpoint, Mapping) or not all(
        isinstance(value, Tensor) for value in checkpoint.values()
    ):
        raise InputError(
            "`checkpoint` must be a state dict, names to tensors, such as `model.state_dict()` or "
            f"what `torch.load` returns of a saved one. Found {type(checkpoint).__name__}."
        )
    load_state_dict(model, checkpoint, f"model id {model_id}")
    return state_dict_sha256(model.state_dict())


def check_weights(saver: AbstractSaver, model_id: int, digest: str) -> None:
    """Refuse other weights than those that a model id was featurized with.

    Raises:
        InputError: It says how to go on.
    """
    known = saver.model_ids[model_id].get("checkpoint")
    if known not in {None, digest}:
        raise InputError(
            "A model id stands for one checkpoint. Found other weights than those with which model "
            f"id {model_id} was featurized in {saver.save_dir}. Use a model id for each "
            f"checkpoint; to start over, delete the folder {model_id} and id_{model_id}.json."
        )
