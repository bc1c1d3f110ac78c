"""Ranks as threads of one process, which start at once: their exchange is a list."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from flash_attn_triton import _sharded, _sharded_ops, distributed
from flash_attn_triton._linked.parallel.groups import Where


class Ranks:
    """Stands in for process groups of this many ranks."""

    def __init__(self, count, monkeypatch):
        self.count = count
        # by rank, the messages that it sent: target, rows
        self.sent = [[] for _ in range(count)]
        self._own = threading.local()
        self._arrived = threading.Condition()
        self._messages = {}
        self._failed = False
        monkeypatch.setattr(distributed, "check_group", lambda *_: None)
        monkeypatch.setattr(distributed, "where", self._where)
        monkeypatch.setattr(_sharded, "Exchange", self._exchange)
        monkeypatch.setattr(_sharded_ops, "compare", lambda *_: None)
        monkeypatch.setattr(_sharded, "group_named", lambda *_: None)

    def run(self, function):
        """Call ``function(rank)`` on every rank at once; return what each returns."""

        def call(rank):
            self._own.rank = rank
            try:
                # else all GPU tensors' gradients are computed in a thread that is no rank
                with torch.autograd.set_multithreading_enabled(False):
                    return function(rank)
            except BaseException:
                self._failed = True
                raise

        threads = torch.get_num_threads()
        with ThreadPoolExecutor(self.count) as pool:
            results = list(pool.map(call, range(self.count)))
        torch.set_num_threads(threads)
        assert not self._messages, "messages that nobody asked for"
        return results

    def _where(self, _group):
        return Where("threads", self._own.rank, self.count)

    def _exchange(self, message, target, received, source, _options):
        ranks, rank = self, self._own.rank
        i = len(self.sent[rank])
        self.sent[rank].append((target, message.shape[0]))
        with self._arrived:
            self._messages[rank, i] = message
            self._arrived.notify_all()

        class Waiting:
            def wait(self):
                with ranks._arrived:
                    arrived = ranks._arrived.wait_for(
                        lambda: (source, i) in ranks._messages or ranks._failed, timeout=60
                    )
                    assert arrived, "nobody sent what a rank waits for"
                    assert not ranks._failed, "another rank failed"
                    rows = ranks._messages.pop((source, i))
                assert rows.shape[0] == received
                return rows

        return Waiting()
