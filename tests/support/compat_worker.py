"""One process of several on one save_dir; run by test_compat_processes.py.

python compat_worker.py featurize|stall|score SAVE_DIR MODEL_ID NUMBER_OF_WORKERS
"""

import time

import torch
from compat_models import M, N, Net, checkpoints, images, tracer

BATCH = 8


def featurize(made, state, model_id):
    made.load_checkpoint(state, model_id)
    train = images(N)
    for start in range(0, N, BATCH):
        made.featurize([t[start : start + BATCH] for t in train], num_samples=min(BATCH, N - start))


def featurize_part(made, state, number, n_workers):
    """Featurize every n-th batch under model id 0, which the workers share."""
    made.load_checkpoint(state, 0)
    train = images(N)
    for start in range(number * BATCH, N, n_workers * BATCH):
        rows = range(start, min(start + BATCH, N))
        made.featurize([t[start : start + BATCH] for t in train], inds=rows)


def stall_at(made, batch):
    """Let the projection of a batch never come back."""
    project, calls = made.projector.project, []

    def stalling(grads, model_id):
        calls.append(model_id)
        if len(calls) > batch:
            (made.save_dir / "stalling").touch()
            time.sleep(600)
        return project(grads, model_id)

    made.projector.project = stalling


def score(made, state, model_id, name):
    made.start_scoring_checkpoint(name, state, model_id, num_targets=M)
    made.score(images(M, seed=1), num_samples=M)


def meet(folder, name, n_workers):
    """Wait until all workers are here, so that they really work at once."""
    (folder / f"{name}.here").touch()
    while len(list(folder.glob("*.here"))) < n_workers:
        time.sleep(0.005)


def work(task, folder, number, n_workers):
    """Do one worker's part.

    Args:
        task: ``featurize`` a checkpoint of one's own, ``stall`` while at it, ``share`` one, or
            ``score`` an experiment of one's own.
        folder: save_dir.
        number: Which worker this is.
        n_workers: How many work at once.
    """
    torch.set_num_threads(1)
    meet(folder.parent, f"{task}{number}", n_workers)
    if task == "score":
        made = tracer(folder)
        score(made, checkpoints(Net, 1)[0], 0, f"exp{number}")
        made.finalize_scores(f"exp{number}", model_ids=[0])
    elif task == "share":
        featurize_part(tracer(folder), checkpoints(Net, 1)[0], number, n_workers)
    else:
        # With and without the flag that the original asks for in jobs side by side.
        made = tracer(folder, load_from_save_dir=number % 2 == 0)
        if task == "stall":
            stall_at(made, batch=2)
        featurize(made, checkpoints(Net, n_workers)[number], number)
        made.finalize_features(model_ids=[number])
