"""Scores by plain autograd and dense float64 matrices, with the reference projection matrix."""

import copy

import numpy as np
import torch

from trak_core.projection.reference import projection_matrix
from trak_core.settings import ProjectionSpec, matrix_shape, stream_of


def jacobian(model, samples, output):
    """Return gradients (n, p), outputs and labels, by one backward pass for each sample."""
    model = copy.deepcopy(model).double().eval()
    parameters = list(model.parameters())
    rows, outputs, labels = [], [], []
    for *inputs, label in samples:
        logits = model(*(x.double().unsqueeze(0) for x in inputs))[0]
        if output == "image_classification":
            p = torch.softmax(logits, 0)[label]
            f = torch.log(p) - torch.log1p(-p)
        else:
            f = logits.squeeze()
        gradients = torch.autograd.grad(f, parameters)
        rows.append(torch.cat([g.flatten() for g in gradients]))
        outputs.append(f.item())
        labels.append(float(label))
    return torch.stack(rows).numpy(), np.array(outputs), np.array(labels)


def projected(gradients, proj_dim, kind="rademacher", checkpoint="c0", parameters=()):
    """Return the features of gradients (n, p), by the dense matrix of a checkpoint.

    A tensor sketch needs the ``parameters``, whose shapes it depends on.
    """
    shapes = [matrix_shape(p.shape) for p in parameters] if kind == "tensor_sketch" else None
    sizes = {"n_params": gradients.shape[1], "proj_dim": proj_dim, "shapes": shapes}
    spec = ProjectionSpec(kind=kind, **sizes, seed=0, stream=stream_of(checkpoint))
    return gradients @ projection_matrix(spec).astype(float) * spec.scale


def parts(jacobians, proj_dim=None):
    """Return features of training samples and targets, outputs and labels for each checkpoint.

    ``jacobians`` are results of ``jacobian`` for training samples and targets, by checkpoint.
    Without ``proj_dim``, features are gradients.
    """
    features = []
    for checkpoint, ((gradients, f, y), (target_gradients, *_)) in jacobians.items():
        if proj_dim is not None:
            gradients, target_gradients = (
                projected(rows, proj_dim, checkpoint=checkpoint)
                for rows in (gradients, target_gradients)
            )
        # Scores don't change in an orthonormal basis of the training samples' span, because the
        # orthogonal part of targets has inner product 0 with all of them. Matrices are smaller.
        basis, _ = np.linalg.qr(gradients.T)
        features.append((gradients @ basis, target_gradients @ basis, f, y))
    return features


def scores(
    features,
    *,
    output,
    damping,
    weighting="plain",
    combine="product_of_averages",
    power=1.0,
    normalize=False,
):
    """Return the (n, m) scores of what ``parts`` returns."""
    all_similarities, all_weights, norms = [], [], []
    for phi, phi_targets, f, y in features:
        if normalize:
            phi = np.array([row / np.sqrt(sum(row * row)) for row in phi])
        if output == "image_classification":
            p = 1 / (1 + np.exp(-f))
            q, curvature = 1 - p, (p * (1 - p)) ** power
        else:
            q, curvature = y - f, np.ones_like(f)
        w = curvature if weighting == "curvature" else np.ones_like(f)
        shift = damping * np.mean(w * (phi**2).sum(1))
        gramian = phi.T @ (w[:, None] * phi) + shift * np.eye(phi.shape[1])
        # Without damping, the limit of ever less damping.
        inverse = np.linalg.inv(gramian) if shift else np.linalg.pinv(gramian, rcond=1e-12)
        all_similarities.append(phi @ inverse @ phi_targets.T)
        all_weights.append(np.sign(q) * np.abs(q) ** power)
        # The norm of the training samples' scores for each other.
        norms.append(np.linalg.norm(np.abs(q[:, None]) ** power * (phi @ inverse @ phi.T)))
    a, q = np.array(all_similarities), np.array(all_weights)
    if combine == "average_of_products":
        return (a * q[:, :, None]).mean(0)
    if combine == "unit_average":
        return (a * q[:, :, None] / np.array(norms)[:, None, None]).mean(0)
    return a.mean(0) * q.mean(0)[:, None]
