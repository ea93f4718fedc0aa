"""A Slurm cluster of three emulated nodes on this machine: real daemons, started by hand, ended by their ids."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.orphans import lives

NODES = 3
_SECONDS = 40.0  # for the nodes to be idle

_CONFIGURATION = """\
ClusterName=distwrap
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5,socket={folder}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={first}-{last} CPUs=4 CoresPerSocket=4 RealMemory=2000
PartitionName=low Nodes=n[1-{nodes}] Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=n[1-{nodes}] MaxTime=60 PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Say what this machine lacks for it; empty where nothing does."""
    if os.geteuid() != 0:
        return "only root can start Slurm's daemons"
    programs = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "runuser", "unshare")
    lacking = [name for name in programs if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


class Slurm:
    """A running cluster.

    Attributes:
        env: the environment in which its commands find it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._pids: list[int] = []

    def run(self, *command: str, seconds: float = 100, **env: str) -> subprocess.CompletedProcess[str]:
        """Run one of its commands to its end."""
        return subprocess.run(
            command, env={**self.env, **env}, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )

    def start(self) -> None:
        """Start munged, the controller and the nodes, and wait until all nodes are idle."""
        host, ports = socket.gethostname(), _free_ports(NODES + 1)
        for name in ("state", "munge", *(f"spool.n{n}" for n in range(1, NODES + 1))):
            (self.folder / name).mkdir()
        text = _CONFIGURATION.format(
            folder=self.folder, host=host, nodes=NODES, port=ports[0], first=ports[1], last=ports[-1]
        )
        (self.folder / "slurm.conf").write_text(text)
        self._start_munge()
        # The emulated nodes' names lead here for the processes of the nodes alone.
        hosts = self.folder / "hosts"
        names = " ".join(f"n{n}" for n in range(1, NODES + 1))
        hosts.write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {names}\n")
        self._daemon("slurmctld", "-i", "-f", str(self.folder / "slurm.conf"))
        for n in range(1, NODES + 1):
            conf = self.folder / "slurm.conf"
            self._daemon(
                "unshare", "--mount", "sh", "-c", f"mount --bind {hosts} /etc/hosts && exec slurmd -N n{n} -f {conf}"
            )
        deadline = time.monotonic() + _SECONDS
        while self.run("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D").stdout.strip() != str(NODES):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the nodes are not idle after {_SECONDS:g} s: {self.run('sinfo').stdout}")
            time.sleep(0.1)

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        (folder / "key").write_bytes(os.urandom(128))
        shutil.chown(folder, "munge", "munge")
        shutil.chown(folder / "key", "munge", "munge")
        folder.chmod(0o755)
        (folder / "key").chmod(0o400)
        for above in folder.parents:
            if above.stat().st_uid == 0 and not above.stat().st_mode & 0o001:
                raise RuntimeError(f"{above} keeps the munge user out of {folder}")
        self._daemon(
            *("runuser", "-u", "munge", "--", "munged", "--force", f"--key-file={folder}/key"),
            *(f"--socket={folder}/socket", f"--pid-file={folder}/pid", f"--log-file={folder}/log"),
            f"--seed-file={folder}/seed",
        )

    def _daemon(self, *command: str) -> None:
        subprocess.run(command, env=self.env, check=True, timeout=30, stdin=subprocess.DEVNULL, capture_output=True)

    def stop(self) -> None:
        """End its jobs, then its daemons."""
        self.run("scancel", "--user=root", "--quiet")
        deadline = time.monotonic() + 15
        while self.run("squeue", "-h").stdout.strip() and time.monotonic() < deadline:
            time.sleep(0.2)
        daemons: list[int] = []
        for name in (*(f"slurmd.n{n}.pid" for n in range(1, NODES + 1)), "slurmctld.pid", "munge/pid"):
            with suppress(OSError, ValueError):
                daemons.append(int((self.folder / name).read_text()))
        _end(daemons)


@contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """Start a cluster in an empty folder, and end it."""
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def _end(daemons: list[int]) -> None:
    """End daemons in this order, and wait for them together; those that do not end are killed."""
    for pid in daemons:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while any(map(lives, daemons)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in filter(lives, daemons):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    """Find ports in a row that nobody listens on."""
    for first in range(16800, 18800, count):
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
        return list(range(first, first + count))
    raise RuntimeError("no free ports for Slurm")
