"""A study to spoil, Snakemake's command to try it with, and the one error it answers with."""

import json
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import yaml
from workspace import Workspace

GOOD = {
    "model_output": "regression",
    "checkpoints": {"c0": "c0.pt"},
    "experiments": {"mine": {"targets": ["patient-342"]}},
}

STUDY = "diabetes.py"


def study_to_spoil(folder):
    workspace = Workspace.make(folder, STUDY, GOOD)
    workspace.path("c0.pt").write_bytes(b"not looked at before a job")
    text = workspace.path(STUDY).read_text()
    text = text.replace("x[:342], y[:342]", "x[:342].repeat(10, 1), y[:342].repeat(10)")
    workspace.path("many.py").write_text(text)
    return workspace


class Door:
    """Snakemake's command without its start; see snakemake_door.py."""

    def __init__(self, process, workspace):
        self.process, self.workspace = process, workspace

    def dry_run(self, config):
        """Try a config, of values or as bytes, and return exit status and output."""
        if not isinstance(config, bytes):
            values = {"study": STUDY, **GOOD, **config}
            config = yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode()
        self.workspace.path("study.yaml").write_bytes(config)
        output = self.workspace.path("output.txt")
        arguments = ["--configfile", "study.yaml", "--cores", "2", "-n"]
        arguments += ["--snakefile", self.workspace.snakefile]
        request = [str(self.workspace.folder), arguments, str(output)]
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline()), output.read_text()

    def refuse(self, config):
        status, output = self.dry_run(config)
        assert status != 0, output
        return output


@contextmanager
def open_door(workspace):
    command = (sys.executable, Path(__file__).with_name("snakemake_door.py"))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Door(process, workspace)
        finally:
            process.stdin.close()


def message(output):
    """Return the text of the one error, and make sure that it is all there is."""
    assert "Traceback" not in output
    assert "Job stats" not in output
    assert "jobid" not in output
    found = re.findall(r"^WorkflowError in file .*\n((?:.*\n)*?)  File ", output, flags=re.M)
    assert len(found) == 1, output
    return " ".join(found[0].split())
