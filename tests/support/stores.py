"""An S3 on loopback, and nodes that share no disk."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import boto3
from workspace import forked_python

KEYS = ("mine", "secret")
# Each job runs in a folder of its own, which begins empty and whose name is the job's id. The
# `python` that its script asks for is there, as in an image.
SUBMIT = """#!/bin/sh
node=$(mktemp -d {nodes}/XXXXXX)
mkdir $node/disk $node/home
cp "$1" $node/job.sh
cd $node/disk
export PATH={python}:$PATH HOME=$node/home XDG_CACHE_HOME=$node/home
(sh ../job.sh; echo $? > ../ended; mv ../ended ../status) > ../log 2>&1 < /dev/null &
echo $node
"""
STATUS = """#!/bin/sh
if [ ! -e $1/status ]; then echo running
elif [ $(cat $1/status) = 0 ]; then echo success
else echo failed; fi
"""


class S3:
    """moto's server, with one bucket."""

    def __init__(self, url: str, bucket: str) -> None:
        self.bucket = bucket
        self.environment = {
            "SNAKEMAKE_STORAGE_S3_ENDPOINT_URL": url,
            "SNAKEMAKE_STORAGE_S3_ACCESS_KEY": KEYS[0],
            "SNAKEMAKE_STORAGE_S3_SECRET_KEY": KEYS[1],
            "SNAKEMAKE_STORAGE_S3_REGION": "us-east-1",
        }
        self._client = boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id=KEYS[0],
            aws_secret_access_key=KEYS[1],
            region_name="us-east-1",
        )
        self._client.create_bucket(Bucket=bucket)

    def put(self, path: Path, key: str) -> None:
        self._client.upload_file(str(path), self.bucket, key)

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self.bucket, Key=key)

    def files(self, prefix: str) -> dict[str, bytes]:
        """Return what is stored, by its name behind the prefix."""
        found = self._client.list_objects_v2(Bucket=self.bucket, Prefix=prefix)
        return {
            entry["Key"].removeprefix(prefix): self._client.get_object(
                Bucket=self.bucket, Key=entry["Key"]
            )["Body"].read()
            for entry in found["Contents"]
        }


@contextlib.contextmanager
def s3_server(bucket: str) -> Generator[S3, None, None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None
            time.sleep(0.1)
        yield S3(f"http://127.0.0.1:{port}", bucket)
    finally:
        server.terminate()
        server.wait()


def write_scheduler(folder: Path) -> Path:
    """Write submit.sh and status.sh, a scheduler's commands, and return the folder of its nodes."""
    nodes = folder / "nodes"
    nodes.mkdir()
    python = Path(forked_python()).parent
    for name, text in (
        ("submit.sh", SUBMIT.format(nodes=nodes, python=python)),
        ("status.sh", STATUS),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return nodes
