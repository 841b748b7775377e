"""A real SLURM of two nodes on this machine, without systemd and without control groups.

It needs Debian's packages ``slurmctld slurmd slurm-client munge`` and root. Every node is a ``slurmd`` in namespaces of
its own: its host name is the node's, the nodes' names resolve, and ending its first process ends all that runs on
it, as a power failure would. Everything lies in one directory; nothing below ``/etc`` changes.

Source for the settings: the manual pages slurm.conf(5) and munged(8).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "unshare", "setpriv")
PATIENCE_SECONDS = 360.0
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

# The first process of a node waits for the daemon: as first process itself the daemon would leave zombies.
_NODE = """
hostname "$1" && mount --bind "$2/hosts" /etc/hosts && ulimit -c 0 || exit 1
slurmd -D -f "$2/slurm.conf" -N "$1" &
wait $!
"""


def missing() -> str:
    """What keeps a cluster from starting here; empty where nothing does."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "needs root, for the nodes' namespaces"


class Cluster:
    """See the module's text; :func:`running_cluster` makes one.

    Attributes:
        environment: what a process needs to speak to this cluster.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {"SLURM_CONF": str(directory / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the daemons and wait until every node is idle."""
        for name in ("state", "log"):
            (self.directory / name).mkdir()
        key = self.directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        hosts = Path("/etc/hosts").read_text(encoding="utf-8")
        (self.directory / "hosts").write_text(hosts + "".join(f"127.0.0.1 {node}\n" for node in NODES))
        (self.directory / "slurm.conf").write_text(_configuration(self.directory), encoding="utf-8")
        at = self.directory
        files = [f"--key-file={key}", f"--socket={at}/munge.sock", f"--pid-file={at}/munged.pid"]
        self._daemon("munged", "munged", "--foreground", *files, f"--seed-file={at}/munge.seed", "--force")
        self.wait_until("munge's socket", (at / "munge.sock").exists)
        self._daemon("slurmctld", "slurmctld", "-D", "-c", "-f", str(at / "slurm.conf"))
        for node in NODES:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        """Switch a node on, and wait until it is idle."""
        apart = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
        self._daemon(node, *apart, "bash", "-c", _NODE, "bash", node, str(self.directory))
        self.wait_until(f"node {node}", lambda: self._state_of(node) == "idle")

    def fail_node(self, node: str) -> None:
        """Cut a node's power, and let the controller know at once."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        self.command("scontrol", "update", f"nodename={node}", "state=down", "reason=power")

    def stop(self) -> None:
        """End the daemons, by the processes that this object started; what runs on the nodes ends with them."""
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        self._daemons.clear()

    def command(self, *words: str, cwd: Path | None = None, extra: Mapping[str, str] | None = None) -> str:
        """Run a command of SLURM's; its standard output. Fails with what it said on standard error."""
        environment = {**os.environ, **self.environment, **(extra or {})}
        done = subprocess.run(
            words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def job(self, job_id: int) -> dict[str, str]:
        """``scontrol show job`` as a mapping, e.g. of ``JobState`` and ``Restarts``."""
        words = self.command("scontrol", "--oneliner", "show", "job", str(job_id)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, job_id: int, states: Sequence[str], patience: float = PATIENCE_SECONDS) -> dict[str, str]:
        """Poll a job until it is in one of ``states``; what it is then."""
        found: dict[str, str] = {}

        def reached() -> bool:
            found.update(self.job(job_id))
            return found["JobState"] in states

        self.wait_until(f"job {job_id} to be {' or '.join(states)}", reached, patience, lambda: str(found))
        return found

    def _state_of(self, node: str) -> str:
        done = subprocess.run(
            ["sinfo", "--noheader", "--nodes", node, "--partition", "main", "--format", "%t"],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip()

    def _daemon(self, name: str, *words: str) -> None:
        """A daemon that ends with this process, however that ends."""
        with (self.directory / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *words],
                env={**os.environ, **self.environment, "PATH": f"{_PATH}:{os.environ['PATH']}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(
        self,
        what: str,
        reached: Callable[[], bool],
        patience: float = PATIENCE_SECONDS,
        found: Callable[[], str] = lambda: "",
    ) -> None:
        """Poll until ``reached``; fails with what was ``found`` and the daemons' logs."""
        end = time.monotonic() + patience
        while not reached():
            if time.monotonic() > end:
                logs = sorted((self.directory / "log").iterdir())
                tails = "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
                raise AssertionError(f"waited {patience:.0f} s for {what} {found()}\n{tails}")
            time.sleep(0.05)


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A cluster for as long as the block runs."""
    # Paths of Unix sockets are short, and pytest's directories are not.
    with tempfile.TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True) as directory:
        cluster = Cluster(Path(directory))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def _configuration(at: Path) -> str:
    host = socket.gethostname().split(".")[0]
    controller, *ports = _free_ports(1 + len(NODES))
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000 State=UNKNOWN"
        for node, port in zip(NODES, ports, strict=True)
    )
    return f"""
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it may start again
AuthInfo=socket={at}/munge.sock,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool.%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/%n.pid
SlurmctldLogFile={at}/log/slurmctld.log
SlurmdLogFile={at}/log/%n.log
# nothing that needs control groups
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
# act at once
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdTimeout=60
KillWait=30
# ended jobs can be asked for
MinJobAge=3600
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=main Nodes=ALL Default=YES DefaultTime=00:30:00 PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL DefaultTime=00:30:00 PriorityTier=10 PreemptMode=OFF
"""


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        held = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]
