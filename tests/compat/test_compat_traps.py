"""Behaviour that differs from the original, which computes a wrong number or fails there."""

import json

import numpy as np
import pytest
import torch
from compat_models import (
    CLASSES,
    M,
    N,
    Net,
    checkpoints,
    featurize,
    featurized,
    finalized,
    images,
    scored,
    tracer,
)
from refused import refused

from trak_core.compat.gradient_computers import (
    FunctionalGradientComputer,
    IterativeGradientComputer,
)
from trak_core.compat.modelout_functions import ImageClassificationModelOutput
from trak_core.compat.projectors import (
    BasicProjector,
    BasicSingleBlockProjector,
    ChunkedCudaProjector,
    CudaProjector,
)
from trak_core.compat.score_computers import BasicScoreComputer

TRAIN, TARGETS, STATES = images(N), images(M, seed=1), checkpoints(Net, 2)


def test_scoring_before_finalizing_is_an_error(tmp_path):
    traker = featurized(tmp_path)
    traker.start_scoring_checkpoint("mine", STATES[0], 0, num_targets=M)
    with refused("compat.not_finalized", "model id 0"):
        traker.score(TARGETS, num_samples=M)
    traker.finalize_features()
    with refused("compat.unusable", "model id 0", "targets 0, 1, 2, 3, 4, 5"):
        traker.finalize_scores("mine")
    traker.score(TARGETS, num_samples=M)
    assert np.isfinite(traker.finalize_scores("mine")).all()


def test_allow_skip_leaves_out_checkpoints_with_a_warning(tmp_path):
    traker = finalized(tmp_path, (0, 1))
    scored(traker)
    alone = np.array(traker.finalize_scores("mine", model_ids=[0]))
    with refused("compat.unusable", "model id 1", "targets are not scored"):
        traker.finalize_scores("mine")
    with pytest.warns(UserWarning, match=r"'mine' leave out model id 1: its targets are not"):
        assert np.array_equal(traker.finalize_scores("mine", allow_skip=True), alone)
    # A checkpoint without finalized features is left out unless it is named.
    traker = featurized(tmp_path / "unfinished", (0, 1))
    traker.finalize_features(model_ids=[0])
    scored(traker)
    with pytest.warns(UserWarning, match="model id 1: its features are not finalized"):
        traker.finalize_scores("mine")
    with refused("compat.unusable", "model id 1", "features are not finalized"):
        traker.finalize_scores("mine", model_ids=[0, 1])


def test_only_missing_samples_of_a_batch_are_computed(tmp_path):
    whole = featurized(tmp_path / "whole").saver.current_store["grads"]
    traker = tracer(tmp_path / "parts")
    traker.load_checkpoint(STATES[0], 0)
    traker.featurize([t[5:12] for t in TRAIN], inds=np.arange(5, 12))
    computed = []
    compute = traker.gradient_computer.compute_per_sample_grad
    traker.gradient_computer.compute_per_sample_grad = lambda batch: (
        computed.append(len(batch[0])) or compute(batch)
    )
    traker.featurize([t[:16] for t in TRAIN], num_samples=16)
    traker.featurize([t[:16] for t in TRAIN], inds=torch.arange(16))
    traker.featurize([t[16:] for t in TRAIN], num_samples=N - 16)
    assert computed == [9, N - 16]
    np.testing.assert_allclose(traker.saver.current_store["grads"], whole, rtol=1e-4, atol=1e-5)
    assert traker.saver.model_ids[0]["is_featurized"] == 1


@pytest.mark.parametrize("method", ["compute_per_sample_grad", "features"])
def test_a_batch_too_large_for_memory_is_halved(tmp_path, monkeypatch, capsys, method):
    whole = featurized(tmp_path / "whole").saver.current_store["grads"]
    kind = FunctionalGradientComputer if method == "features" else Slow
    traker = tracer(tmp_path / "halves", gradient_computer=kind)
    compute = getattr(kind, method)

    def limited(self, batch, *others):
        if len(batch[0]) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute(self, batch, *others)

    monkeypatch.setattr(kind, method, limited)
    featurize(traker)
    np.testing.assert_allclose(traker.saver.current_store["grads"], whole, rtol=1e-4, atol=1e-5)
    assert "out of memory. Continuing with batches of 10 samples" in capsys.readouterr().out


class Slow(FunctionalGradientComputer):
    """A subclass, whose gradients are formed and then projected."""


