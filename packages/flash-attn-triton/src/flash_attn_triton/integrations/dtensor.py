"""Sharding rules of the operators for DTensor: only cuts along batch and heads are kept.

Attention of one sequence and one group of heads does not depend on the rest, so tensors that are
cut along the batch, or along heads, need no communication. DTensor first gathers a cut along
tokens, or changes it to one of these two, whichever it estimates to cost less;
:mod:`flash_attn_triton.distributed` can compute with such a cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .._dense import ops

# a rule: placements of the outputs, and of the tensors by name
Rule = tuple[list[Any], dict[str, Any]]
# tensors with the dimensions of q, and with those of the LSE
_LIKE_Q = ("dout", "q", "k", "v", "out")
_LIKE_LSE = ("lse", "dlse")


def register() -> None:
    """Register the rules. A second call does nothing.

    All tensors of a call then have to be DTensors; sinks and offsets are usually replicated. Heads
    are cut only if the mesh size divides ``heads_k``. With dropout everything is replicated,
    because a draw depends on the index of the sequence and of the head.
    """
    for operator, rules in ((ops.forward, _forward_rules), (ops.backward, _backward_rules)):
        register_sharding(operator)(_with_names(operator, rules))


def _with_names(operator: Any, rules: Callable[[dict[str, Any]], list[Rule]]) -> Callable[..., Any]:
    """Turn rules by name into rules for all arguments in order."""
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
    """Return, for each way to cut a call, the placements of its tensors."""
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
    # one row per sequence, or the same for all
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
            # a bias that all ranks share: each rank has a share of its gradient
            dbias = of["bias"] if way == "none" or of["bias"].is_shard() else Partial()
        if sinks is not None:
            dsinks = Partial() if way == "batch" else of["sinks"]
        found.append(([of["q"], of["k"], of["v"], dbias, dsinks], of))
    return found
