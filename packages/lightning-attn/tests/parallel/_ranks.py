"""Ranks as threads of one process, which start at once: their exchange is a list."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from lightning_attn import distributed
from lightning_attn._linked.parallel.groups import Where
from lightning_attn._parallel import ops, passes


class Ranks:
    """Stands in for process groups of this many ranks."""

    def __init__(self, count, monkeypatch):
        self.count = count
        self.exchanges = 0
        self._own = threading.local()
        self._barrier = threading.Barrier(count, timeout=60)
        self._messages = [None] * count
        monkeypatch.setattr(distributed, "check_group", lambda *_: None)
        monkeypatch.setattr(distributed, "where", self._where)
        monkeypatch.setattr(passes, "Exchange", self._exchange)
        monkeypatch.setattr(ops, "compare", lambda *_: None)

    def run(self, function):
        """Call ``function(rank)`` on every rank at once; return what each returns."""

        def call(rank):
            self._own.rank = rank
            try:
                # else all GPU tensors' gradients are computed in a thread that is no rank
                with torch.autograd.set_multithreading_enabled(False):
                    return function(rank)
            except BaseException:
                self._barrier.abort()
                raise

        threads = torch.get_num_threads()
        with ThreadPoolExecutor(self.count) as pool:
            results = list(pool.map(call, range(self.count)))
        torch.set_num_threads(threads)
        return results

    def _where(self, _group):
        return Where("threads", self._own.rank, self.count)

    def _exchange(self, message, *_):
        ranks = self
        self._messages[self._own.rank] = message
        if self._own.rank == 0:
            self.exchanges += 1

        class Waiting:
            def wait(self):
                ranks._barrier.wait()
                every = torch.cat(ranks._messages)
                ranks._barrier.wait()
                return every

        return Waiting()