@pytest.mark.parametrize("half", [False, True])
def test_projecting_in_the_backward_pass_equals_projecting_gradients(tmp_path, half):
    trakers = [
        finalized(tmp_path / kind.__name__, gradient_computer=kind, use_half_precision=half)
        for kind in (Slow, FunctionalGradientComputer)
    ]
    slow, fast = (scored(traker).saver.current_store for traker in trakers)
    bound = 1e-3 if half else 1e-5
    for name in ("grads", "out_to_loss", "mine_grads"):
        assert np.abs(slow[name]).max() > 0
        np.testing.assert_allclose(fast[name], slow[name], bound, bound * np.abs(slow[name]).max())


class InBatch(ImageClassificationModelOutput):
    """SimCLR's loss, which is log 1 for a batch of one sample."""

    per_sample = False

    @staticmethod
    def get_output(model, weights, buffers, x, labels):
        logits = model(x)
        return (logits @ logits.T).log_softmax(1).diagonal().sum()


def test_a_loss_inside_the_batch_is_refused(tmp_path):
    """The original passes the whole batch, and computes no per-sample gradients."""
    options = {"task": InBatch(), "gradient_computer": IterativeGradientComputer}
    traker = tracer(tmp_path, **options)
    traker.load_checkpoint(STATES[0], 0)
    with refused("compat.all_zero", N):
        traker.featurize(TRAIN, num_samples=N)
    for i in range(N):
        traker.featurize([t[i : i + 1] for t in TRAIN], num_samples=1)
    with refused("compat.all_zero", N):
        traker.finalize_features()


def test_a_method_that_was_replaced_is_called(tmp_path):
    traker = tracer(tmp_path)
    traker.task.get_out_to_loss_grad = lambda *_: torch.full((N, 1), 0.5)
    featurize(traker)
    assert (traker.saver.current_store["out_to_loss"] == 0.5).all()


def test_an_existing_folder_is_never_wiped(tmp_path):
    traker = finalized(tmp_path)
    scores = np.array(scored(traker).finalize_scores("mine"))
    again = featurized(tmp_path, load_from_save_dir=False)
    assert again.saver.current_store["is_featurized"].all()
    assert again.saver.model_ids[0]["is_finalized"] == 1
    assert np.array_equal(np.load(tmp_path / "scores/mine.mmap"), scores)
    assert "mine" in json.loads((tmp_path / "experiments.json").read_text())


def test_a_new_checkpoint_leaves_finished_scores_until_they_are_replaced(tmp_path):
    traker = finalized(tmp_path, (0, 1))
    scores = np.array(scored(traker).finalize_scores("mine", model_ids=[0]))
    scored(traker, (1,))
    assert np.array_equal(np.load(tmp_path / "scores/mine.mmap"), scores)
    both = traker.finalize_scores("mine")
    assert np.array_equal(np.load(tmp_path / "scores/mine.mmap"), both)
    assert not np.allclose(both, scores)


def test_other_targets_of_a_finished_experiment_are_not_mixed_with_the_old_ones(tmp_path):
    """The targets of a killed run are kept, and so are those of other model ids."""
    traker, part = scored(finalized(tmp_path, (0, 1))), [t[:2] for t in TRAIN]
    traker.start_scoring_checkpoint("mine", STATES[0], 0, M)
    alone = np.array(traker.finalize_scores("mine", model_ids=[0]))
    both = np.array(scored(traker, (1,)).finalize_scores("mine"))
    assert not np.allclose(both, alone)
    again = tracer(tmp_path)
    again.start_scoring_checkpoint("mine", STATES[0], 0, M)
    again.score(part, num_samples=2)
    with refused("compat.unusable", "model id 0: its targets 2, 3, 4, 5 are not scored"):
        again.finalize_scores("mine")
    assert np.array_equal(scored(again).finalize_scores("mine"), both)


def test_another_lambda_finalizes_again(tmp_path):
    scored(finalized(tmp_path))
    traker = tracer(tmp_path, lambda_reg=1.0)
    with refused("compat.unusable", "model id 0", "lambda_reg 0.0", "1.0"):
        traker.finalize_scores("mine")
    traker.finalize_features()
    features = np.array(traker.saver.current_store["features"])
    afresh = finalized(tmp_path / "afresh", lambda_reg=1.0)
    assert np.array_equal(features, afresh.saver.current_store["features"])
    assert json.loads((tmp_path / "id_0.json").read_text())["0"]["lambda_reg"] == 1.0


