"""The command `snakemake`, again and again; run by workspace.py.

A process that has imported it forks one for every line of JSON on standard input, [folder,
environment, arguments, file for its output], and prints that one's exit status: most of a start is
imports.
"""

import json
import os
import sys

import jsonschema  # ruff: ignore[unused-import] (the Snakefile's `validate` imports it)
import pandas  # ruff: ignore[unused-import]
from snakemake.cli import main

for line in sys.stdin:
    folder, environment, arguments, output = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[0] = folder  # as with python -m
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["snakemake", *arguments]
        main(arguments)  # exits
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
