"""Several hosts on one machine: network namespaces joined by a switch, a launch agent in place of ssh.

scripts/hosts runs a command on such hosts; the tests start jobs there.

    namespace SWITCH    bridge br0    ports p0 p1 ...
                                            |  |
    namespace HOST0 (10.77.0.1)  eth0 ------+  |        own network, host name, System V memory and /dev/shm
    namespace HOST1 (10.77.0.2)  eth0 ---------+

With a delay a process takes the place of the switch (delayed_network.py).

mpirun runs on the first host and starts its daemon on the others through the agent. To MPI these are real hosts:
MPI_Comm_split_type(SHARED) separates them and their traffic goes over TCP. Needs root and iproute2.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from support import delayed_network
from support.job import IS_OPEN_MPI, LAUNCHER, Job, RunningJob, job_environment

TOOLS = ("ip", "unshare", "mount", "hostname")
NETWORK = "10.77.0.0/24"
CONGESTION = "cubic"  # What Linux does where nobody has changed it, whatever this machine does
DAEMONS = ("prted", "hydra_pmi_proxy")

AGENT = """#!/bin/bash
# Called as `agent [-x] ADDRESS COMMAND...`, as ssh would be: runs the command on the host of that address.
[ "$1" = -x ] && shift
case $1 in
{cases}
*) echo "no host has the address $1" >&2; exit 1 ;;
esac
shift
exec {enter} "$host" "$*"
"""

ENTER = """#!/bin/bash
# Called as `enter HOST COMMAND`: runs a shell command inside the namespaces of a host.
exec ip netns exec "$1" unshare --uts --mount --ipc bash -c "hostname $1 && mount -t tmpfs tmpfs /dev/shm && $2"
"""


class Hosts:
    """Hosts that can run jobs. Made by `hosts`."""

    def __init__(self, names: Sequence[str], addresses: Sequence[str], folder: Path) -> None:
        self.names = tuple(names)
        self.addresses = tuple(addresses)
        self._folder = folder
        self._enter = _script(folder / "enter", ENTER)
        cases = "\n".join(f"{each}) host={name} ;;" for name, each in zip(names, addresses, strict=True))
        self._agent = _script(folder / "agent", AGENT.format(cases=cases, enter=self._enter))

    def run(
        self,
        program: str | Path,
        ranks_per_host: int | Sequence[int],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 100,
        args: Sequence[str] = (),
    ) -> Job:
        """Run a Python program (path or text) to its end, with so many ranks on each host; ranks fill host by host."""
        with self.start(program, ranks_per_host, env=env, args=args) as job:
            return job.wait(timeout)

    def start(
        self,
        program: str | Path,
        ranks_per_host: int | Sequence[int],
        *,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        flags: Sequence[str] = (),
    ) -> RunningJob:
        """Start the same and return at once. flags: of the launcher."""
        folder = Path(tempfile.mkdtemp(prefix="hvlike-job-"))
        if isinstance(program, str):
            path = folder / "program.py"
            path.write_text(program)
        else:
            path = program
        launch = self.launch([sys.executable, str(path), *args], ranks_per_host, folder, flags)
        return RunningJob(launch, self.environment(env or {}), folder)

    def launch(
        self,
        command: Sequence[str],
        ranks_per_host: int | Sequence[int],
        folder: Path,
        flags: Sequence[str] = (),
        above: Sequence[str] = (),
    ) -> list[str]:
        """The command line that runs `command` on so many ranks of each host; folder: for the file of hosts; above:
        what starts the launcher.
        """
        ranks = [ranks_per_host] * len(self.names) if isinstance(ranks_per_host, int) else list(ranks_per_host)
        launch = self._open_mpi(ranks, folder) if IS_OPEN_MPI else self._mpich(ranks)
        return [str(self._enter), self.names[0], shlex.join([*above, launch[0], *flags, *launch[1:], *command])]

    def daemons(self, host: int) -> list[int]:
        """The processes of launchers on a host that is not the first."""
        found = []
        for pid in _pids(self.names[host]):
            # It may end meanwhile.
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() in DAEMONS:
                    found.append(pid)
        return found

    def cut(self, host: int) -> None:
        """Take the link of a host down: nobody is told, connections stay open."""
        _call(f"ip -n {self.names[host]} link set eth0 down")

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """The environment of a job on these hosts."""
        return job_environment({"OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_btl_tcp_if_include": NETWORK, **extra})

    def _open_mpi(self, ranks: Sequence[int], folder: Path) -> list[str]:
        hostfile = folder / "hosts"
        lines = [f"{address} slots={slots}" for address, slots in zip(self.addresses, ranks, strict=True) if slots]
        hostfile.write_text("\n".join(lines) + "\n")
        agent = ["--prtemca", "plm_ssh_agent", str(self._agent), "--prtemca", "prte_if_include", NETWORK]
        launch = [str(LAUNCHER), "--hostfile", str(hostfile), *agent, "--bind-to", "none", "--map-by", "slot"]
        return [*launch, "-n", str(sum(ranks))]

    def _mpich(self, ranks: Sequence[int]) -> list[str]:
        places = ",".join(f"{address}:{slots}" for address, slots in zip(self.addresses, ranks, strict=True) if slots)
        return [
            *(str(LAUNCHER), "-launcher", "ssh", "-launcher-exec", str(self._agent)),
            *("-iface", "eth0", "-hosts", places, "-n", str(sum(ranks))),
        ]


@contextlib.contextmanager
def hosts(
    count: int = 2, *, rate: str | None = None, delay: float = 0.0, congestion: str = CONGESTION
) -> Iterator[Hosts]:
    """Make `count` hosts and remove them at the end, with every process on them.

    rate: of the link of each host, as tc says it. delay: seconds that a packet takes from one host to another.
    congestion: how TCP avoids congestion, as ip-route says it.
    Skips the test, with the reason, where the machine does not allow it.
    """
    reason = _missing()
    if reason:
        pytest.skip(reason)
    token = uuid.uuid4().hex[:6]
    switch = f"hvlike-{token}-switch"
    names = [f"hvlike-{token}-{index}" for index in range(count)]
    addresses = [f"10.77.0.{index + 1}" for index in range(count)]
    folder = Path(tempfile.mkdtemp(prefix="hvlike-hosts-"))
    network: subprocess.Popen[bytes] | None = None
    try:
        try:
            network = _build(switch, names, addresses, rate, delay, congestion)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine does not allow {shlex.join(error.cmd)}: {error.stderr.strip()}")
        except OSError as error:
            pytest.skip(f"this machine has no TUN devices: {error}")
        yield Hosts(names, addresses, folder)
    finally:
        if network is not None:
            network.kill()
            network.wait()
        for name in (*names, switch):
            _remove(name)
        shutil.rmtree(folder)


def _missing() -> str | None:
    """Why hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "several hosts on one machine need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"several hosts on one machine need {', '.join(missing)} (iproute2, util-linux)"
    return None


