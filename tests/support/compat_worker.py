"""The work of one of several processes that share a save_dir."""

import time

import torch
from compat_models import N, Net, checkpoints, featurize, images, scored, tracer

BATCH = 8


def featurize_part(traker, number, n_workers):
    """Featurize every ``n_workers``-th batch of model id 0, which the workers share."""
    traker.load_checkpoint(checkpoints(Net, 1)[0], 0)
    train = images(N)
    for start in range(number * BATCH, N, n_workers * BATCH):
        rows = range(start, min(start + BATCH, N))
        traker.featurize([t[start : start + BATCH] for t in train], inds=rows)


def stall_at(traker, batch):
    """Make the projection of batch number ``batch`` wait for 10 minutes."""
    project, calls = traker.projector.project, []

    def stalling(grads, model_id):
        calls.append(model_id)
        if len(calls) > batch:
            (traker.save_dir / "stalling").touch()
            time.sleep(600)
        return project(grads, model_id)

    traker.projector.project = stalling


def meet(folder, name, n_workers):
    """Wait until all workers have started, so that they work at the same time."""
    (folder / f"{name}.here").touch()
    while len(list(folder.glob("*.here"))) < n_workers:
        time.sleep(0.005)


def work(task, folder, number, n_workers):
    """Featurize a checkpoint, stall at it, share one with other workers, or score."""
    torch.set_num_threads(1)
    meet(folder.parent, f"{task}{number}", n_workers)
    # The original needs load_from_save_dir=False in some of the processes.
    traker = tracer(folder, load_from_save_dir=task != "featurize" or number % 2 == 0)
    if task == "score":
        scored(traker, name=f"exp{number}").finalize_scores(f"exp{number}", model_ids=[0])
    elif task == "share":
        featurize_part(traker, number, n_workers)
    else:
        if task == "stall":
            stall_at(traker, batch=2)
        featurize(traker, number, BATCH)
        traker.finalize_features(model_ids=[number])
