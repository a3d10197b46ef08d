rule write_list:
    input:
        scores=lambda wildcards: list_scores(wildcards.kind),
        self_influence=lambda wildcards: (
            [f"{folder}/self_influence.h5"] * (wildcards.kind == "suspects")
            if not specs.is_exact
            else []
        ),
    output:
        listed="<results>/lists/{kind}.csv",
    log:
        "<results>/logs/write_list/{kind}.log",
    benchmark:
        "<results>/benchmarks/write_list/{kind}.tsv"
    wildcard_constraints:
        kind=any_of([kind for kind in specs.lists if kind != "duplicates"]),
    conda:
        environment
    threads: 1
    resources:
        mem_mb=job_mb,
    params:
        code=code_of("write_list"),
        fraction=lambda wildcards: specs.lists[wildcards.kind].get("fraction", 1.0),
    message:
        "Listing training samples: {output.listed}"
    script:
        "../scripts/stage.py"


timed("write_list/{kind}", kind=[kind for kind in specs.lists if kind != "duplicates"])


if "duplicates" in specs.lists:
    # Copies are copies under any checkpoint.
    compared = specs.self_influence.ends[0]
    compared_with = specs.lists["duplicates"]["experiment"]

    rule find_duplicates:
        input:
            train_path=f"<results>/features/{compared}/train.h5",
            targets_path=f"<results>/features/{compared}/{compared_with}.h5",
        output:
            listed="<results>/lists/duplicates.csv",
        log:
            "<results>/logs/find_duplicates.log",
        benchmark:
            "<results>/benchmarks/find_duplicates.tsv"
        conda:
            environment
        threads: compute["threads"]
        resources:
            mem_mb=job_mb,
            memory_mb=compute["memory_mb"],
        params:
            code=code_of("find_duplicates"),
            spec=specs.checkpoint_scores(compared_with, compared).as_dict(),
        message:
            "Looking for copies among all samples: {output.listed}"
        script:
            "../scripts/stage.py"

    timed("find_duplicates")


# Each list is a target of its own name.
for kind in specs.lists:

    rule:
        name:
            kind
        input:
            f"<results>/lists/{kind}.csv",
        localrule: True
