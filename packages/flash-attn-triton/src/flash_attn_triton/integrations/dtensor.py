"""Sharding rules of the operators for DTensor: batch and heads stay cut, and nothing else does.

Attention of one sequence and one group of heads needs nothing of the others, so tensors that are
cut along the batch, or along heads, are computed with where they are. A cut along tokens is
gathered first, or exchanged for one of these two, whichever DTensor estimates to cost less;
:mod:`flash_attn_triton.distributed` computes with such cuts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .._dense import ops

# a rule: placements of the outputs, and of the tensors by name
Rule = tuple[list[Any], dict[str, Any]]
# what has a dimension for sequences, and for heads, as q has
_LIKE_Q = ("dout", "q", "k", "v", "out")
_LIKE_LSE = ("lse", "dlse")


def register() -> None:
    """Register the rules. A second call does nothing new.

    All tensors of a call have to be DTensors then: sinks and offsets are replicated, as a rule.
    Heads are cut only where the mesh divides ``heads_k``. With dropout everything is replicated,
    because a draw counts sequences and heads from the first one.
    """
    for operator, rules in ((ops.forward, _forward_rules), (ops.backward, _backward_rules)):
        register_sharding(operator)(_with_names(operator, rules))


def _with_names(operator: Any, rules: Callable[[dict[str, Any]], list[Rule]]) -> Callable[..., Any]:
    """Return rules of all arguments in their order, from rules of arguments by name."""
    names = [argument.name for argument in operator._schema.arguments]
    defaults = {a.name: a.default_value for a in operator._schema.arguments}

    def ordered(*arguments: Any, **named: Any) -> list[tuple[list[Any], list[Any]]]:
        given = defaults | dict(zip(names, arguments, strict=False)) | named
        present = names[: len(arguments)]
        return [(out, [of.get(name) for name in present]) for out, of in rules(given)]

    return ordered


def _tensors(given: dict[str, Any]) -> list[str]:
    return [name for name, x in given.items() if hasattr(x, "tensor_meta")]


def _rules(given: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return what each way to cut a call makes of its arguments."""
    q, k = given["q"], given["k"]
    names = _tensors(given)
    found: list[tuple[str, dict[str, Any]]] = [("none", dict.fromkeys(names, Replicate()))]
    if given["dropout_p"] > 0.0:
        return found
    if q.ndim == 4:
        of = {name: _along_batch(name, given[name], q.shape[0]) for name in names}
        found.append(("batch", of))
    if k.shape[-2] % q.mesh.size() == 0:
        found.append(("heads", {name: _along_heads(name, given[name]) for name in names}))
    return found


def _along_batch(name: str, x: Any, batch: int) -> Any:
    if name in (*_LIKE_Q, *_LIKE_LSE):
        return Shard(0)
    # by sequence, or the same for all
    has_sequences = x.ndim >= 2 and x.shape[0] == batch > 1
    return Shard(0) if has_sequences else Replicate()


def _along_heads(name: str, x: Any) -> Any:
    if name in _LIKE_Q:
        return Shard(x.ndim - 2)
    if name in _LIKE_LSE:
        return Shard(x.ndim - 2)
    if name == "bias":
        return Shard(1) if x.shape[1] > 1 else Replicate()
    if name == "sinks":
        return Shard(0)
    if name == "alibi_slopes":
        return Shard(x.ndim - 1)
    if name in ("q_descale", "k_descale", "v_descale") and x.ndim == 2 and x.shape[1] > 1:
        return Shard(1)
    return Replicate()


def _forward_rules(given: dict[str, Any]) -> list[Rule]:
    q = given["q"]
    outputs: dict[str, list[Any]] = {
        "none": [Replicate(), Replicate()],
        "batch": [Shard(0), Shard(0)],
        "heads": [Shard(q.ndim - 2), Shard(q.ndim - 3)],
    }
    return [(outputs[way], of) for way, of in _rules(given)]


def _backward_rules(given: dict[str, Any]) -> list[Rule]:
    bias, sinks = given["bias"], given["sinks"]
    found: list[Rule] = []
    for way, of in _rules(given):
        dbias: Any = Replicate()
        dsinks: Any = Replicate()
        if bias is not None and given["needs_dbias"]:
            # one for all: every rank has a share of its gradient
            dbias = of["bias"] if way == "none" or of["bias"].is_shard() else Partial()
        if sinks is not None:
            dsinks = Partial() if way == "batch" else of["sinks"]
        found.append(([of["q"], of["k"], of["v"], dbias, dsinks], of))
    return found
