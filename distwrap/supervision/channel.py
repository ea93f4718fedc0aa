"""Side channel, on which ranks tell each other things besides collectives: a store client and a thread in each rank.

The thread looks four times a second for wake-ups and at what is to be seen on this node, and at the store when it was
notified. It answers who asks where the rank is, gives others the work that they wait for, ends this rank, which would
else wait in a collective, where another has failed and no launcher of ours supervises the ranks (torchrun, srun), and
notices when no rank moves any more. It never joins a collective.

Messages are JSON: nothing that comes over the store is unpickled here. Where the run has a secret, what could change
the work of a rank is signed, and so is news of a failure. Whoever reaches the store can still end the run: with a
registration that no rank can read, for example.
"""

import atexit
import contextlib
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import asdict

from distwrap.environments import Placement
from distwrap.network import memory_file
from distwrap.network.signed_texts import SignedTexts
from distwrap.options import QUIET, notice_seconds, switched_on
from distwrap.supervision.activity import Activity
from distwrap.supervision.failure import Failure
from distwrap.supervision.failure_news import NEWS_SECONDS, FailureNews, end_process, store_is_gone
from distwrap.supervision.hang_report import ANSWER_SECONDS
from distwrap.supervision.locations import Location
from distwrap.supervision.notes import RankNotes
from distwrap.supervision.notifier import Notifier
from distwrap.supervision.observer import Observer
from distwrap.supervision.order_check import OrderCheck
from distwrap.supervision.reporter import Reporter
from distwrap.supervision.runs import ANSWER, NAME, Shown
from distwrap.supervision.shared_work import SharedWork
from distwrap.supervision.waits import MainThread
from distwrap.wording import first_line

TICK_SECONDS = 0.25
SHOW_SECONDS = 1.0  # between two times that this rank notes and shows where it is
LOOK_SECONDS = 60.0  # between looks at a store elsewhere without a wake-up: whoever was to notify may be gone
LAUNCHER_SECONDS = 60.0  # for a launcher on several nodes to end this rank, once the store is gone


