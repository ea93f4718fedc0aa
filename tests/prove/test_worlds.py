"""`prove`: what a loop is given, how far it runs, what it resumes, real ranks, and comments that ignore a finding."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import distwrap as dw
from distwrap import shard_loader
from distwrap.cli import main
from distwrap.comm import PowerSGD
from distwrap.errors import ProofError
from distwrap.network.waiting import wait_until
from distwrap.prove import world
from distwrap.prove.proof import prove_program as proven
from distwrap.prove.world import Program
from distwrap.testing import prove
from tests.prove.planted import LOOPS
from tests.slow import slow

WHY = "a proof is four worlds"


class Pair(NamedTuple):
    """One batch."""

    x: Tensor
    y: Tensor


class Pairs(Dataset[Pair]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Pair:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
        return Pair(x, x.sum().reshape(1))


class Net(nn.Module):
    """A model that drops out in each way that torch has, and takes its inputs in each way that Python has."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 8, 2, dropout=0.3, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.layer = nn.Dropout(0.1)
        self.head = nn.Linear(8, 1)

    def forward(self, batch: dict[str, list[Pair]] | None = None, *, pair: Pair | None = None) -> Tensor:
        x, y = pair or (batch or {})["pairs"][0]
        hidden = self.rnn(x)[0]
        attended = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return F.mse_loss(self.head(self.layer(F.dropout(attended, 0.2, self.training)).mean(1)), y)


def train(*, shards: bool = True, by_name: bool = True, epochs: int = 1, lost: str = "", part: bool = False) -> float:
    torch.manual_seed(0)
    model = dw.wrap_model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Pairs(), batch_size=12, shuffle=True)
    loader = shard_loader(loader) if shards else loader
    kept = {"model": model, "optimizer": optimizer, "loader": loader}
    kept.pop(lost, None)
    state = dw.resume_from("last.pt", into=kept) if epochs > 1 else None
    for epoch in range(state["epoch"] if state else 0, epochs):
        for batch in loader:
            loss = model(pair=batch) if by_name else model({"pairs": [batch]})
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if epochs > 1:
            dw.save({**kept, "epoch": epoch + 1}, "last.pt")
        with torch.no_grad():
            evaluated = model.eval()(pair=batch).item()
            model.train()
        print(f"{evaluated if part else dw.mean(evaluated, len(batch.x))}")
    return 0.0


@pytest.mark.parametrize("by_name", [True, False])
def test_inputs_in_any_nesting_and_dropout_of_any_kind(by_name: bool) -> None:
    """Samples are known by name, and in dicts, lists and named tuples; dropout makes no right loop differ."""
    proof = prove(lambda: train(by_name=by_name), ranks=[2])
    assert proof.comparisons[0].compared["samples"] == 96
    off = next(note for note in proof.notes if note.startswith("switched off: "))
    assert (
        off.count("dropout at test_worlds.py:") == 3
    )  # the RNN, the attention; and the layer and the function of one line
    with pytest.raises(ProofError, match="DW201 samples-twice"):
        prove(lambda: train(by_name=by_name, shards=False), ranks=[2])


def test_whole_epochs() -> None:
    """The evaluation after an epoch is seen, of which 12 steps alone see nothing; the loop is stopped after it."""
    proof = prove(lambda: train(epochs=5), ranks=[2], steps=3, epochs=2)
    assert proof.comparisons[0].steps == 2 * 3
    assert proof.comparisons[0].compared["printed numbers"] == 2
    assert "no evaluation was seen" not in proof.notes
    assert "the end of the loop was not seen" in proof.notes
    prove(lambda: train(part=True), ranks=[2], steps=3)
    with pytest.raises(ProofError, match="DW204"):
        prove(lambda: train(part=True), ranks=[2], steps=3, epochs=1)


def test_resuming() -> None:
    """2 ranks stop after an epoch, and 3 go on: what they lose is named, and a loop that saves nothing is not equal."""
    proof = prove(lambda: train(epochs=5), ranks=[2, 3], steps=3, epochs=1, resume=True)
    assert "on 2 and then 3 ranks" in str(proof)
    assert proof.comparisons[0].steps == 3
    with pytest.raises(ProofError, match=r"step 4, .*\n.* on 2 and then 3 ranks: .*\n.*DW403 state-lost"):
        prove(lambda: train(epochs=5, lost="optimizer"), ranks=[2, 3], steps=3, epochs=1, resume=True)
    with pytest.raises(ProofError, match=r"not comparable: .*\n(.*\n)*.*did not go on from a step"):
        prove(train, ranks=[2, 3], steps=3, resume=True)


