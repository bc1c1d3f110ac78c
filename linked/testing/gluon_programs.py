"""Programs of a kernel that run at once on a CPU; see ``gluon_machine``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch


class Programs:
    """Programs that run at once, each in a thread; one goes on until it waits for another.

    A program begins once its predecessor has taken a number. Then the last program runs as far as
    it can, and again whenever a program has raised a counter. ``resume`` is called with the number
    of the program that goes on.
    """

    def __init__(
        self, runs: Sequence[Callable[[], None]], resume: Callable[[int], None] = lambda _: None
    ) -> None:
        self._runs, self._resume = runs, resume
        self._go = [threading.Lock() for _ in runs]
        self._alive = list(range(len(runs)))
        self._begun = self._current = 0
        # consecutive programs that had nothing to do
        self._idle = 0
        self._failure: BaseException | None = None

    def __call__(self) -> None:
        """Run them to their ends."""
        threads = []
        for number in self._alive:
            self._go[number].acquire()
            threads.append(threading.Thread(target=self._work, args=(number,)))
        for thread in threads:
            thread.start()
        self._release(0)
        for thread in threads:
            thread.join()
        if self._failure:
            raise self._failure

    def begin_next(self) -> None:
        """Let the next program begin, if one is left."""
        following = self._begun + 1
        if following in self._alive:
            self._begun = following
            self._switch(following)

    def step_aside(self) -> bool:
        """Let other programs go on until they wait; return False if none can do anything."""
        self._idle += 1
        if self._idle > len(self._alive) or len(self._alive) == 1:
            return False
        self._switch(self._next())
        return True

    def note_progress(self) -> None:
        self._idle = 0

    def say_raised(self) -> None:
        """Let other programs go on, which may wait for the counter that was raised."""
        self._idle = 0
        if len(self._alive) > 1:
            self._switch(self._next())

    def _next(self) -> int:
        return self._alive[self._alive.index(self._current) - 1]

    def _work(self, number: int) -> None:
        self._go[number].acquire()
        try:
            if not self._failure:
                with torch.no_grad():
                    self._runs[number]()
        except BaseException as failure:
            self._failure = self._failure or failure
        self._idle = 0
        self._begun = max(self._begun, number)
        following = self._next()
        self._alive.remove(number)
        if self._alive:
            self._release(following)

    def _release(self, number: int) -> None:
        self._current = number
        self._resume(number)
        self._go[number].release()

    def _switch(self, number: int) -> None:
        own = self._current
        self._release(number)
        self._go[own].acquire()
        if self._failure:
            raise RuntimeError("another program failed")
