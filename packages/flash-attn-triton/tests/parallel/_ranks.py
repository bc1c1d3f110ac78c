"""Ranks as threads of one process, which start at once: their exchange is a list."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from flash_attn_triton import distributed
from flash_attn_triton._linked.parallel.groups import Where
from flash_attn_triton._parallel import exchange, ops


class Ranks:
    """Stands in for process groups of this many ranks."""

    def __init__(self, count, monkeypatch):
        self.count = count
        # by rank, the messages that it sent: target, elements
        self.sent = [[] for _ in range(count)]
        self._own = threading.local()
        self._arrived = threading.Condition()
        self._messages = {}
        self._failed = False
        monkeypatch.setattr(distributed, "check_group", lambda *_: None)
        monkeypatch.setattr(distributed, "where", self._where)
        monkeypatch.setattr(dist, "all_to_all_single", self._exchange)
        monkeypatch.setattr(ops, "compare", lambda *_: None)
        monkeypatch.setattr(exchange, "group_named", lambda *_: None)

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

    @property
    def rank(self):
        """The rank whose thread asks."""
        return self._own.rank

    def _exchange(self, arriving, message, received, sent, *_, **_options):
        assert (len(received), sum(received)) == (self.count, arriving.numel())
        assert (len(sent), sum(sent)) == (self.count, message.numel())
        assert arriving.ndim == message.ndim == 1
        ranks, rank = self, self.rank
        i = len(self.sent[rank])
        # who is asked for nothing is as good as any other
        target = max(range(self.count), key=sent.__getitem__)
        self.sent[rank].append((target, message.numel()))
        with self._arrived:
            for to, count in enumerate(sent):
                if count:
                    self._messages[rank, to, i] = message
            self._arrived.notify_all()

        class Waiting:
            def wait(self):
                for source, count in enumerate(received):
                    if count:
                        arriving.copy_(ranks._arrival((source, rank, i), count))

        return Waiting()

    def _arrival(self, key, count):
        with self._arrived:
            arrived = self._arrived.wait_for(
                lambda: key in self._messages or self._failed, timeout=60
            )
            assert arrived, "nobody sent what a rank waits for"
            assert not self._failed, "another rank failed"
            message = self._messages.pop(key)
        assert message.numel() == count
        return message