def test_ranks_that_are_processes() -> None:
    assert prove(train, ranks=[2], steps=3, real=True).comparisons[0].compared["samples"] == 36
    with pytest.raises(ProofError, match="DW201 samples-twice"):
        prove(lambda: train(shards=False), ranks=[2], real=True)


def proven_text(loop: str, old: str, new: str, folder: Path, *options: str) -> int:
    text = (LOOPS / loop).read_text()
    assert text.count(old) == 1
    path = folder / "script.py"
    path.write_text(text.replace(old, new))
    return main(["prove", *options, str(path)])


@pytest.mark.parametrize("loop", ["dw/plain.py", slow("ddp/mingpt_trainer.py", why=WHY)])
def test_a_script_of_real_ranks(loop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that torchrun would start, with distwrap and without, as a process for each rank."""
    text = (LOOPS / loop).read_text().replace("import torch\n", "import torch\nfrom distwrap import simulated\n", 1)
    path = tmp_path / "script.py"
    path.write_text(text.replace("loss.backward()", "assert simulated.running is None; loss.backward()"))
    options = ("--ranks", "2", "--steps", "3", str(path))
    assert main(["prove", "--real", *options]) == 0, capsys.readouterr().out
    assert main(["prove", *options]) == 2  # what the script asks is answered otherwise there


def test_a_comment_ignores_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is reported, and does not fail; another id on the line, or the same one on another, changes nothing."""
    wrong, junit = "            loss.backward()", tmp_path / "junit.xml"
    for id, code, verdict in (("DW101", 0, "ignored"), ("DW102", 1, "differs")):
        line = f"            (loss * torch.distributed.get_world_size()).backward()  # distwrap: ignore[{id}]"
        options = ("--ranks", "2,3", "--steps", "2", "--junit", str(junit))
        assert proven_text("dw/plain.py", wrong, line, tmp_path, *options) == code
        printed = capsys.readouterr().out
        assert printed.startswith(f"{verdict}: the first step in one process and on 2 and 3 ranks")
        assert "DW101 multiplied-by-ranks" in printed
        cases = ElementTree.parse(junit).findall("testcase")
        assert [each.get("name") for each in cases] == ["2 ranks", "3 ranks"]
        assert [len(each) for each in cases] == [code, code]
        assert all(failure.text.strip() == printed.strip() for each in cases for failure in each)


ORPHANS = """
import os, select, sys
from pathlib import Path
from distwrap.prove.proof import prove_program
from distwrap.prove.world import Program

def never_ends():
    Path(sys.argv[1]).write_text(str(os.getpid()))
    select.select([], [], [], 600)  # sleep() takes no time in a simulation

if __name__ == "__main__":
    prove_program(Program(function=never_ends, allow_writes=True), ranks=[2])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone ends a child with its parent")
@pytest.mark.slow("starts an interpreter, which imports torch")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_killed_proof_leaves_nothing(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a world nor a folder; the next proof removes that of one that could not do it itself."""
    script, told, temporary = tmp_path / "script.py", tmp_path / "pid", tmp_path / "temporary"
    temporary.mkdir()
    script.write_text(ORPHANS)
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, str(script), str(told)], env=environment)
    try:
        child = int(wait_until(lambda: told.exists() and told.read_text(), 120))
        assert len(list(temporary.iterdir())) == 1
    finally:
        process.send_signal(number)
        assert process.wait(60) == -number
    assert wait_until(lambda: not is_running(child), 60)
    if number == signal.SIGKILL:
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        prove(fine, ranks=[2])
    assert not list(temporary.iterdir())


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def plain(factor: float) -> None:
    torch.manual_seed(0)
    model = dw.wrap_model(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for pair in dw.shard_loader(DataLoader(Pairs(), batch_size=12)):
        loss = F.mse_loss(model(pair.x.flatten(1)), pair.y) * (factor or dw.world_size())
        dw.backward(loss)
        dw.optimizer_step(optimizer)
        optimizer.zero_grad()


STRATEGIES = {"zero1": {"strategy": "zero1"}, "fsdp": {"strategy": "fsdp"}, "powersgd": {"comm": PowerSGD(rank=1)}}


@pytest.mark.parametrize("name", ["zero1", slow("fsdp", why=WHY), slow("powersgd", why=WHY)])
def test_a_strategy(name: str) -> None:
    """A right loop is equal, also where state is divided, or gradients approximate; and a mistake is named."""
    function = dw.distributed(**STRATEGIES[name])(plain)
    proofs = [proven(Program(function=function, arguments=[each], steps=3), ranks=[2]) for each in (1.0, 0.0)]
    assert [each.verdict for each in proofs] == ["equal", "differs"], "\n".join(map(str, proofs))
    assert proofs[1].mistake == "multiplied-by-ranks", str(proofs[1])


def fine(
    options: str = "", comm: Any = None, returns: float = 0.0, counter: bool = False, prints: float = 0.0
) -> float:
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.Linear(3, 1))
    net.register_buffer("seen", torch.zeros(()))
    model = dw.wrap_model(net, comm=comm)
    decay = 1e-3 * (dw.world_size() if options == "decay" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, weight_decay=decay)
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
    for inputs, targets in shard_loader(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=12)):
        optimizer.zero_grad()
        F.mse_loss(model.eval()(inputs), targets).backward()
        optimizer.step()
        if counter:
            net.seen += inputs.mean()
    rounding = torch.finfo(torch.get_default_dtype()).eps * dw.world_size()
    print(f"{0.0550002 + prints - rounding:.2f} of {rounding:.2g}")
    return returns