def test_another_lambda_needs_the_gradients(tmp_path):
    traker = featurized(tmp_path)
    traker.finalize_features(del_grads=True)
    assert not (tmp_path / "0/grads.mmap").exists()
    traker.finalize_features()
    with refused("compat.no_gradients", "model id 0", "0.0", "1.0"):
        tracer(tmp_path, lambda_reg=1.0).finalize_features()


@pytest.mark.parametrize("computer", [FunctionalGradientComputer, IterativeGradientComputer])
def test_only_the_chosen_parameters_are_differentiated(computer, tmp_path):
    """A parameter that cannot be differentiated raises no error if it is not in grad_wrt."""

    class Refusing(torch.autograd.Function):
        generate_vmap_rule = True
        forward = staticmethod(lambda x: x.clone())
        setup_context = staticmethod(lambda ctx, inputs, output: None)

        @staticmethod
        def backward(ctx, g):
            raise AssertionError("must not be differentiated")

    class Model(Net):
        def forward(self, x):
            x = Refusing.apply(self.conv1.weight).sum() + self.conv2(self.conv1(x))
            return self.fc(x.mean((2, 3)))

    traker = featurized(tmp_path, model=Model(), grad_wrt=["fc.bias"], gradient_computer=computer)
    assert traker.num_params_for_grad == CLASSES
    assert np.isfinite(traker.saver.current_store["grads"]).all()


def test_half_precision_sums_and_solves_in_full(tmp_path):
    grads = torch.full((70_000, 2), 1.0, dtype=torch.float16)
    grads[::2, 1] = -1
    computer = BasicScoreComputer(torch.float16, "cpu", CUDA_MAX_DIM_SIZE=999, lambda_reg=1e-3)
    xtx = computer.get_xtx(grads)
    assert torch.equal(xtx, 70_000 * torch.eye(2, dtype=torch.float64))
    inverse = torch.linalg.inv(xtx.double() + 1e-3 * torch.eye(2))
    expected = grads.double() @ (inverse / inverse.abs().mean())
    assert torch.allclose(computer.get_x_xtx_inv(grads, xtx).double(), expected)
    scores, expected = (
        scored(
            finalized(tmp_path / f"{half}", use_half_precision=half, lambda_reg=1e-6)
        ).finalize_scores("mine")
        for half in (True, False)
    )
    assert scores.dtype == np.float32
    assert np.abs(scores - expected).max() <= 2e-2 * np.abs(expected).max()


def test_the_matrix_is_a_function_of_seed_model_id_row_and_column_alone():
    torch.manual_seed(0)
    p, k = 300, 40
    grads = {"a": torch.randn(5, 10, 10), "b": torch.randn(5, 200)}
    flat = torch.cat([g.flatten(1) for g in grads.values()], dim=1)

    def close(features, expected):
        assert torch.allclose(features, expected, rtol=1e-5, atol=1e-4)

    for kind in ("rademacher", "normal"):
        whole = BasicProjector(p, k, 3, kind, "cpu")
        expected = whole.project(flat, model_id=7)
        for block_size in (1, 7, 100):
            other = BasicProjector(p, k, 3, kind, "cpu", block_size=block_size, dtype=torch.float16)
            assert torch.equal(other.project(grads, model_id=7), expected)
        single = BasicSingleBlockProjector(p, k, 3, kind, "cpu", dtype=torch.float16, model_id=7)
        close(single.project(grads, model_id=7), expected)
        wider = BasicProjector(p, 2 * k, 3, kind, torch.device("cpu"))
        close(wider.project(flat, model_id=7)[:, :k], expected)
        # Seeds of chunks do not matter: one matrix for all parameters.
        chunks = [BasicProjector(n, k, 3, kind, "cpu") for n in (100, 200)]
        chunked = ChunkedCudaProjector(chunks, 200, [100, 200], 8, "cpu", torch.float16)
        close(chunked.project(grads, model_id=7), expected)
        reseeded = BasicProjector(p, k, 4, kind, "cpu")
        for other in (whole.project(flat, model_id=8), reseeded.project(flat, model_id=7)):
            assert not torch.allclose(other, expected, atol=1)


def test_a_cuda_projector_needs_a_cuda_device():
    with refused("compat.cuda_projector", "'cpu'"):
        CudaProjector(10, 5, 0, "rademacher", "cpu", 8)
