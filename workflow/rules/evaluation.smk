# If models were retrained elsewhere, their outputs are read from the user's file.
ground_truth = specs.evaluation.get("ground_truth")
retrained_files, truth_signature = [], None
if ground_truth is not None:
    file, truth_signature = own_file(ground_truth)
    retrained_files = [file]
elif "subsets" in specs.evaluation:
    retrained_files = [
        f"{folder}/retrained/{i}-{j}.h5" for i, j in specs.subset_groups()
    ]
# The checkpoints whose features the evaluation needs.
with_features = specs.checkpoints if specs.measures_features else []


use rule stage as retrain_subsets with:
    output:
        retrained="<results>/retrained/{first}-{last}.h5",
    log:
        "<results>/logs/retrain_subsets/{first}-{last}.log",
    benchmark:
        "<results>/benchmarks/retrain_subsets/{first}-{last}.tsv"
    wildcard_constraints:
        first=r"\d+",
        last=r"\d+",
    resources:
        mem_mb=job_mb,
        batch_size=compute["batch_size"],
    params:
        code=code_of("retrain"),
        study_file=config["study"],
        spec=lambda w: specs.random_subsets.as_dict(),
    message:
        "Retraining on subsets {wildcards.first} to {wildcards.last}"


use rule model_stage as compute_embeddings with:
    input:
        checkpoint=checkpoint_input,
    output:
        embeddings="<results>/embeddings/{checkpoint}.h5",
    log:
        "<results>/logs/compute_embeddings/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/compute_embeddings/{checkpoint}.tsv"
    params:
        code=code_of("compute_embeddings"),
        signature=checkpoint_signature,
        spec=lambda w: specs.embeddings.under(w.checkpoint).as_dict(),
        study_file=config["study"],
    message:
        "Embedding all samples under checkpoint {wildcards.checkpoint}"


use rule stage as evaluate_scores with:
    input:
        scores="<results>/scores/{experiment}.h5",
        checkpoint_scores=of_checkpoints("scores/{experiment}/{c}.h5"),
        retrained=retrained_files,
        train_paths=of_checkpoints("features/{c}/train.h5", with_features),
        targets_paths=of_checkpoints("features/{c}/{experiment}.h5", with_features),
        embeddings=(
            of_ends("embeddings/{c}.h5")
            if "embedding_cosine" in specs.evaluation["baselines"]
            else []
        ),
    output:
        evaluation="<results>/evaluation/{experiment}.h5",
    log:
        "<results>/logs/evaluate_scores/{experiment}.log",
    benchmark:
        "<results>/benchmarks/evaluate_scores/{experiment}.tsv"
    params:
        code=code_of("evaluate_scores"),
        study_file=config["study"],
        signature=truth_signature,
        spec=scores_spec,
        embeddings_spec=specs.embeddings.as_dict(),
        retrained_spec=(
            specs.random_subsets.as_dict() if "subsets" in specs.evaluation else None
        ),
        baselines=specs.evaluation["baselines"],
        sweep=specs.sweep,
    message:
        "Measuring the scores of experiment {wildcards.experiment}"