class Sum(dw.comm.GradientAlgorithm):
    """An algorithm of the loop's own, which adds in the place of averaging."""

    def averager(self, link: Any, device: torch.device) -> Any:
        class Added(dw.comm.Averager):
            def average(self, bucket: Any) -> None:
                link.mean(bucket.values)
                bucket.values.mul_(dw.world_size())

        return Added()


def test_small_steps_and_numbers_that_are_none() -> None:
    """A right loop with a small rate and an infinite result is equal; an option that differs is not, nor a buffer."""
    assert prove(fine, keywords={"returns": float("inf")}, ranks=[2]).verdict == "equal"
    for wrong in ({"options": "decay"}, {"counter": True}, {"comm": Sum()}):
        with pytest.raises(ProofError, match="differs"):
            prove(fine, keywords=wrong, ranks=[2])


def with_two_models(wrong: str) -> Any:
    torch.manual_seed(0)
    nets, ranks = [nn.Linear(3, 1) for _ in range(2)], dw.world_size()
    for net in nets:
        net.register_buffer("seen", torch.zeros(()))
        net.register_buffer("count", torch.tensor([100_000, 0]))
        net.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    models = [dw.wrap_model(net) for net in nets]
    optimizer = torch.optim.SGD([each for net in nets for each in net.parameters()], lr=0.1)
    for (x,) in shard_loader(DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=12)):
        for model in models:
            (model(x).square().mean() + (model.phase * (1 + 2j)).real.sum()).backward()
        nets[0].phase.grad.imag.mul_(ranks if wrong == "an imaginary part" else 1)
        nets[0].seen += ranks if wrong == "a buffer of the first model" else 1
        nets[0].count[1] += len(x) if wrong == "a buffer of integers" else 1
        optimizer.step()
        optimizer.zero_grad()
    print(f"accuracy {ranks if wrong == 'a printed share' else 1.0:.3f} on {ranks} ranks")
    print(f"{100_000 + (ranks if wrong == 'a printed integer' else 1)} samples")
    return {"loss": torch.tensor([ranks if wrong == "an array" else 1]).numpy()}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("", ""),
        ("an imaginary part", "only phase"),
        ("a buffer of the first model", "only seen"),
        ("a buffer of integers", "only count"),
        ("a printed share", "what was printed"),
        ("a printed integer", "what was printed"),
        ("an array", "what the function returned"),
    ],
)
def test_numbers_of_any_kind_and_place(wrong: str, words: str) -> None:
    proof = proven(Program(function=with_two_models, arguments=[wrong]), ranks=[2])
    assert proof.verdict == ("differs" if wrong else "equal"), str(proof)
    assert words in str(proof), str(proof)


FOLDS = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

def fold(start):
    w, b = torch.full((3, 1), start).requires_grad_(), torch.full((1,), 2 * start).requires_grad_()
    optimizer = torch.optim.SGD([w, b], lr=0.1)
    for number, (x,) in enumerate(DataLoader(data, batch_size=12, sampler=DistributedSampler(data))):
        if number == 2:
            break
        (x @ w + b - 1).pow(2).mean().backward()
        for each in (w, b):
            dist.all_reduce(each.grad)
            each.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 3))
