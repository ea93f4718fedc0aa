"""Suggestions for a run from what was measured: with the figure on which each rests, and what it brings at most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from distwrap.comm.advice import Cost, choose, predict
from distwrap.stopwatch import Part
from distwrap.timing.analysis import Analysis, Lag
from distwrap.timing.measured import RankTimes
from distwrap.wording import as_size, named_ranks

WORTH_CHANGING = 0.05  # of a step
_MUCH_EXCHANGE = 0.1  # of a step: less, and another way to train is no gain
_ALONE = 4  # times as long as on the others: a part that hardly any other rank has
_FEW = 0.5  # collectives of the loop itself in a step
_HALF = 0.5  # of a device's memory; of the time by which ranks are late
_MUCH = 0.05  # of a device's memory, for gradients
_SMALL = 1_000_000  # bytes of gradients, which nothing hides
_MOST_WORKERS = 8
_CLEARLY = 0.1  # slower than others
_WITHOUT_REASON = 0.15  # of a step: processes that do the same differ by up to 10 % by where their memory lies
_UNEVEN = 0.05  # of the mean size of a batch
_OVERLAP = 0.5  # of the compute hides an exchange, as in comm.advice
_BYTES = {"allreduce": 1.0, "bf16": 0.5, "bytegrad": 0.25}  # sent by ways that change the gradients little


@dataclass(frozen=True)
class Suggestion:
    """One piece of advice.

    Attributes:
        text: what was seen, and what to do.
        gain: share of a step that it saves at most; ``None`` where nobody has measured that.
    """

    text: str
    gain: float | None


def advise(found: Analysis) -> list[Suggestion]:
    """Return what is worth changing, the most worthwhile first; nothing where all is well."""
    looks = (_on_lags, _on_data, _on_link, _on_ddp, _on_queues, _on_threads, _on_checkpoints, _on_own_code)
    pieces = [piece for look in looks for piece in look(found)] if found.step else []
    worth = [piece for piece in pieces if piece.gain is None or piece.gain >= WORTH_CHANGING]
    return sorted(worth, key=lambda piece: -(piece.gain or 0.0))


def _on_lags(found: Analysis) -> Iterator[Suggestion]:
    for lag in found.lags:
        # Evaluation that is shared takes its part of the time on every rank.
        gain = lag.share * (1 - 1 / len(found.ranks)) if lag.part is Part.EVALUATION else lag.share
        cure = _cure(found, lag)
        if cure or lag.share >= _WITHOUT_REASON:
            cure = cure or "Look at what else runs on its machine, and at what is computed there alone."
            yield Suggestion(f"{_seen(found, lag)}. {cure}", gain)


def _seen(found: Analysis, lag: Lag) -> str:
    wait = f"{_percent(lag.share)} of each step"
    part = PART_IN_WORDS[lag.part]
    if lag.takes_turns:
        return (
            f"the ranks wait {wait} for each other, in turns: {part} takes {_ms(lag.usual)} on average and "
            f"{_ms(lag.slower)} longer on the rank that is last"
        )
    who = f"{named_ranks(lag.ranks)} on {', '.join(sorted({found.by_number[rank].host for rank in lag.ranks}))}"
    others = "the others wait" if len(found.ranks) > 2 else "the other waits"
    if lag.slower > (_ALONE - 1) * lag.usual:
        how = f"spends {_ms(lag.usual + lag.slower)} a step with {part}, and the others {_ms(lag.usual)}"
    else:
        how = f"is {_percent(lag.slower / lag.usual)} slower in {part} ({_ms(lag.usual + lag.slower)} a step)"
    return f"{who} {how}; {others} {wait}"


def _cure(found: Analysis, lag: Lag) -> str:
    """Say what to do; nothing where no reason is seen."""
    if lag.part is Part.EVALUATION:
        return "Let every rank evaluate its share: shard_loader(loader) for the evaluation too, and gather or mean."
    if lag.part is Part.CHECKPOINT:
        return "save(..., background=True) writes in a thread."
    if lag.takes_turns and _queued(found) > _HALF * lag.slower:
        return f"The ranks wait {_ms(_queued(found))} of each step for a CPU: other programs use them too."
    uneven = max(rank.unevenness for rank in found.ranks)
    if lag.takes_turns and lag.part in (Part.FORWARD, Part.BACKWARD) and uneven > _UNEVEN:
        return (
            f"The batches' sizes differ by {_percent(uneven)}. "
            "Let samples of like length come together (sorted within windows), or give each batch as many tokens."
        )
    if lag.part is Part.DATA:
        has_workers = any(found.by_number[rank].settings.workers for rank in lag.ranks)
        return f"Look at what its data come from. {_MORE_AHEAD if has_workers else _reads_ahead(found)}"
    if lag.part is Part.OWN:
        return "Look at what the loop does there alone, as under `if is_rank_zero()`."
    return "" if lag.takes_turns else " ".join(_why_slow(found, lag))


def _why_slow(found: Analysis, lag: Lag) -> Iterator[str]:
    """Say in what a rank that computes more slowly is not as the others are."""
    slow = found.by_number[lag.ranks[0]]
    others = [rank for rank in found.ranks if rank.rank not in lag.ranks]
    mine, theirs = slow.settings, others[0].settings
    if mine.cpus < median(rank.settings.cpus for rank in others):
        yield f"It may run on {_count(mine.cpus, 'CPU')}, and the others on {theirs.cpus}: give it as many."
    if mine.threads < median(rank.settings.threads for rank in others):
        yield f"It computes with {_count(mine.threads, 'thread')}, and the others with {theirs.threads}."
    if mine.processor != theirs.processor and len({rank.settings.processor for rank in others}) == 1:
        yield f"It computes on {mine.processor}, and the others on {theirs.processor}."
    clocks = [rank.settings.clock for rank in others if rank.settings.clock]
    if mine.clock and clocks and mine.clock < (1 - _CLEARLY) * median(clocks):
        yield f"Its CPUs run at {mine.clock:.0f} MHz, and the others' at {median(clocks):.0f}."
    queued = [rank.queued for rank in others if rank.queued is not None]
    if slow.queued is not None and queued and (more := slow.queued - median(queued)) > _HALF * lag.slower:
        yield (
            f"{_ms(more)} of that it waited for a CPU that other programs used, or more threads than it has CPUs: look "
            f"at what else runs there."
        )


def _queued(found: Analysis) -> float:
    """Return how long the ranks waited for a CPU, in seconds a step, the mean over those that know."""
    known = [rank.queued for rank in found.ranks if rank.queued is not None]
    return sum(known) / len(known) if known else 0.0


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


_MORE_AHEAD = "More workers, or a larger prefetch_factor, even out."


def _reads_ahead(found: Analysis) -> str:
    """Advise as many workers as a rank has CPUs, but two at least: most of them wait for what they read."""
    first = found.ranks[0]
    ranks = sum(rank.host == first.host for rank in found.ranks)
    workers = min(_MOST_WORKERS, max(2, first.settings.cpus // ranks))
    return f"DataLoader(..., num_workers={workers}, persistent_workers=True) reads ahead in processes of its own."


def _on_data(found: Analysis) -> Iterator[Suggestion]:
    share = _least(found, Part.DATA)
    waits = f"every rank waits {_percent(share)} of each step for its loader"
    settings = [rank.settings for rank in found.ranks]
    workers = max((each.workers for each in settings if each.workers is not None), default=0)
    if not workers:
        yield Suggestion(f"{waits}, which reads in the loop itself. {_reads_ahead(found)}", share)
        return
    pin = ""
    if any(rank.device != "cpu" and rank.settings.pins is False for rank in found.ranks):
        pin = "pin_memory=True with shard_loader(loader, copy_ahead=True) copies while the step before computes."
    spare = min(each.cpus for each in settings) - workers
    left = f"{_count(spare, 'CPU')} {'is' if spare == 1 else 'are'} left for more of them"
    more = left if spare > 0 else "all CPUs are taken, so make a sample less work"
    yield Suggestion(
        f"{waits}, with {_count(workers, 'worker')}: {more}; a larger prefetch_factor evens out. {pin}".rstrip(), share
    )


def _on_link(found: Analysis) -> Iterator[Suggestion]:
    """Advise on what even the rank that comes last waits for."""
    share = found.link / found.step if found.step else 0.0
    size = max(rank.gradient_bytes for rank in found.ranks)
    settings = found.ranks[0].settings
    if share < _MUCH_EXCHANGE:
        return
    is_ddp = settings.bucket_bytes is not None
    ways = ["A larger batch computes more for each"]
    if is_ddp:
        ways = [f"accumulate(loader, 4) exchanges a quarter as often ({_percent(share * 3 / 4)} of a step less)"]
    memory = [
        rank.device_memory / rank.settings.total_memory
        for rank in found.ranks
        if rank.device_memory and rank.settings.total_memory
    ]
    if memory and max(memory) < _HALF:
        ways.append(f"a batch twice as large fits: the devices' memory is used to {_percent(max(memory))}")
    if is_ddp and size > _SMALL:
        ways.append(_other_exchange(found, size))
    if settings.bucket_bytes and size <= settings.bucket_bytes and size > _SMALL:
        cap = max(1, round(size / 8e6))
        ways.append(
            f"all gradients are in one group of DDP's, so that none travels before the backward is done: "
            f"wrap_model(model, bucket_cap_mb={cap}) makes eight"
        )
    what = f"the exchange of {as_size(size)} of gradients, beyond what the backward hides" if is_ddp else "the exchange"
    yield Suggestion(f"{_percent(share)} of each step goes to {what}. {'; '.join(ways)}.", share)


def _other_exchange(found: Analysis, size: int) -> str:
    """Predict the step under another algorithm of exchange, from the bytes that it sends."""
    whole = found.link + _OVERLAP * found.alone
    costs = {name: Cost(0.0, whole * part / size) for name, part in _BYTES.items()}
    predictions = predict(costs, size, found.alone)
    comm, _ = choose(predictions, found.alone)
    step = next(row.step for row in predictions if row.comm == comm)
    return (
        f"comm={comm!r} would make it a step of {_ms(step)}, if its codec cost nothing: `python -m distwrap doctor "
        f"--comm --weights {size / 4:.2g} --step-ms {1e3 * found.alone:.1f}` measures it and the others"
    )


def _on_ddp(found: Analysis) -> Iterator[Suggestion]:
    """Advise on settings of DDP, which cost what nobody measures apart."""
    settings = [rank.settings for rank in found.ranks]
    if all(each.finds_unused for each in settings):
        if not any(each.unused_bytes for each in settings):
            yield Suggestion(
                "find_unused_parameters=True looks through the graph of each step, and no parameter was without a "
                "gradient: leave it out.",
                None,
            )
        elif not settings[0].is_static:
            yield Suggestion(
                "find_unused_parameters=True looks through the graph of each step: if it is the same parameters each "
                "time, wrap_model(model, static_graph=True) looks once.",
                None,
            )
    held = [(rank.gradient_bytes, rank.settings) for rank in found.ranks]
    if any(
        each.total_memory and each.is_bucket_view is False and size > _MUCH * each.total_memory for size, each in held
    ):
        yield Suggestion(
            f"gradients are held twice: wrap_model(model, gradient_as_bucket_view=True) frees "
            f"{as_size(held[0][0])} on each device, and a copy a step.",
            None,
        )


def _on_queues(found: Analysis) -> Iterator[Suggestion]:
    """Advise on CPUs on which too many compute."""
    share = min(rank.queued or 0.0 for rank in found.ranks) / found.step
    settings = found.ranks[0].settings
    yield Suggestion(
        f"every rank waits {_percent(share)} of each step for a CPU. Rank 0 computes with "
        f"{_count(settings.threads, 'thread')}, reads with {_count(settings.workers or 0, 'worker')} and may run on "
        f"{_count(settings.cpus, 'CPU')}, with the other ranks there: fewer of these, or of other programs.",
        share,
    )


def _on_threads(found: Analysis) -> Iterator[Suggestion]:
    """Advise on CPUs that nobody computes on."""
    hosts: dict[str, list[RankTimes]] = {}
    for rank in found.ranks:
        if rank.device == "cpu":
            hosts.setdefault(rank.host, []).append(rank)
    for host, ranks in hosts.items():
        taken = sum(rank.settings.threads + (rank.settings.workers or 0) for rank in ranks)
        cpus = max(rank.settings.cpus for rank in ranks)
        if 2 * taken <= cpus:
            computing = sum(_least(found, part) for part in (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER))
            yield Suggestion(
                f"{taken} of {cpus} CPUs of {host} are computed on: OMP_NUM_THREADS={cpus // len(ranks)}, or more "
                f"ranks.",
                computing * (1 - taken / cpus),
            )


def _on_checkpoints(found: Analysis) -> Iterator[Suggestion]:
    share = _least(found, Part.CHECKPOINT)
    yield Suggestion(
        f"{_percent(share)} of the time goes to checkpoints, for which all ranks wait. save(..., background=True) "
        f"copies the state and writes in a thread.",
        share,
    )


def _on_own_code(found: Analysis) -> Iterator[Suggestion]:
    usual = _least(found, Part.OWN)
    called = {name: count for name, count in found.ranks[0].collectives.items() if count >= _FEW}
    if called:
        names = ", ".join(f"{name} ({max(1, round(count))} a step)" for name, count in sorted(called.items()))
        yield Suggestion(
            f"the loop itself waits for other ranks, or for the device, in each step: {names}. Once in many steps is "
            f"enough for a log.",
            None,
        )
    way = "Metrics, prints and `.item()` once in many steps cost less."
    if not any(rank.mean()[Part.FORWARD] for rank in found.ranks):
        way = "The forward is in it too, as that of any model which is not from wrap_model()."
    yield Suggestion(
        f"{_percent(usual)} of each step is the loop's own code, beside data, forward, backward and the optimizer. "
        f"{way}",
        usual if usual > 2 * WORTH_CHANGING else 0.0,
    )


def _least(found: Analysis, part: Part) -> float:
    """Return the share of a step that a part takes on the rank where it takes least."""
    return min(rank.mean()[part] for rank in found.ranks) / found.step if found.step else 0.0


PART_IN_WORDS = {
    Part.DATA: "waiting for data",
    Part.FORWARD: "its forward",
    Part.BACKWARD: "its backward",
    Part.EXCHANGE: "the exchange",
    Part.OPTIMIZER: "the optimizer",
    Part.CHECKPOINT: "checkpoints",
    Part.EVALUATION: "evaluation",
    Part.OWN: "the loop's own code",
}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
