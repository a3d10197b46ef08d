"""A throw-away SLURM on this machine: two pretend nodes with two pretend GPUs each, on loopback.

Debian's slurm-wlm and munge, as root, without systemd, control groups or accounts. The
configuration lies in /etc/slurm, because SLURM_CONF does not reach the jobs of Snakemake's plugin.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

from filelock import FileLock

ETC = Path("/etc/slurm")
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")


def missing() -> str | None:
    """Why there can be no cluster here, or None if there can."""
    if os.geteuid() != 0:
        return "a throw-away SLURM needs root"
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"no {', '.join(absent)} (Debian: apt-get install slurm-wlm munge)"
    if (ETC / "slurm.conf").exists() and not (ETC / "slurm.conf").is_symlink():
        return f"{ETC} holds the configuration of a real SLURM"
    return None


def _path() -> str:
    return os.environ["PATH"] + ":/usr/sbin:/sbin"


def _run(*command: str, check: bool = True) -> str:
    result = subprocess.run(
        command,
        env={**os.environ, "PATH": _path()},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if check and result.returncode:
        raise RuntimeError(f"{' '.join(command)}: {result.stdout}{result.stderr}")
    return result.stdout


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _configuration(folder: Path) -> dict[str, str]:
    host = socket.gethostname().split(".")[0]
    ports = [_port() for _ in range(3)]
    nodes = "\n".join(
        f"NodeName=node{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[i]} CPUs=1 "
        "RealMemory=16000 Gres=gpu:2 State=UNKNOWN"
        for i in (1, 2)
    )
    slurm = f"""ClusterName=throwaway
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
MinJobAge=600
KillWait=2
SlurmdTimeout=10
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=1440 State=UP
"""
    gres = ""
    for i in (1, 2):
        for gpu in (0, 1):
            device = folder / f"dev/node{i}-gpu{gpu}"
            device.parent.mkdir(exist_ok=True)
            # A character device like /dev/null: SLURM then counts it and sets CUDA_VISIBLE_DEVICES.
            os.mknod(device, 0o20666, os.makedev(1, 3))
            gres += f"NodeName=node{i} Name=gpu File={device}\n"
    cgroup = "CgroupAutomount=no\nIgnoreSystemd=yes\nCgroupPlugin=cgroup/v1\n"
    return {"slurm.conf": slurm, "gres.conf": gres, "cgroup.conf": cgroup}


def _start_munge() -> None:
    if subprocess.run(("munge", "-n"), capture_output=True, check=False).returncode == 0:
        return
    run = Path("/run/munge")
    run.mkdir(exist_ok=True)
    shutil.chown(run, "munge", "munge")
    run.chmod(0o755)
    _run("runuser", "-u", "munge", "--", "/usr/sbin/munged", "--key-file=/etc/munge/munge.key")


class Cluster:
    """The daemons, to be asked and to be hurt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def queue(self) -> list[tuple[str, str, str]]:
        """Id, state and node of every job that waits or runs."""
        lines = _run("squeue", "-h", "-o", "%i %T %N").splitlines()
        return [tuple([*line.split(), ""][:3]) for line in lines]

    def cancel(self, job: str) -> None:
        _run("scancel", job)

    def kill_node(self, name: str) -> None:
        """SIGKILL to a node's daemon and all that it runs, as a power cut would."""
        pid = int((self.folder / f"slurmd.{name}.pid").read_text())
        steps = _run("pgrep", "-f", f"slurmstepd: .*|{self.folder}/spool/{name}", check=False)
        os.kill(pid, signal.SIGKILL)
        for step in steps.split():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(int(step)), signal.SIGKILL)

    def start_node(self, name: str) -> None:
        _run("slurmd", "-N", name)

    def start_requeued_now(self) -> None:
        """Let jobs of a lost node begin, which SLURM holds back for two minutes."""
        for job, state, _ in self.queue():
            if state == "PENDING":
                _run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)

    def wait_for_nodes(self, n_nodes: int) -> None:
        for _ in range(100):
            if len(_run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split()) >= n_nodes:
                return
            time.sleep(0.1)
        raise RuntimeError(f"nodes don't come up:\n{_run('sinfo', '-N', '-l')}")


@contextlib.contextmanager
def cluster(folder: Path) -> Generator[Cluster, None, None]:
    """Start the daemons, and stop them and their jobs at the end; one cluster at a time."""
    with FileLock("/run/trak-core-slurm.lock"):
        yield from _cluster(folder)


def _cluster(folder: Path) -> Generator[Cluster, None, None]:
    for name in ("state", "spool/node1", "spool/node2"):
        (folder / name).mkdir(parents=True)
    ETC.mkdir(exist_ok=True)
    for name, text in _configuration(folder).items():
        (folder / name).write_text(text)
        link = ETC / name
        link.unlink(missing_ok=True)
        link.symlink_to(folder / name)
    started = Cluster(folder)
    _start_munge()
    try:
        _run("slurmctld", "-c")
        for node in ("node1", "node2"):
            started.start_node(node)
        started.wait_for_nodes(2)
        yield started
    finally:
        _run("scancel", "-f", "-u", "root", check=False)
        _run("scontrol", "shutdown", check=False)
        time.sleep(0.5)
        for file in folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError, FileNotFoundError):
                os.kill(int(file.read_text()), signal.SIGKILL)
        for name in ("slurm.conf", "gres.conf", "cgroup.conf"):
            (ETC / name).unlink(missing_ok=True)