def _build(
    switch: str, names: Sequence[str], addresses: Sequence[str], rate: str | None, delay: float, congestion: str
) -> subprocess.Popen[bytes] | None:
    """Make the namespaces and the network between them; returns the process that delays packets, if any does."""
    for name in names:
        _call(f"ip netns add {name}")
    network = None
    if delay:
        network = delayed_network.start(names, addresses, delay)
    else:
        _call(f"ip netns add {switch}")
        _call(f"ip -n {switch} link add br0 type bridge")
        _call(f"ip -n {switch} link set br0 up")
        for index, name in enumerate(names):
            _call(f"ip -n {switch} link add p{index} type veth peer name eth0 netns {name}")
            _call(f"ip -n {switch} link set p{index} master br0 up")
    for name, address in zip(names, addresses, strict=True):
        _call(f"ip -n {name} address add {address}/24 dev eth0")
        _call(f"ip -n {name} link set eth0 up")
        _call(f"ip -n {name} link set lo up")
        _call(f"ip -n {name} route replace {NETWORK} dev eth0 src {address} congctl {congestion}")
        if rate:
            _call(f"ip netns exec {name} tc qdisc add dev eth0 root tbf rate {rate} burst 128kb latency 50ms")
    return network


def _remove(name: str) -> None:
    """Kill what still runs in a namespace and remove it; a namespace that was never made is no error."""
    for pid in _pids(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _pids(name: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def _call(command: str) -> None:
    subprocess.run(shlex.split(command), check=True, capture_output=True, text=True)


def _script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def seconds_of(text: str) -> float:
    """A delay as tc writes it, a number and ms or us, in seconds."""
    units = {"ms": 1e-3, "us": 1e-6}
    if text[-2:] not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is no delay: expected such as 1ms or 200us")
    return float(text[:-2]) * units[text[-2:]]


def main(arguments: Sequence[str]) -> int:
    """Run a command on hosts of this machine, as scripts/hosts says; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/hosts",
        usage="%(prog)s HOSTS RANKS [--rate RATE] [--delay DELAY] [--congestion NAME] -- COMMAND",
        description="Run a command on several hosts of this machine.",
    )
    parser.add_argument("hosts", type=int, help="how many hosts")
    parser.add_argument("ranks", type=int, help="ranks on each host")
    parser.add_argument("--rate", help="of each host's link, as tc says it: 1gbit")
    parser.add_argument("--delay", type=seconds_of, default=0.0, help="each way: 1ms, 200us")
    congestion = "TCP's congestion control: bbr, reno; default %(default)s"
    parser.add_argument("--congestion", default=CONGESTION, help=congestion)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    command, options = arguments[cut + 1 :], parser.parse_args(arguments[:cut])
    if not command or min(options.hosts, options.ranks) < 1:
        parser.error("expected a number of hosts, a number of ranks on each, and a command after --")
    try:
        with (
            hosts(options.hosts, rate=options.rate, delay=options.delay, congestion=options.congestion) as made,
            tempfile.TemporaryDirectory(prefix="hvlike-job-") as folder,
        ):
            launch = made.launch(command, options.ranks, Path(folder))
            # A program of the user's imports all of torch, and not what the jobs of tests leave for later.
            own = {
                name: os.environ.get(name, default) for name, default in (("PYTHONPATH", ""), ("OMP_NUM_THREADS", "1"))
            }
            environment = made.environment({**own, "TMPDIR": folder})
            return subprocess.run(launch, env=environment, check=False).returncode
    except pytest.skip.Exception as reason:
        print(f"scripts/hosts: {reason}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    # Also a termination removes the hosts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
