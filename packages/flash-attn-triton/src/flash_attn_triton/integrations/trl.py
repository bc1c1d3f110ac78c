"""TRL: trainers that compute what the rows of a batch have in common once.

Example::

    import flash_attn_triton.integrations.trl as attention
    from trl import GRPOConfig, GRPOTrainer

    options = {"attn_implementation": attention.register()}
    trainer = GRPOTrainer(path, args=GRPOConfig(model_init_kwargs=options, ...), ...)
    attention.share_prefixes(trainer)
    trainer.train()

The trainer is not changed. It pads rows and calls its models as ever, and each row gets the same
log-probabilities and gradients. But below the head of a model the rows of a batch are a tree, in
which a prompt stands once, whatever the number of its answers: see ``share_prefixes`` in
:mod:`flash_attn_triton.integrations.transformers`. TRL shuffles all rows that it generated at once
before it cuts them into batches: the more of them a batch holds, the more rows of a prompt meet.
"""

from __future__ import annotations

from typing import Any

from .._linked.host.arguments import kind
from .._linked.host.versions import need
from . import transformers
from ._trees import SharedPrefixes
from .transformers import register

__all__ = ["register", "share_prefixes"]

need("trl", (1, 0), __name__, before=(2, 0))


def share_prefixes(trainer: Any) -> SharedPrefixes:
    """Let the models of a trainer compute what the rows of a batch have in common once.

    Args:
        trainer: a ``GRPOTrainer`` of TRL 1.0 or newer, before its ``train()``. Its model, and the
            reference model if there is one, have ``attn_implementation=register()``.

    Returns:
        A handle; its ``remove()`` ends this.

    Raises:
        TypeError: if ``trainer`` is no ``GRPOTrainer``.
        ValueError: if a model has another attention.
    """
    from trl import GRPOTrainer

    if not isinstance(trainer, GRPOTrainer):
        raise TypeError(f"trainer must be a GRPOTrainer of TRL, got {kind(trainer)}")
    models = trainer.model, getattr(trainer, "ref_model", None)
    return transformers.share_prefixes(*(model for model in models if model is not None))
