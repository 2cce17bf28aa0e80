"""What the doctor says of ranks and NUMA domains, word for word, on machines that are invented as /sys shows them."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from support.doctor.healthy import case, job, rank

from hvlike.doctor import command
from hvlike.doctor.job import Case, JobProgress
from hvlike.doctor.machine import Processor
from hvlike.transport.host.launchers import detect_launcher
from hvlike.transport.host.numa import Domain, Place, parse_maps, parse_numbers, place_of_process, read_domains

GIB = 1 << 30
MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "8"}
SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}
PALS = {"PALS_RANKID": "0", "PMI_RANK": "0", "PMI_SIZE": "8"}
JSRUN = {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "8"}
FLUX = {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "8"}
PMIX = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "job"}


class Machine:
    """A machine as the kernel shows it. cpus: a list of each domain, empty for one without cores."""

    def __init__(
        self, root: Path, cpus: dict[int, str], *, threads_per_core: int = 1, bare: Iterable[int] = ()
    ) -> None:
        self._root = root
        count = sum(len(parse_numbers(text)) for text in cpus.values())
        for number, text in cpus.items():
            size = 0 if number in bare else 64 << 20
            self._write(f"node/node{number}/cpulist", f"{text}\n")
            self._write(f"node/node{number}/meminfo", f"Node {number} MemTotal:       {size} kB\n")
        cores = count // threads_per_core
        for cpu in range(count):
            siblings = ",".join(str(each) for each in range(cpu % cores, count, cores))
            self._write(f"cpu/cpu{cpu}/topology/thread_siblings_list", f"{siblings}\n")
        self.all = frozenset(range(count))
        self.domains = read_domains(root)

    def _write(self, path: str, text: str) -> None:
        (self._root / path).parent.mkdir(parents=True, exist_ok=True)
        (self._root / path).write_text(text)

    def job(self, places: Iterable[Place], launcher: dict[str, str]) -> Case:
        """One of so many ranks on this machine, which ended well."""
        at = tuple(places)
        seen = [Processor(place.cpus, self.all, 1, self.domains) for place in at]
        started = detect_launcher(launcher)
        assert started is not None
        ranks = [rank(processor=each, launcher=started._replace(size=len(at))) for each in seen]
        node = tuple(range(len(at)))
        ended = job(*ranks, nodes=(node,))
        progress = JobProgress(ended.report, ended.gathered, ended.running, ended.timings, at)
        return case(*ranks, nodes=(node,), job=progress)


def lies(cpus: str, *memory: int, shared: tuple[int, ...] = ()) -> Place:
    """A rank on these cores with as much memory on each of these domains."""
    return Place(parse_numbers(cpus), dict.fromkeys(memory, GIB), dict.fromkeys(shared or memory, GIB))


def said(given: Case) -> list[str]:
    """The lines of the check, without their margin."""
    lines = command.as_text(given, command.run_checks(given)).splitlines()
    start = next(index for index, line in enumerate(lines) if line[6:].startswith("places "))
    end = next(index for index in range(start + 1, len(lines)) if lines[index][:6].strip() or not lines[index])
    return [f"{lines[start][:4].strip()} {lines[start][20:]}", *(line[20:] for line in lines[start + 1 : end])]


@pytest.fixture(scope="module")
def epyc(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Two sockets of four domains, 16 cores each with two hardware threads."""
    cpus = {number: f"{16 * number}-{16 * number + 15},{16 * number + 128}-{16 * number + 143}" for number in range(8)}
    return Machine(tmp_path_factory.mktemp("epyc"), cpus, threads_per_core=2)


