"""Every launcher's variables, and every trap in them, as tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distwrap.environments import (
    DETECTORS,
    NODE_DETECTORS,
    Node,
    Placement,
    detect,
    detectors_of_packages,
    distwrap_environment,
    explain,
    print_notice_once,
)
from distwrap.environments.ranks import forgotten_srun
from distwrap.errors import PlacementError

Env = dict[str, str]

TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
# As Slurm 22.05 sets them for `srun -N2 -n3`, in the second task of the first node.
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
# The shell of `sbatch -N2 -n4`: a rank, a size and a node, but nobody has started tasks.
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "3,1",
}


def four(prefix: str, rank: int, size: int, local_rank: int, local_size: int) -> Env:
    """The four variables of an MPI family whose names differ in the prefix alone."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return {prefix + name: str(n) for name, n in zip(names, (rank, size, local_rank, local_size), strict=True)}


OPEN_MPI = four("OMPI_COMM_WORLD_", 1, 2, 1, 2)
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "6"}

RANKS: dict[str, tuple[Env, Placement]] = {
    "torchrun": (
        {**TORCH, "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
        Placement(3, 4, 1, 2, 1, 2, "head", 29500, "torchrun"),
    ),
    "composer, azureml": (
        {**TORCH, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"},
        Placement(3, 4, 1, 2, 1, 2, "head", 29500, "torchrun"),
    ),
    "bagua, one version": ({**TORCH, "LOCAL_SIZE": "2"}, Placement(3, 4, 1, 2, 1, 2, "head", 29500, "torchrun")),
    "bagua, another": ({**TORCH, "LOCAL_WORLD_SIZE": "2"}, Placement(3, 4, 1, 2, 1, 2, "head", 29500, "torchrun")),
    "slurm": (STEP, Placement(1, 3, 1, 2, 0, 2, "n1", None, "slurm", "slurm 7.0")),
    "slurm, the user's meeting place": (
        {**STEP, "MASTER_ADDR": "login", "MASTER_PORT": "1234"},
        Placement(1, 3, 1, 2, 0, 2, "login", 1234, "slurm", "slurm 7.0"),
    ),
    "slurm, one node": (
        {**STEP, "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_STEP_NODELIST": "n9"},
        Placement(1, 3, 1, 3, 0, 1, "127.0.0.1", None, "slurm", "slurm 7.0"),
    ),
    "open_mpi, one machine": (
        {**OPEN_MPI, "PMIX_NAMESPACE": "343867393", "PMIX_RANK": "1"},
        Placement(1, 2, 1, 2, 0, 1, "127.0.0.1", None, "open_mpi", "open_mpi 343867393"),
    ),
    "open_mpi, two machines": (
        {**four("OMPI_COMM_WORLD_", 3, 4, 1, 2), "MASTER_ADDR": "head", "MASTER_PORT": "1234"},
        Placement(3, 4, 1, 2, 1, 2, "head", 1234, "open_mpi"),
    ),
    "open_mpi in a Slurm job": (
        {**BATCH, **four("OMPI_COMM_WORLD_", 3, 4, 1, 2), "PMIX_NAMESPACE": "9"},
        Placement(3, 4, 1, 2, 1, 2, "n1", None, "open_mpi", "open_mpi 9"),
    ),
    "open_mpi through Slurm's daemons": (  # its orted is a step of one task a node, which all its ranks inherit
        {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", **OPEN_MPI},
        Placement(1, 2, 1, 2, 0, 1, "127.0.0.1", None, "open_mpi"),
    ),
    "azureml, MPI, several": (
        {**four("OMPI_COMM_WORLD_", 3, 4, 1, 2), "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
        Placement(3, 4, 1, 2, 1, 2, "10.0.0.4", 29500, "open_mpi"),
    ),
    "azureml, MPI, one": (
        {**OPEN_MPI, "AZ_BATCHAI_MPI_MASTER_NODE": "localhost"},
        Placement(1, 2, 1, 2, 0, 1, "127.0.0.1", None, "open_mpi"),
    ),
    "mpich, intel": (HYDRA, Placement(1, 2, 1, 2, 0, 1, "127.0.0.1", None, "mpich")),
    "pals": (
        {**four("PALS_", 0, 0, 0, 2), "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PMI_SIZE": "4"}
        | {"PALS_NODEID": "1", "PALS_APID": "ab", "MASTER_ADDR": "head"},
        Placement(3, 4, 1, 2, 1, 2, "head", None, "pals", "pals ab"),
    ),
    "pals through PMI": (four("PMI_", 1, 2, 1, 2), Placement(1, 2, 1, 2, 0, 1, "127.0.0.1", None, "pals_pmi")),
    "mvapich2": (four("MV2_COMM_WORLD_", 0, 2, 0, 2), Placement(0, 2, 0, 2, 0, 1, "127.0.0.1", None, "mvapich2")),
    "jsrun": (
        {**four("JSM_NAMESPACE_", 3, 4, 1, 2), "LSB_JOBID": "5", "LSB_MCPU_HOSTS": "batch 1 h1 42 h2 42"},
        Placement(3, 4, 1, 2, 1, 2, "h1", None, "jsrun", "jsrun 5"),
    ),
    "horovod, one machine": (
        {**four("HOROVOD_", 1, 2, 1, 2), "HOROVOD_CROSS_RANK": "0", "HOROVOD_GLOO_RENDEZVOUS_PORT": "41000"},
        Placement(1, 2, 1, 2, 0, 1, "127.0.0.1", None, "horovod", "horovod 41000"),
    ),
    "horovod over MPI": (
        {**four("HOROVOD_", 1, 2, 1, 2), **OPEN_MPI},
        Placement(1, 2, 1, 2, 0, 1, "127.0.0.1", None, "horovod"),
    ),
    "sagemaker under MPI": (
        {**OPEN_MPI, "SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "SM_TRAINING_ENV": "{}"},
        Placement(1, 2, 1, 2, 0, 1, "127.0.0.1", None, "open_mpi"),
    ),
    "srun with WORLD_SIZE exported": (
        {**STEP, "WORLD_SIZE": "3", "MASTER_ADDR": "n1", "MASTER_PORT": "1234"},
        Placement(1, 3, 1, 2, 0, 2, "n1", 1234, "slurm", "slurm 7.0"),
    ),
    "torchrun in a Slurm job": (
        {**BATCH, **TORCH, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
        Placement(3, 4, 1, 2, 1, 2, "head", 29500, "torchrun"),
    ),
    "torchrun in a step of a task a node": (
        {**STEP, **TORCH, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
        Placement(3, 4, 1, 2, 1, 2, "head", 29500, "torchrun"),
    ),
    "a launcher by hand in a step": (  # it has made more ranks than there are tasks
        {**STEP, **TORCH, "LOCAL_WORLD_SIZE": "2"},
        Placement(3, 4, 1, 2, 1, 2, "head", 29500, "torchrun"),
    ),
    "torchrun in a Kubeflow pod": (
        {**TORCH, "LOCAL_WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NODE_RANK": "1", "TORCHELASTIC_RUN_ID": "x"},
        Placement(3, 4, 1, 2, 1, 2, "head", 29500, "torchrun"),
    ),
}

MACHINE: dict[str, tuple[Env, Node]] = {
    "kubeflow v1": (
        {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
        | {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1"},
        Node(2, 1, 2, "job-master-0:23456", "kubeflow"),
    ),
    "kubeflow v1, elastic": (
        {"PET_NNODES": "1:4", "PET_NPROC_PER_NODE": "auto", "PET_MAX_RESTARTS": "3", "PET_RDZV_ENDPOINT": "j-0:1"},
        Node("1:4", None, None, "j-0:1", "kubeflow", 3),
    ),
    "kubeflow v2": (
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "0"}
        | {"PET_MASTER_ADDR": "t-node-0-0.t", "PET_MASTER_PORT": "29400"},
        Node(2, 0, None, "t-node-0-0.t:29400", "kubeflow"),
    ),
    "kubeflow, one pod": ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}, Node(1, 0, 4, None, "kubeflow")),
    "pai dlc": (
        {"RANK": "1", "WORLD_SIZE": "2", "NPROC_PER_NODE": "8", "MASTER_ADDR": "m", "MASTER_PORT": "23456"},
        Node(2, 1, 8, "m:23456", "pai_dlc"),
    ),
    "by hand, a command a machine": (
        {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "3", "NODE_RANK": "2", "LOCAL_RANK": "0"},
        Node(3, 2, None, "10.0.0.1:29500", "node_rank"),
    ),
    "sagemaker": (
        {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"},
        Node(2, 1, 8, "algo-1:29500", "sagemaker"),
    ),
}

ALONE: dict[str, Env] = {
    "nothing": {},
    "an address in the shell's profile": {"MASTER_ADDR": "head", "MASTER_PORT": "29500"},
    "a shell of sbatch": BATCH,
    "a shell of salloc": {name: BATCH[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NODELIST")},
    "a shell of salloc in an interactive step": {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFA)},
    "a batch step by its name": {**BATCH, "SLURM_STEP_ID": "batch"},
    "a job named bash": {**BATCH, "SLURM_JOB_NAME": "bash"},
    "srun -n1 in a job of four tasks": {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
    "srun --pty bash": {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
    "a shell of PBS": {"PBS_JOBID": "1.head", "PBS_NODENUM": "0", "PBS_NUM_PPN": "4"},
    "PMI without a launcher of ours": {"PMI_RANK": "0", "PMI_SIZE": "1"},
}

REFUSED: dict[str, tuple[Env, str]] = {
    "RANK and WORLD_SIZE may be machines": (
        {name: TORCH[name] for name in TORCH if name != "LOCAL_RANK"},
        r"has RANK=3, WORLD_SIZE=4, .*but not LOCAL_RANK\. If RANK and WORLD_SIZE count nodes.*NPROC_PER_NODE",
    ),
    "azureml without its local size": (
        {**TORCH, "RANK": "1", "NODE_RANK": "0"},
        r"RANK=1, LOCAL_RANK=1, NODE_RANK=0 .*set LOCAL_WORLD_SIZE",
    ),
    "NODE_RANK with RANK": ({"NODE_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}, r"has RANK=1, WORLD_SIZE=2, but not"),
    "a rank exported in a job script": (
        {**STEP, **TORCH, "RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"},
        r"contradict each other: RANK=0, but SLURM_PROCID=1\. Unset RANK where slurm starts",
    ),
    "one process in the profile, three by srun": (
        {**STEP, **TORCH, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        r"RANK=0, but SLURM_PROCID=1",
    ),
    "half of torch's against srun's": ({**STEP, "WORLD_SIZE": "8"}, r"WORLD_SIZE=8, but SLURM_NTASKS=3"),
    "half of torch's against mpirun's": ({**OPEN_MPI, "WORLD_SIZE": "4"}, r"WORLD_SIZE=4, but OMPI_COMM_WORLD_SIZE=2"),
    "half of Open MPI's": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        r"half set for open_mpi: it has OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=2, but not "
        r"OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "a step without its rank": (
        {name: STEP[name] for name in STEP if name != "SLURM_PROCID"},
        r"half set for slurm: it has SLURM_STEP_NUM_TASKS=3, .*but not SLURM_PROCID",
    ),
    "a step whose nodes have other tasks": (
        {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
        r"SLURM_STEP_TASKS_PER_NODE=2\(x2\), SLURM_STEP_NUM_TASKS=3.*contradict.*4 in all, not 3",
    ),
    "a step on a node too many": ({**STEP, "SLURM_NODEID": "2"}, r"SLURM_NODEID=2, but the step has tasks on 2"),
    "PMIx alone": ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}, r"PMIX_RANK=0 says which rank .*no variable.*how many"),
    "no master anywhere": (
        four("OMPI_COMM_WORLD_", 3, 4, 1, 2),
        r"open_mpi started ranks on 2 nodes.*MASTER_ADDR.*mpirun -x MASTER_ADDR=host",
    ),
    "no master under horovodrun": (
        {**four("HOROVOD_", 3, 4, 1, 2), "HOROVOD_GLOO_RENDEZVOUS_ADDR": "driver"},
        r"horovod started ranks on 2 nodes",
    ),
    "a local size of none": ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "0"}, r"OMPI_COMM_WORLD_LOCAL_SIZE=0"),
    "a rank that is no number": ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "one"}, r"OMPI_COMM_WORLD_RANK='one' is not"),
    "kubeflow's product": (
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "6", "RANK": "0", "MASTER_ADDR": "m"},
        r"WORLD_SIZE=6, PET_NNODES=2, PET_NPROC_PER_NODE=4 contradict each other: 2 x 4 is 8",
    ),
    "kubeflow without a number": ({"PET_NNODES": "2", "MASTER_ADDR": "m"}, r"neither PET_NODE_RANK nor RANK"),
    "dlc without a size": ({"NPROC_PER_NODE": "8", "RANK": "0"}, r"half set for pai_dlc.*not WORLD_SIZE"),
    "a host that sagemaker does not know": (
        {"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"},
        r'SM_CURRENT_HOST=b, SM_HOSTS=\["a"\]',
    ),
    "sagemaker's list": ({"SM_HOSTS": "a,b", "SM_CURRENT_HOST": "b"}, r"SM_HOSTS='a,b' is not a JSON list"),
}


@pytest.mark.parametrize("name", RANKS)
def test_a_rank(name: str) -> None:
    """A launcher's variables are a placement, each value from that launcher alone."""
    env, expected = RANKS[name]
    assert detect(env) == expected


@pytest.mark.parametrize("name", MACHINE)
def test_a_machine(name: str) -> None:
    """Variables that name a machine are never taken for a rank's."""
    env, expected = MACHINE[name]
    assert detect(env) == expected


@pytest.mark.parametrize("name", ALONE)
def test_nobody_has_started_ranks(name: str) -> None:
    """Variables of a batch system around us do not make this process a rank."""
    assert detect(ALONE[name]) == Placement()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """Half-set and contradictory variables are refused, with the variables quoted."""
    env, message = REFUSED[name]
    with pytest.raises(PlacementError, match=f"(?s){message}"):
        detect(env)


def test_open_mpis_node_rank_is_no_machine() -> None:
    """OMPI_COMM_WORLD_NODE_RANK counts the ranks of this machine, and is not read."""
    env = {**four("OMPI_COMM_WORLD_", 3, 4, 1, 2), "MASTER_ADDR": "head"}
    assert detect({**env, "OMPI_COMM_WORLD_NODE_RANK": "1"}) == detect({**env, "OMPI_COMM_WORLD_NODE_RANK": "0"})


@pytest.mark.parametrize(
    ("tasks", "node", "size"), [("2,1", 0, 2), ("2,1", 1, 1), ("1(x3)", 2, 1), ("4(x2),3", 2, 3), ("4(x2),3", 1, 4)]
)
def test_uneven_steps(tasks: str, node: int, size: int) -> None:
    """The number of tasks on this node is read off the step's list, not divided."""
    total = {"2,1": 3, "1(x3)": 3, "4(x2),3": 11}[tasks]
    env = {**STEP, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_STEP_NUM_TASKS": str(total), "SLURM_NTASKS": str(total)}
    place = detect({**env, "SLURM_LOCALID": "0", "SLURM_NODEID": str(node), "SLURM_STEP_NODELIST": "n[1-3]"})
    assert isinstance(place, Placement)
    assert (place.local_world_size, place.nnodes) == (size, len({"2,1": "ab", "1(x3)": "abc", "4(x2),3": "abc"}[tasks]))


def test_ranks_of_ours_are_ours_inside_of_any_launcher() -> None:
    """What a launch of ours tells its ranks wins over every variable that they have inherited."""
    place = distwrap_environment.on_one_node(1, 2)
    inherited = {**STEP, **OPEN_MPI, **HYDRA, **TORCH, "TORCHELASTIC_RUN_ID": "x", "PET_NNODES": "2"}
    assert detect({**inherited, **distwrap_environment.variables(place, "fork", "/proc/1/fd/3")}) == place


def test_two_steps_of_a_job_meet_apart() -> None:
    """What the port follows from tells the steps of one job from each other."""
    first, second = (detect({**STEP, "SLURM_STEP_ID": step}) for step in "01")
    assert isinstance(first, Placement)
    assert isinstance(second, Placement)
    assert first.job != second.job


def test_the_machines_of_pbs_are_read(tmp_path: Path) -> None:
    """Under mpirun in a PBS job, rank 0 is on the first machine of PBS_NODEFILE."""
    nodes = tmp_path / "nodes"
    nodes.write_text("c3\nc3\nc4\nc4\n")
    place = detect({**four("OMPI_COMM_WORLD_", 3, 4, 1, 2), "PBS_NODEFILE": str(nodes), "PBS_JOBID": "1.head"})
    assert isinstance(place, Placement)
    assert place.master_addr == "c3"


def test_jsruns_machines_leave_out_the_launch_node(tmp_path: Path) -> None:
    """The first line of LSF's file is where the job script runs."""
    ranks = tmp_path / "ranks"
    ranks.write_text("batch\nh7\nh7\nh8\n")
    place = detect({**four("JSM_NAMESPACE_", 3, 4, 1, 2), "LSB_DJOB_RANKFILE": str(ranks)})
    assert isinstance(place, Placement)
    assert place.master_addr == "h7"


def test_each_detector_says_why_it_is_not_its_launcher() -> None:
    """Every built-in detector gives a reason in an empty environment, and one says yes in its own."""
    said = explain({})
    assert set(said) >= {*DETECTORS, *NODE_DETECTORS}
    assert all(reason and not reason.startswith(("yes", "refused")) for reason in said.values())
    assert explain(BATCH)["slurm"] == "job 7, but no step: a shell of sbatch or salloc (srun starts tasks)"
    assert explain(STEP)["slurm"] == "yes: rank 1 of 3, node 0 of 2"
    assert explain({"OMPI_COMM_WORLD_RANK": "0"})["open_mpi"].startswith("refused: the environment is half set")


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module of an installed package, in which an entry point names a detector."""
    info = tmp_path / "acme-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[distwrap.detectors]\nacme = acme_cluster:detect\n")
    monkeypatch.syspath_prepend(tmp_path)
    detectors_of_packages.cache_clear()
    yield tmp_path / "acme_cluster.py"
    sys.modules.pop("acme_cluster", None)
    detectors_of_packages.cache_clear()


def test_another_packages_detector(acme: Path) -> None:
    """An entry point of the group distwrap.detectors is asked where no built-in one knows."""
    acme.write_text(
        "from distwrap import Placement\n"
        "def detect(env):\n"
        "    if 'ACME_RANK' not in env: return 'no ACME_RANK'\n"
        "    return Placement(int(env['ACME_RANK']), 2, int(env['ACME_RANK']), 2, source='acme')\n"
    )
    assert detect({"ACME_RANK": "1"}).source == "acme"
    assert explain({})["acme"] == "no ACME_RANK"
    assert detect({**STEP, "ACME_RANK": "1"}).source == "slurm"
    assert detect({}) == Placement()


def test_a_detectors_placement_has_its_name(acme: Path) -> None:
    """A placement without a source is not taken for a single process."""
    acme.write_text("from distwrap import Placement\ndef detect(env): return Placement(1, 2, 1, 2)\n")
    assert detect({}) == Placement(1, 2, 1, 2, source="acme")


def test_a_detector_that_answers_nothing(acme: Path) -> None:
    """None is no answer, so that the next detector is asked; anything else is an error that names the detector."""
    acme.write_text("def detect(env): return eval(env['ACME'])\n")
    assert isinstance(detect({"ACME": "None", "PET_NNODES": "1"}), Node)
    with pytest.raises(PlacementError, match=r"acme_cluster:detect.* returned \(0, 1\)"):
        detect({"ACME": "(0, 1)"})
    assert explain({"ACME": "(0, 1)"})["acme"].startswith("refused: the detector 'acme'")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def detect(env): return env['ACME']\n", "KeyError: 'ACME'"),
        ("raise KeyError('ACME')\n", "KeyError: 'ACME'"),
        ("def detect(env): raise SystemExit('no ACME')\n", "SystemExit: no ACME"),
        ("import sys; sys.exit('no ACME')\n", "SystemExit: no ACME"),
    ],
)
def test_a_broken_detector_is_passed_over(
    source: str, why: str, acme: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A detector that fails, or cannot be imported, is named once on standard error, and by the doctor each time."""
    acme.write_text(source)
    print_notice_once.cache_clear()
    assert detect({}) == detect({}) == Placement()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(
        "distwrap: the detector 'acme' of an installed package (acme_cluster:detect) failed and is ignored"
    )
    assert why in explain({})["acme"]


def test_srun_was_forgotten() -> None:
    """In the shell of a job that asked for several tasks, and nowhere else."""
    shells = [name for name, env in ALONE.items() if forgotten_srun(env)]
    assert shells == [
        name for name, env in ALONE.items() if env.get("SLURM_JOB_ID") and "STEP_NUM_TASKS" not in str(env)
    ]
    assert len(shells) == 5
