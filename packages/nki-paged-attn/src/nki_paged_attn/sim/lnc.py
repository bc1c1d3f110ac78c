"""Two programs of a logical core: threads that take turns, from one barrier to the next."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from .errors import require

LNC = "nki/get-started/about/lnc"


class Stopped(Exception):
    """Raised in a program because the other one failed."""


class Turns:
    """Lets one of two programs run at a time, so that results do not depend on the threads.

    A program runs until it waits at a barrier, or ends; then the other does.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn = 0
        # programs that wait, and their barriers
        self._arrived: dict[int, str] = {}
        self._ended: set[int] = set()
        self._round = 0
        self._error: BaseException | None = None
        # data that programs exchange at a barrier
        self.mail: defaultdict[tuple[int, Any], deque[Any]] = defaultdict(deque)

    def run(self, programs: list[Callable[[], Any]]) -> list[Any]:
        """Run two programs and return their results; raise the first error."""
        results: list[Any] = [None] * len(programs)

        def body(number: int) -> None:
            try:
                self._wait(number, self._round)
                results[number] = programs[number]()
            except Stopped:
                pass
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
            finally:
                with self._changed:
                    self._ended.add(number)
                    self._turn = 1 - number
                    self._changed.notify_all()

        threads = [threading.Thread(target=body, args=(n,)) for n in range(len(programs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return results

    def meet(
        self, call: str, number: int, place: str, then: Callable[[], None] | None = None
    ) -> None:
        """Wait until both programs are at this barrier; ``then`` runs before either continues."""
        with self._changed:
            self._arrived[number] = place
            other = self._arrived.get(1 - number, place)
            require(other == place, call, "the other program", f"must come to {place}", other, LNC)
            wanted = self._round + 1
            self._turn = 1 - number
            if len(self._arrived) == 2:
                self._arrived.clear()
                self._round += 1
                self._turn, wanted = 0, self._round
                if then is not None:
                    then()
            self._changed.notify_all()
        self._wait(number, wanted, call)

    def _wait(self, number: int, round_: int, call: str = "") -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._error is not None
                    or (self._turn == number and (self._round >= round_ or self._ended))
                )
            )
            if self._error is not None:
                raise Stopped
        require(
            self._round >= round_,
            call,
            "the other program",
            "must call it, too",
            "a program that ended",
            LNC,
        )