@pytest.fixture(scope="module")
def gh200(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Four modules of 72 cores; the memory of their GPUs is four domains more, and 28 are kept for parts of GPUs."""
    cores = {number: f"{72 * number}-{72 * number + 71}" for number in range(4)}
    gpus = {4 + 8 * number: "" for number in range(4)}
    cpus = {**dict.fromkeys(range(36), ""), **cores}
    return Machine(tmp_path_factory.mktemp("gh200"), cpus, bare=set(range(36)) - {0, 1, 2, 3, *gpus})


def socket(number: int) -> str:
    return f"{16 * number}-{16 * number + 15},{16 * number + 128}-{16 * number + 143}"


def module(number: int) -> str:
    return f"{72 * number}-{72 * number + 71}"


def test_two_sockets_of_four_domains_with_a_rank_on_each(epyc: Machine) -> None:
    assert said(epyc.job((lies(socket(each), each) for each in range(8)), MPIRUN)) == [
        "ok alpha: ranks 0-7 on NUMA domains 0-7",
        *(f"alpha: rank {each}: cores of domain {each}, own memory on domain {each}" for each in range(8)),
        "alpha: memory that the ranks share on domains 0-7",
    ]


def test_two_sockets_of_four_domains_with_unbound_ranks(epyc: Machine) -> None:
    assert said(epyc.job((lies("0-255", 0, 5) for _ in range(8)), MPIRUN)) == [
        "warn alpha: ranks 0-7 on NUMA domains 0-7",
        "alpha: ranks 0-7: cores of domains 0-7, own memory on domains 0,5",
        "alpha: memory that the ranks share on domains 0,5",
        "alpha: ranks 0-7: may move between domains, away from the memory in use",
        "-> Give each rank a domain of its own: `mpirun --map-by numa --bind-to numa`.",
    ]


def test_two_sockets_of_four_domains_with_a_core_for_each_rank(epyc: Machine) -> None:
    assert said(epyc.job((lies(f"{core},{core + 128}", 0) for core in range(4)), SRUN)) == [
        "warn alpha: ranks 0-3 on NUMA domains 0-7",
        "alpha: ranks 0-3: cores of domain 0, own memory on domain 0",
        "alpha: memory that the ranks share on domain 0",
        "alpha: ranks 0-3: share a domain with others, and nobody runs on domains 1-7",
        "-> Give each rank a domain of its own: `srun --cpus-per-task=32 --distribution=block:block",
        "  --cpu-bind=ldoms`.",
    ]


def test_gh200_with_a_rank_on_each_module(gh200: Machine) -> None:
    assert said(gh200.job((lies(module(each), each) for each in range(4)), SRUN)) == [
        "ok alpha: ranks 0-3 on NUMA domains 0-3",
        *(f"alpha: rank {each}: cores of domain {each}, own memory on domain {each}" for each in range(4)),
        "alpha: memory that the ranks share on domains 0-3",
    ]


def test_gh200_with_memory_on_another_module_and_on_a_gpu(gh200: Machine) -> None:
    places = (lies(module(0), 0), lies(module(1), 0), lies(module(2), 2), lies(module(3), 28))
    assert said(gh200.job(places, SRUN)) == [
        "warn alpha: ranks 0-3 on NUMA domains 0-3",
        "alpha: rank 0: cores of domain 0, own memory on domain 0",
        "alpha: rank 1: cores of domain 1, own memory on domain 0",
        "alpha: rank 2: cores of domain 2, own memory on domain 2",
        "alpha: rank 3: cores of domain 3, own memory on domain 28",
        "alpha: memory that the ranks share on domains 0,2,28",
        "alpha: ranks 1,3: most of the own memory lies on domains where the rank does not run",
        "-> Give each rank a domain of its own: `srun --cpus-per-task=72 --distribution=block:block",
        "  --cpu-bind=ldoms`.",
    ]


def test_memory_that_the_ranks_share_on_one_domain_alone(gh200: Machine) -> None:
    finding = command.run_checks(gh200.job((lies(module(each), each, shared=(0,)) for each in range(4)), SRUN))[
        "places"
    ]
    assert finding.found[-1] == "alpha: all memory that the ranks share lies on domain 0"
    assert "/dev/shm" in finding.advice[0]


def test_one_domain(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {0: "0-15"})
    places = [lies("0-7", 0), lies("8-15", 0)]
    expected = "skip no node has several NUMA domains for its ranks: all memory is equally near"
    assert said(machine.job(places, MPIRUN)) == [expected]
    machine.domains = ()
    assert said(machine.job(places, MPIRUN)) == [expected]


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        (MPIRUN, "`mpirun --map-by numa --bind-to numa`"),
        (HYDRA, "`mpiexec -bind-to numa -map-by numa` (Intel MPI: `-genv I_MPI_PIN_DOMAIN numa`)"),
        (SRUN, "`srun --cpus-per-task=16 --distribution=block:block --cpu-bind=ldoms`"),
        (PALS, "`mpiexec --cpu-bind numa`"),
        (JSRUN, "`jsrun --tasks_per_rs 1 --cpu_per_rs 8 --bind packed:8` with a resource set a rank"),
        (FLUX, "`flux run --cores-per-task=8 -o cpu-affinity=per-task`"),
        (PMIX, "`numactl --cpunodebind=N --localalloc` before the program"),
    ],
)
def test_the_flags_are_those_of_the_launcher_in_use(epyc: Machine, launcher: dict[str, str], flags: str) -> None:
    # Two ranks for each domain.
    given = epyc.job((lies("0-255", 0) for _ in range(16)), launcher)
    assert command.run_checks(given)["places"].advice == [f"Give each rank a domain of its own: {flags}."]


@pytest.mark.parametrize(
    "places",
    [
        [lies("0-255", 0, 1, 2, 3, 4, 5, 6, 7)],  # A rank that has the node to itself
        [lies("0-63,128-191", 0, 3), lies("64-127,192-255", 4)],  # A socket for each
        [lies(socket(each // 2), each // 2) for each in range(16)],  # Two for each domain, which leaves none idle
    ],
)
def test_ranks_that_have_their_share_are_left_in_peace(epyc: Machine, places: list[Place]) -> None:
    assert said(epyc.job(places, MPIRUN))[0].startswith("ok ")


def test_memory_has_to_lie_elsewhere_where_a_domain_has_none(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {0: "0-3", 1: "4-7"}, bare=(1,))
    assert said(machine.job([lies("0-3", 0), lies("4-7", 0)], MPIRUN))[0].startswith("ok ")


def test_domains_that_the_job_did_not_get_are_not_missed(epyc: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epyc, "all", parse_numbers("0-31"))
    assert said(epyc.job([lies("0-15", 0), lies("16-31", 1)], SRUN))[0] == "ok alpha: ranks 0-1 on NUMA domains 0-1"


def test_the_domains_are_read(gh200: Machine) -> None:
    assert [domain.number for domain in gh200.domains] == [0, 1, 2, 3, 4, 12, 20, 28]
    assert gh200.domains[1] == Domain(1, frozenset(range(72, 144)), 72, True)
    assert gh200.domains[4] == Domain(4, frozenset(), 0, True)
    assert read_domains(Path("/no/such/folder")) == ()


def test_where_memory_lies_is_read_from_the_maps_of_a_process(tmp_path: Path) -> None:
    assert parse_maps(
        "55aa default heap anon=3 dirty=3 N0=2 N1=1 kernelpagesize_kB=4\n"
        "7f00 default file=/usr/lib/libc.so.6 anon=2 mapped=90 N0=92 kernelpagesize_kB=4\n"
        "7f10 bind:1 anon=1 dirty=1 N1=1 kernelpagesize_kB=2048\n"
        "7f20 default file=/memfd:hvlike\\040(deleted) dirty=8 mapped=9 N0=5 N3=4 kernelpagesize_kB=64\n"
        "7f30 default file=/dev/shm/hvlike-x\\040(deleted) dirty=1 N3=1 kernelpagesize_kB=4\n"
        "7f40 default file=/memfd:hvlike\\040(deleted)\n"
        "7fff default stack anon=1 dirty=1 N0=1 kernelpagesize_kB=4\n"
    ) == ({0: 3 * 4096, 1: 4096 + (2 << 20)}, {0: 5 << 16, 3: (4 << 16) + 4096})
    assert place_of_process(tmp_path / "missing").private == {}
