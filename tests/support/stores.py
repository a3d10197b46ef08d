"""An S3 on loopback, and nodes that share no disk."""

import contextlib
from collections.abc import Generator
from pathlib import Path

import boto3
from moto.server import ThreadedMotoServer
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
        keys = {"aws_access_key_id": KEYS[0], "aws_secret_access_key": KEYS[1]}
        self._client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
        self._client.create_bucket(Bucket=bucket)

    def put(self, path: Path, key: str) -> None:
        self._client.upload_file(str(path), self.bucket, key)

    def files(self, prefix: str) -> dict[str, bytes]:
        """Return what is stored, by its name behind the prefix."""
        listed = self._client.list_objects_v2(Bucket=self.bucket, Prefix=prefix)["Contents"]
        keys = [entry["Key"] for entry in listed]
        objects = {key: self._client.get_object(Bucket=self.bucket, Key=key) for key in keys}
        return {key.removeprefix(prefix): entry["Body"].read() for key, entry in objects.items()}


@contextlib.contextmanager
def s3_server(bucket: str) -> Generator[S3, None, None]:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield S3(f"http://{host}:{port}", bucket)
    finally:
        server.stop()


def write_scheduler(folder: Path) -> Path:
    """Write submit.sh and status.sh, a scheduler's commands, and return the folder of its nodes."""
    nodes = folder / "nodes"
    nodes.mkdir()
    python = Path(forked_python()).parent
    submit = SUBMIT.format(nodes=nodes, python=python)
    for name, text in (("submit.sh", submit), ("status.sh", STATUS)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return nodes