class Channel:
    """This rank's endpoint of the side channel.

    Args:
        notifier: of the ranks, with a client of the store that is the channel's own.
        placement: this rank's place.
        activity: the last helper that ran on this rank.
        supervised: whether a launcher of ours waits for the ranks' processes, and tells of their ends.
        timeout: seconds without any rank moving after which the run counts as stalled.
        secret: of the run; empty where there is none, and whoever reaches the store is believed.

    Attributes:
        reporter: answers where this rank is, and asks where the others are.
        failures: news of failures.
        order: check that the ranks begin the same collectives.
        work: work of one rank for which others wait.
        observer: prints notices of waits for other ranks, and finds out that no rank moves.
        thread: this rank's main thread, which may wait.
        on_stall: called with the hang report on the rank that finds the run stalled. None: it ends the process.
    """

    def __init__(
        self,
        notifier: Notifier,
        placement: Placement,
        activity: Activity,
        supervised: bool,
        timeout: float,
        secret: bytes,
    ) -> None:
        self.supervised = supervised
        self._notifier, self._place, self._timeout = notifier, placement, timeout
        self._notes = RankNotes(notifier, placement.rank)
        self._texts = texts = SignedTexts(notifier.store, secret)
        self._owners: dict[str, weakref.ref[object]] = {}  # of what is noted
        self._stopped, self._wakeups, self._looked, self._shown = threading.Event(), -1, 0.0, 0.0
        self._parent = os.getppid() if supervised or "TORCHELASTIC_RUN_ID" in os.environ else None
        self.reporter = Reporter(notifier, self._notes, placement, activity, notifier.clock)
        self.failures = FailureNews(notifier, texts, placement, supervised, self._stopped)
        self.work = SharedWork(notifier, texts, placement, activity, supervised)
        self.thread = MainThread(activity, notifier.clock)
        self.order = OrderCheck(self._notes, placement, activity, self.thread, notifier.clock)
        seconds = 0.0 if switched_on(os.environ, QUIET) else notice_seconds(os.environ)
        self.observer = Observer(
            notifier.store, placement, self.reporter, self.thread, seconds, timeout, notifier.clock
        )
        self.reporter.waits = self.observer.wait
        self.work.serve(f"position/{placement.rank}", self.reporter.position)
        self.on_stall: Callable[[str], None] | None = None
        self._thread = threading.Thread(target=self._run, name="distwrap-channel", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        # Where nobody stops it before, the interpreter's end would find it in the store's native code, and abort.
        atexit.register(self._halt)

    def stop(self, *, failed: bool = False) -> None:
        """Tell the others that this rank leaves, or that it has failed, and end the thread."""
        self._stopped.set()
        with contextlib.suppress(RuntimeError):
            self.work.leave(failed=failed)
        self._halt()

    def _halt(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(2 * ANSWER_SECONDS)
        self._show(None)
        self.reporter.waits = lambda: None  # it leads back to the reporter, and would keep the store
        self._notifier.close()
        atexit.unregister(self._halt)

    def _show(self, location: Location | None) -> None:
        """Show other processes on this node where this rank is, or that it has left."""
        if memory_file.ARE_POSSIBLE:  # else nobody could find the board
            where = None if location is None else list(location)
            self._notes.show(NAME, asdict(Shown(self._place.rank, where, time.time())))

    def note(self, name: str, text: str, owner: object = None) -> None:
        """Leave a text for other ranks, in place of the last one; an error of the store is raised elsewhere.

        Args:
            name: by which it is found.
            text: what to leave.
            owner: what the text is of, where nobody waits for the text; once it is gone, the text goes as another owner
                leaves its first.
        """
        if owner is not None and name not in self._owners:
            self._erase_notes_of_the_gone()
            self._owners[name] = weakref.ref(owner)
        if not self._notes.write_on_board(f"note/{name}", text):
            with contextlib.suppress(RuntimeError):
                self._texts.set(f"note/{name}/{self._place.rank}", text)

    def noted(self, name: str, rank: int) -> str:
        """Return the text that a rank has left; empty where there is none."""
        with contextlib.suppress(RuntimeError):
            noted, has_more = self._notes.read_on_board(f"note/{name}", rank)
            return noted or (self._texts.read(f"note/{name}/{rank}") if has_more else "") or ""
        return ""

    def _erase_notes_of_the_gone(self) -> None:
        for name in [name for name, owner in self._owners.items() if owner() is None]:
            del self._owners[name]
            if not self._notes.erase_from_board(f"note/{name}"):
                with contextlib.suppress(RuntimeError):
                    self._notifier.store.delete_key(f"note/{name}/{self._place.rank}")

    def look(self) -> None:
        """Look once for wake-ups, at this node, and where there may be news at the store."""
        if self._parent not in (None, os.getppid()):
            # On Linux the kernel has killed a rank of ours by then.
            end_process(self._place.rank, "whoever started it is gone")
        wakeups, now = self._notifier.wakeups(), self._notifier.clock.monotonic()
        notified = wakeups != self._wakeups or (not self._notifier.is_held and now - self._looked > LOOK_SECONDS)
        if notified:
            self._wakeups, self._looked = wakeups, now
        self._notifier.listen()
        for each in (self.reporter, self.work, self.failures):
            each.look(notified)
        if now - self._shown >= SHOW_SECONDS:
            self._shown = now
            location = self.reporter.location()
            self.reporter.note(location)
            self._show(location)
        if self._notifier.take_question():
            self._notes.show(ANSWER, [time.time(), self.reporter.ask_others()])
        if self.observer.look():
            self._report(f"no rank has moved for {self._timeout:g} s")
        if parted := self.order.look():
            words, way_out = parted
            self._report(words, f"\n{way_out}")

    def _run(self) -> None:
        while not self._stopped.wait(TICK_SECONDS):
            try:
                self.look()
            except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
                end_process(
                    self._place.rank,
                    f"it cannot read the ranks' store ({first_line(error)}): another program writes to the "
                    f"port at which the ranks meet\n{traceback.format_exc()}",
                )
            except RuntimeError as error:
                if self._notifier.is_held or self._stopped.wait(LAUNCHER_SECONDS if self.supervised else NEWS_SECONDS):
                    return
                end_process(self._place.rank, str(store_is_gone(self._place, error)))

    def _report(self, words: str, way_out: str = "") -> None:
        report = f"{words}:\n{self.reporter.ask_others()}{way_out}"
        (self.on_stall or self._end_stalled)(report)

    def _end_stalled(self, report: str) -> None:
        self.failures.tell(Failure.in_own_words(self._place.rank, report))
        end_process(self._place.rank, report)
