# Lists need the study only if it may define class names.
naming_study = (
    config["study"] if mentions(Path(config["study"]), "class_names") else None
)


def list_scores(kind):
    """Return the file of scores from which a list is made, for the pool or training samples."""
    scored = "pool" if kind == "select" and specs.pool is not None else "scores"
    return f"{folder}/{scored}/{specs.lists[kind]['experiment']}.h5"


use rule stage as write_list with:
    input:
        scores=lambda w: list_scores(w.kind),
        self_influence=lambda w: known_self_influence if w.kind == "suspects" else [],
    output:
        listed="<results>/lists/{kind}.csv",
    log:
        "<results>/logs/write_list/{kind}.log",
    benchmark:
        "<results>/benchmarks/write_list/{kind}.tsv"
    wildcard_constraints:
        kind=any_of([kind for kind in specs.lists if kind != "duplicates"]),
    params:
        code=code_of("write_list"),
        study_file=naming_study,
        spec=lambda w: specs.list_scores(w.kind).as_dict(),
        fraction=lambda w: specs.lists[w.kind].get("fraction", 1.0),
    message:
        "Listing training samples: {output.listed}"


if specs.pool is not None:

    use rule compute_scores as compute_scores_pool with:
        input:
            train_path="<results>/features/{checkpoint}/train.h5",
            targets_path="<results>/features/{checkpoint}/{experiment}.h5",
            normal_matrix="<results>/normal_matrix/{checkpoint}.h5",
            pool="<results>/features/{checkpoint}/pool.h5",
        output:
            scores="<results>/pool/{experiment}/{checkpoint}.h5",
        log:
            "<results>/logs/compute_scores_pool/{experiment}/{checkpoint}.log",
        benchmark:
            "<results>/benchmarks/compute_scores_pool/{experiment}/{checkpoint}.tsv"
        priority: 0
        params:
            keep="top_k",
            spec=lambda w: specs.list_scores("select").under(w.checkpoint).as_dict(),
        message:
            "Scoring the pool for {wildcards.experiment} under checkpoint {wildcards.checkpoint}"

    use rule average_scores as average_scores_pool with:
        input:
            checkpoint_scores=of_checkpoints("pool/{experiment}/{c}.h5"),
            features=of_checkpoints("features/{c}/pool.h5"),
        output:
            scores="<results>/pool/{experiment}.h5",
        log:
            "<results>/logs/average_scores_pool/{experiment}.log",
        benchmark:
            "<results>/benchmarks/average_scores_pool/{experiment}.tsv"
        priority: 0
        params:
            spec=specs.list_scores("select").as_dict(),
            pool=specs.pool,
        message:
            "Averaging the pool's scores for {wildcards.experiment} over checkpoints"


if "duplicates" in specs.lists:
    # One checkpoint is enough, because duplicates have equal features with any checkpoint.
    compared = specs.self_influence.ends[0]
    compared_with = specs.lists["duplicates"]["experiment"]

    use rule stage as find_duplicates with:
        input:
            train_path=f"<results>/features/{compared}/train.h5",
            targets_path=f"<results>/features/{compared}/{compared_with}.h5",
        output:
            listed="<results>/lists/duplicates.csv",
        log:
            "<results>/logs/find_duplicates.log",
        benchmark:
            "<results>/benchmarks/find_duplicates.tsv"
        threads: compute["threads"]
        params:
            code=code_of("find_duplicates"),
            study_file=naming_study,
            spec=specs.scores(compared_with).under(compared).as_dict(),
        message:
            "Looking for duplicates among all samples: {output.listed}"


use rule stage as show_list with:
    input:
        listed="<results>/lists/{kind}.csv",
        scores=lambda w: ([list_scores(w.kind)] if w.kind == "suspects" else []),
    output:
        page=report("<results>/lists/{kind}.html", category="lists"),
    log:
        "<results>/logs/show_list/{kind}.log",
    benchmark:
        "<results>/benchmarks/show_list/{kind}.tsv"
    wildcard_constraints:
        kind=any_of(specs.lists),
    params:
        code=code_of("show_list"),
        digest=specs.study_digest,
        study_file=config["study"],
        experiment=lambda w: specs.lists[w.kind]["experiment"],
        pool=lambda w: specs.lists[w.kind].get("pool"),
        question=lambda w: (
            specs.questions.get(specs.lists[w.kind]["experiment"])
            if w.kind == "duplicates"
            else None
        ),
    message:
        "Showing the first rows of a list: {output.page}"


# The name of each list is also a Snakemake target.
for kind in specs.lists:

    rule:
        name:
            kind
        input:
            f"<results>/lists/{kind}.csv",
            f"<results>/lists/{kind}.html",
        localrule: True