for number in range(1, 6):
    fold(0.1 * number)
    others = [torch.zeros(2) for _ in range(dist.get_rank() + 1)]
dist.destroy_process_group()
"""


def test_parameters_that_take_the_places_of_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FOLDS)
    proof = proven(Program(str(script)), ranks=(2,))
    assert proof.verdict == "equal", str(proof)


EVALUATION = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
x, v = torch.randn(96, 3), torch.randn(40, 3)
data, held_out = TensorDataset(x, x.sum(1, keepdim=True)), TensorDataset(v, torch.arange(40.0)[:, None])
model = DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
evaluation = DataLoader(held_out, batch_size=32)
for inputs, targets in DataLoader(data, batch_size=12, sampler=DistributedSampler(data)):
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model.module(inputs), targets).item() for inputs, targets in evaluation]
    print(f"validation {sum(losses) / len(losses):.4f}")
dist.barrier()
dist.destroy_process_group()
"""


def test_an_evaluation_by_rank_0_alone_has_the_batches_of_one_process(tmp_path: Path) -> None:
    """Its last batch is smaller; and a training loader that nobody has sharded is still named."""
    script = tmp_path / "script.py"
    script.write_text(EVALUATION)
    proof = proven(Program(str(script)), ranks=(2,))
    assert proof.verdict == "equal", str(proof)
    script.write_text(EVALUATION.replace(", sampler=DistributedSampler(data)", ""))
    proof = proven(Program(str(script)), ranks=(2,))
    assert proof.mistake == "samples-twice", str(proof)


DECORATED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw

