"""Look a study over: the request comes as JSON on standard input, the answer goes out likewise.

The Snakefile runs this in a process of its own, so that neither torch nor the study's code is
loaded into Snakemake.
"""

import json
import os
import sys
from pathlib import Path

from trak_core.errors import InputError
from trak_core.stages.check_study import check_study

# The study's own prints go where notices go: the answer is alone on standard output.
answer = os.dup(1)
os.dup2(2, 1)
request = json.load(sys.stdin)
try:
    sizes = check_study(**(request | {"study_file": Path(request["study_file"])}))
except InputError as error:
    sys.exit(str(error))
with os.fdopen(answer, "w") as file:
    json.dump(sizes, file)
