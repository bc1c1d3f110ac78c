"""Checks of single arguments: types, shapes, dtypes, strides and devices, never tensor data.

Each raises with the argument's name, the expected value and the given one.
"""

from __future__ import annotations

import difflib
import functools
import math
import operator as operators
import re
import warnings
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from inspect import signature
from typing import Any, NoReturn, TypeVar, cast

import torch
from attn_common import detect, fp8_dtype
from torch import Tensor

R = TypeVar("R")
FLOAT_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))
FP8_DTYPES = frozenset(
    (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
)
DEVICES = ("cpu", "cuda", "meta")
# the kernels compute in fp32, and in base 2
FP32_MAX = torch.finfo(torch.float32).max
FP32_TINY = torch.finfo(torch.float32).tiny
FACTOR_MAX = FP32_MAX / math.log2(math.e)
# a window of this size hides nothing, and its sum with a position fits 32 bits
MAX_WINDOW = 2**30
_INT64_MAX = 2**63 - 1
# the exceptions that checks raise
ERRORS = (TypeError, ValueError, NotImplementedError)
_NUMPY_BOOL = "numpy", "bool"
# what this process was warned of
_warned: set[str] = set()


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """Return the error of a check with the argument names of the function that was called.

    Args:
        error: one of ``ERRORS``.
        names: old names, and words with them, each with the new one; the first that fits counts.
    """
    words = re.compile(rf"\b({'|'.join(names)})\b")
    kind = next(kind for kind in ERRORS if isinstance(error, kind))
    return kind(words.sub(lambda found: names[found[0]], str(error)))


def refuse_unknown(
    names: Iterable[str], elsewhere: Mapping[str, str], function: Callable[..., Any]
) -> NoReturn:
    """Raise for the first of some unknown keyword arguments, with a hint.

    Args:
        names: names of the arguments.
        elsewhere: names from other libraries, each with what to do here.
        function: the function that was called; the hint may be a similar name of its arguments.
    """
    name = next(iter(names))
    hint = elsewhere.get(name)
    if hint is None:
        known = [p.name for p in signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else None
    raise TypeError(f"{name} is no argument here" + (f": {hint}" if hint else ""))


def refuse_others(
    others: Mapping[str, Any],
    unsupported: Mapping[str, str],
    ignored: Container[str],
    attention: str,
    eager: str,
) -> None:
    """Raise for keywords of an adapter that are not known to leave the result unchanged.

    Args:
        others: keywords that the adapter does not declare, and their values; None and False are
            accepted.
        unsupported: keywords that would change the result, each with the reason for the refusal.
        ignored: keywords that do not change the result.
        attention: name of the adapter in the message.
        eager: the implementation that the message recommends instead.
    """
    for name, value in others.items():
        if value is None or value is False:
            continue
        if name in unsupported:
            raise NotImplementedError(f"{name}: {unsupported[name]}")
        if name not in ignored:
            raise NotImplementedError(
                f"{name}: not known to the {attention}, and it may change the result; load the "
                f'model with attn_implementation="{eager}"'
            )


def check_choice(name: str, x: Any, choices: Collection[str | None]) -> None:
    """Check that an argument is one of some names."""
    *first, last = map(repr, choices)
    wanted = f"{name} must be {', '.join(first)} or {last}"
    if x is not None and not isinstance(x, str):
        raise TypeError(f"{wanted}, got {kind(x)}")
    if x not in choices:
        raise ValueError(f"{wanted}, got {x!r}")


def one_of(**names: Tensor | None) -> Tensor | None:
    """Return the one argument that is given under any of its names."""
    given = {name: x for name, x in names.items() if x is not None}
    if len({id(x) for x in given.values()}) > 1:
        raise ValueError(f"{' and '.join(given)} are names of one argument, got several")
    return next(iter(given.values()), None)


def as_int32(x: Any) -> Any:
    """Return int64 offsets as int32, converted on their device without a synchronisation.

    Values beyond 32 bits are clamped, and are then still out of range.
    """
    # every call runs this: the cheapest test comes first
    if not isinstance(x, Tensor) or x.dtype is not torch.int64:
        return x
    return x.clamp(-(2**31), 2**31 - 1).to(torch.int32)


def check_tensor(name: str, x: Any) -> None:
    """Check that an argument is a tensor with strides: not nested, sparse or of another layout."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {kind(x)}")
    if x.layout is not torch.strided or x.is_nested:
        layout = "a nested tensor" if x.is_nested else x.layout
        raise TypeError(f"{name} must have the layout torch.strided, got {layout}")


def check_device(name: str, x: Tensor, q: Tensor) -> None:
    """Check that a tensor is where the queries are."""
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")


def check_kinds(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that keys and values have the queries' dtype and device, and that it is supported."""
    dtype, device = q.dtype, q.device
    if k.dtype != dtype or v.dtype != dtype:
        name, x = ("k", k) if k.dtype != dtype else ("v", v)
        raise TypeError(f"{name} must have the dtype of q, {dtype}, got {x.dtype}")
    if k.device != device or v.device != device:
        name, x = ("k", k) if k.device != device else ("v", v)
        check_device(name, x, q)
    if device.type not in DEVICES:
        raise NotImplementedError(f"q must be on a CPU or a CUDA or HIP device, got {device}")


def check_floats(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check the dtypes of a reference's tensors: any floats."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name} must be of a float dtype, got {x.dtype}")
        check_device(name, x, q)


def check_width(q: Tensor, **others: Tensor) -> None:
    """Check that tensors of a reference are float64 where the queries are, and only there."""
    for name, x in others.items():
        if (x.dtype == torch.float64) != (q.dtype == torch.float64):
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")


def check_readable(**tensors: Tensor | None) -> None:
    """Check that tensors have values, which those on meta have not."""
    for name, x in tensors.items():
        if x is not None and x.is_meta:
            raise ValueError(f"{name} must be on a CPU or a GPU, to be read, got {x.device}")


def check_given(name: str, x: Any, q: Tensor, *shapes: tuple[int, ...]) -> None:
    """Check an optional tensor of a reference: any floats, of one of some shapes.

    Any tensor of one element has the shape ``()``.
    """
    if x is None:
        return
    check_tensor(name, x)
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must be of a float dtype, got {x.dtype}")
    check_device(name, x, q)
    if tuple(x.shape) not in shapes and not (() in shapes and x.numel() == 1):
        wanted = " or ".join(str(list(shape)) if shape else "of one element" for shape in shapes)
        raise ValueError(f"{name} must be {wanted}, got {list(x.shape)}")


def warn_once(about: str, message: str) -> None:
    """Warn, once in a process for what it is about, of a call that is likely not what is meant.

    A trace does not warn.
    """
    if about not in _warned and not torch.compiler.is_compiling():
        _warned.add(about)
        warnings.warn(message, stacklevel=5)


def warn_of_heads_first(q: Tensor, k: Tensor) -> None:
    """Warn of tensors that look like ``[batch, heads, seqlen, head_dim]``.

    Their heads would be more than their tokens, which are as many as a model has heads.
    """
    if "heads" in _warned or torch.compiler.is_compiling():
        return
    _, tokens, heads, _ = q.shape
    if not 1 < tokens < heads or heads < 16 or heads != k.shape[2] or tokens > 128 or tokens % 2:
        return
    if tokens % (k.shape[1] or 1) == 0:
        warn_once(
            "heads",
            f"q is taken as [batch, seqlen, heads, head_dim], so that {list(q.shape)} has {heads} "
            f"heads and {tokens} tokens; if its heads come first, pass q.transpose(1, 2), and k "
            "and v likewise",
        )


def check_groups(heads_q: int, heads_k: int) -> None:
    """Check that the same number of query heads shares each head of keys."""
    if heads_k < 1 or heads_q < 1 or heads_q % heads_k != 0:
        hint = "; heads stand right before head_dim" if heads_k > heads_q else ""
        raise ValueError(
            f"heads_q must be a positive multiple of heads_k, got heads_q {heads_q} and "
            f"heads_k {heads_k}{hint}"
        )


def check_no_gradient(name: str, x: Tensor) -> None:
    """Check that a tensor requires no gradient, because none is computed for it."""
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} must not require a gradient, which is not computed; got requires_grad=True: "
            f"pass {name}.detach()"
        )


def check_offsets(name: str, x: Any, q: Tensor) -> None:
    """Check int32 lengths or offsets of sequences."""
    check_tensor(name, x)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be torch.int32, got {x.dtype}")
    check_device(name, x, q)
    if x.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got {list(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {x.stride(0)}")


def check_cu_seqlens(cu_seqlens_q: Any, cu_seqlens_k: Any, q: Tensor) -> int:
    """Check the offsets of packed sequences; return the number of sequences."""
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_offsets(name, x, q)
        if x.shape[0] < 1:
            raise ValueError(f"{name} must be [batch + 1], got {list(x.shape)}")
    batch: int = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k.shape[0] != batch + 1:
        raise ValueError(
            f"cu_seqlens_k must be as long as cu_seqlens_q, [{batch + 1}], "
            f"got {list(cu_seqlens_k.shape)}"
        )
    return batch


def check_out_scale(name: str, out_scale: Tensor, q: Tensor) -> None:
    """Check the scale of an FP8 output."""
    check_tensor(name, out_scale)
    if out_scale.dtype != torch.float32:
        raise TypeError(f"{name} must be torch.float32, got {out_scale.dtype}")
    check_device(name, out_scale, q)
    if out_scale.numel() != 1:
        raise ValueError(f"{name} must have one element, got {list(out_scale.shape)}")
    check_no_gradient(name, out_scale)


def check_fp8_hardware(name: str, device: torch.device) -> torch.dtype:
    """Check that a device computes in FP8; return the e4m3 dtype it uses."""
    platform = detect("cpu" if device.type == "meta" else device)
    if not platform.supports_fp8:
        raise NotImplementedError(
            f"{name}: FP8 needs an NVIDIA GPU of sm_89 or up, or an AMD one of gfx942 or up, "
            f"got {platform}; use torch.bfloat16 there"
        )
    dtype: torch.dtype = getattr(torch, fp8_dtype(platform))
    return dtype


def check_scale(name: str, scale: float) -> float:
    """Check a factor of the scores; return it as a float."""
    if scale.__class__ is not float:
        check_number(name, scale)
    if not -math.inf < scale < math.inf:
        raise ValueError(f"{name} must be finite, got {scale}")
    if not -FACTOR_MAX <= scale <= FACTOR_MAX:
        raise ValueError(
            f"{name} must be from -{FACTOR_MAX:.3g} to {FACTOR_MAX:.3g}, for fp32, "
            f"got {shown(scale)}"
        )
    # the operators' schema takes no integer beyond 64 bits for a float
    return float(scale) if scale.__class__ is int else scale


def check_fp8_scale(name: str, scale: float) -> None:
    """Check a scale of FP8 numbers; kernels divide by it."""
    check_number(name, scale)
    if not FP32_TINY <= scale <= FP32_MAX:
        raise ValueError(
            f"{name} must be positive and finite, from {FP32_TINY:.3g} to {FP32_MAX:.3g}, "
            f"got {shown(scale)}"
        )


def as_length(name: str, length: Any) -> int:
    """Check a length, whatever ``operator.index`` takes but bools; return it as an int.

    Of tensors it takes those without dimensions, and waits for a GPU. A symbol of ``torch.compile``
    is returned as it is: a comparison would make a graph for one outcome, so the operators check
    its value.
    """
    number: int = length
    # of a symbol, the compiler says that this is False
    if length.__class__ is not int:
        if is_flag(length) or (isinstance(length, Tensor) and _is_no_number(length)):
            raise TypeError(f"{name} must be an int, got {kind(length)}")
        number = _index_of(name, length)
        if is_symbol(number):
            return number
    _check_bounds(name, number, 0)
    return number


def check_count(name: str, x: Any, least: int = 1) -> None:
    """Check an int that is no length, such as a number of parts."""
    if not is_int(x):
        raise TypeError(f"{name} must be an int, got {kind(x)}")
    _check_bounds(name, x, least)


def _check_bounds(name: str, x: int, least: int) -> None:
    if x < least:
        raise ValueError(f"{name} must be at least {least}, got {shown(x)}")
    if x > _INT64_MAX:
        raise ValueError(f"{name} must fit into 64 bits, got {shown(x)}")


def _is_no_number(x: Tensor) -> bool:
    return x.ndim > 0 or x.dtype == torch.bool


def is_symbol(length: int) -> bool:
    """Return whether a result of ``as_length`` is a symbol, which must not be compared."""
    return length.__class__ is not int


def _index_of(name: str, x: Any) -> int:
    # while a graph is traced the type of a symbol is int
    if isinstance(x, torch.SymInt) or type(x) is int:
        return cast("int", x)
    if isinstance(x, Tensor) and x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{name} must be an int while a stream captures, which a tensor on a GPU would end, "
            "got Tensor"
        )
    if torch.compiler.is_compiling():
        return operators.index(x)
    try:
        return int(operators.index(x))
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name} must be an int, got {kind(x)}") from error


def check_number(name: str, x: Any) -> None:
    """Check that an argument is a real number, and not a bool."""
    if isinstance(x, bool) or not isinstance(x, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a float, got {kind(x)}")


def check_softcap(softcap: float, softmax_scale: float) -> float:
    """Check the cap of the scores; return it as a float."""
    if softcap.__class__ is not float:
        check_number("softcap", softcap)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be finite and at least 0.0, got {shown(softcap)}")
    if softcap == 0.0:
        return 0.0
    if not FP32_TINY <= softcap <= FACTOR_MAX:
        raise ValueError(
            f"softcap must be 0.0 or from {FP32_TINY:.3g} to {FACTOR_MAX:.3g}, for fp32, "
            f"got {shown(softcap)}"
        )
    if abs(softmax_scale) > FP32_MAX * softcap:
        raise ValueError(
            "softcap must be large enough for softmax_scale / softcap to be finite in fp32, got "
            f"softcap {softcap} and softmax_scale {softmax_scale}"
        )
    return float(softcap) if softcap.__class__ is int else softcap


def check_flag(name: str, flag: Any) -> bool:
    """Check that an argument is a bool, Python's or NumPy's; return it as Python's."""
    if not is_flag(flag):
        raise TypeError(f"{name} must be a bool, got {kind(flag)}")
    return bool(flag)


def is_flag(x: Any) -> bool:
    """Return whether an argument is a bool, Python's or NumPy's, which need not be installed."""
    return isinstance(x, bool) or (type(x).__module__, type(x).__name__.rstrip("_")) == _NUMPY_BOOL


def check_window(window_size: tuple[int | None, int | None]) -> tuple[int, int]:
    """Check a window; return it with sizes clamped to ``MAX_WINDOW``, and -1 for None."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(
            f"window_size must be a tuple of two ints, got {shown(window_size)}; (left, right) are "
            "the keys seen before and after a query's own, so that (W - 1, 0) shows W keys"
        )
    left, right = (-1 if side is None else side for side in window_size)
    if not (is_int(left) and is_int(right)):
        raise TypeError(f"window_size must be a tuple of two ints, got {shown(window_size)}")
    if left < -1 or right < -1:
        raise ValueError(f"window_size must hold -1 or numbers from 0 up, got {shown(window_size)}")
    left = left if left < MAX_WINDOW else MAX_WINDOW
    right = right if right < MAX_WINDOW else MAX_WINDOW
    return left, right


def is_int(x: Any) -> bool:
    """Return whether an argument is an integer and not a bool."""
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def shown(x: Any) -> str:
    """Return an argument as text; Python does not write integers of thousands of digits."""
    if x.__class__ is tuple:
        return f"({', '.join(map(shown, x))}{',' * (len(x) == 1)})"
    if isinstance(x, str):
        return repr(x)
    return f"an int of {x.bit_length()} bits" if x.__class__ is int and abs(x) >> 256 else str(x)


def kind(x: Any) -> str:
    """Return the name of a type, for a message."""
    return type(x).__name__


def check_offset_values(
    name: str, offsets: list[int], tokens: int, max_name: str, max_seqlen: int
) -> None:
    """Check that offsets do not decrease, stay within the tokens, and give no too long sequence."""
    last = offsets[0]
    for i, offset in enumerate(offsets):
        if not 0 <= offset <= tokens:
            raise ValueError(
                f"{name}[{i}] must be from 0 to the number of tokens, {tokens}, got {offset}"
            )
        if offset < last:
            raise ValueError(f"{name}[{i}] must be at least {name}[{i - 1}], {last}, got {offset}")
        if offset - last > max_seqlen:
            raise ValueError(
                f"{name}[{i}] must be at most {max_name}, {max_seqlen}, beyond {name}[{i - 1}], "
                f"{last}, got {offset}"
            )
        last = offset


def on_one_device(operator: Callable[..., R], elsewhere: Collection[int] = ()) -> Callable[..., R]:
    """Return a GPU's operator that raises if its tensors are not all on one device.

    PyTorch runs the operator if any tensor is on a GPU, and kernels take addresses. The public
    functions check each argument; this check is for direct calls of ``torch.ops``. ``elsewhere``
    has the positions of arguments that the host reads, which are not compared.
    """

    @functools.wraps(operator)
    def checked(*arguments: Any) -> R:
        own = [x for i, x in enumerate(arguments) if i not in elsewhere]
        several = [x for x in own if isinstance(x, (list, tuple))]
        tensors = [x for xs in (own, *several) for x in xs if isinstance(x, Tensor)]
        devices = dict.fromkeys(x.device for x in tensors)
        if len(devices) > 1:
            raise ValueError(f"tensors must be on one device, got {', '.join(map(str, devices))}")
        return operator(*arguments)

    return checked