@dw.distributed()
def main():
    torch.manual_seed(0)
    x, v = torch.randn(96, 3), torch.randn(40, 3)
    data, held_out = TensorDataset(x, x.sum(1, keepdim=True)), TensorDataset(v, torch.arange(40.0)[:, None])
    model = dw.wrap_model(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evaluation = DataLoader(held_out, batch_size=32)
    for inputs, targets in dw.shard_loader(DataLoader(data, batch_size=12)):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dw.is_rank_zero():
        with torch.no_grad():
            losses = [nn.functional.mse_loss(dw.unwrap_model(model)(inputs), targets) for inputs, targets in evaluation]
        print(f"validation {sum(losses):.4f}")
    dw.barrier()
    return dw.mean(loss.item(), len(inputs))

main()
"""


def test_a_decorated_script_is_seen_as_others(tmp_path: Path) -> None:
    """Its evaluation by rank 0 alone has the batches of one process, and what it returns is compared."""
    script = tmp_path / "script.py"
    script.write_text(DECORATED)
    proof = proven(Program(str(script)), ranks=(2,))
    assert proof.verdict == "equal", str(proof)
    assert "no evaluation was seen" not in proof.notes
    script.write_text(DECORATED.replace("dw.mean(loss.item(), len(inputs))", "loss.item()"))
    proof = proven(Program(str(script)), ranks=(2,))
    assert proof.mistake == "number-of-a-part", str(proof)
    assert "what the function returned" in str(proof)


def test_the_last_printed_digit() -> None:
    """One more there, or a number as small as rounding, is no difference where float64 has none; and else it is."""
    proof = prove(fine, ranks=[2])
    assert proof.comparisons[0].compared["printed numbers"] == 2
    assert any(note.startswith("in float64") for note in proof.notes)
    with pytest.raises(ProofError, match=r"DW204(.*\n)*.*note: in float64"):
        prove(lambda: fine(prints=0.02 * (dw.world_size() - 1)), ranks=[2])


def on_some_ranks(refused: tuple[int, ...]) -> None:
    if dw.world_size() in refused:
        raise ValueError("not on so many ranks")
    fine()


def test_a_number_of_ranks_that_the_loop_refuses() -> None:
    """It is a note where the loop runs on others, and a difference where it runs on none."""
    proof = prove(on_some_ranks, (3,), ranks=[2, 3])
    assert "equal: 4 steps in one process and on 2 ranks" in str(proof)
    assert any(note.startswith("3 ranks fail before their first step: ValueError: not on") for note in proof.notes)
    with pytest.raises(ProofError, match="DW501"):
        prove(on_some_ranks, (2, 3), ranks=[2, 3])


def test_a_script_for_torchrun_takes_the_common_batch() -> None:
    """Its 128 samples leave 8, which 2 ranks divide evenly, and 3 do not."""
    proof = proven(Program(str(LOOPS / "ddp" / "mingpt_trainer.py"), steps=12), ranks=(2, 3))
    assert proof.verdict == "equal", str(proof)
    assert [each.steps for each in proof.comparisons] == [12, 10]
    assert "a last batch of 8 samples has uneven parts, from where nothing was compared" in proof.notes


def stands_still() -> None:
    model = dw.wrap_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(12, 1)).mean().backward()
    if dw.rank() == 1:
        select.select([], [], [], 600)
    optimizer.step()


def test_a_real_rank_that_stands_still() -> None:
    """It is ended when the run's own limit is over."""
    with pytest.raises(ProofError, match="DW501"):
        prove(dw.distributed(timeout=4)(stands_still), ranks=[2], steps=1, real=True)


def wide(wrong: int = 0) -> None:
    torch.manual_seed(0)
    model = dw.wrap_model(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in shard_loader(DataLoader(TensorDataset(torch.randn(24, 64)), batch_size=12)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if wrong and dw.world_size() > 1:
            model.weight.grad[:wrong] *= 2
        optimizer.step()


def test_a_large_model() -> None:
    """No more than some numbers of a tensor are kept, by which a difference is still seen."""
    assert prove(wide, ranks=[2]).verdict == "equal"
    for rows, words in ((1, "they were alike after the backward"), (64, "2.000 times")):
        with pytest.raises(ProofError, match=f"only weight at .*\\n.*on 2 ranks: {words}(.*\\n)*.*DW105"):
            prove(wide, rows, ranks=[2])
    with world.folder() as folder:
        (step, _) = world.run(Program(function=wide), 1, folder).seen[0].steps
    assert [len(each.values) for each in step.tensors["begun"].values()] == [256, 64]


class Blocks(nn.Module):
    """A model that every strategy can divide; one that calls only its parts computes its loss without its forward."""

    def __init__(self, *, parts_alone: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
        self.last = nn.Linear(16, 1)
        for block in self.blocks:
            block.register_buffer("seen", torch.ones(3))
        self.parts_alone = parts_alone

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.forward(x) if self.parts_alone else self(x), y)


def divided(scale: bool = False, parts_alone: bool = False, shards: bool = True) -> None:
    torch.manual_seed(0)
    x = torch.randn(48, 8)
    model = dw.wrap_model(Blocks(parts_alone=parts_alone))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=12)
    for inputs, targets in shard_loader(loader) if shards else loader:
        loss = model.loss(inputs, targets)
        (loss * dw.world_size() if scale else loss).backward()
        optimizer.step()
        optimizer.zero_grad()


PLAN = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's own, of layers whose ends are divided
@pytest.mark.parametrize("strategy", ["pipeline", "tensor_parallel"])
def test_ranks_that_divide_a_model(strategy: str) -> None:
    """Their common batch counts once, and each tensor is compared where it is; what is wrong is still named."""
    chosen = (
        dw.PipelineStrategy(stages=2, loss="loss")
        if strategy == "pipeline"
        else dw.FSDPStrategy(tensor_parallel=2, plan=PLAN)
    )
    loop = dw.distributed(strategy=chosen)(divided)
    found = prove(loop, ranks=[2, 4])
    counts = [[each.compared[kind] for kind in ("samples", "weights", "buffers")] for each in found.comparisons]
    assert counts == [[48, 80, 16]] * 2
    assert prove(loop, False, True, ranks=[2], real=True).comparisons[0].compared["gradients"] == 80
    with pytest.raises(ProofError, match=r"gradients of all parameters .*\n.*on 2 ranks: 2.000 times(.*\n)*.*DW101"):
        prove(loop, True, ranks=[2])
    with pytest.raises(ProofError, match="DW201 samples-twice"):
        prove(loop, False, False, False, ranks=[4])


def normalized(sync: bool) -> float:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    model = dw.wrap_model(net, sync_batchnorm=sync)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.zeros(1)
    for x, y in shard_loader(DataLoader(TensorDataset(torch.randn(48, 4), torch.randn(48, 1)), batch_size=12)):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return dw.mean(loss.item())


@pytest.mark.slow(WHY)
def test_batch_norm_over_all_ranks_is_equal() -> None:
    """What helps where layers normalize by a rank's part can be proven: statistics of all ranks' batches are alike."""
    with pytest.raises(ProofError, match="DW402 batch-statistics"):
        prove(normalized, False, ranks=[2])
    assert "BatchNorm" not in str(prove(normalized, True, ranks=[2, 3]))
