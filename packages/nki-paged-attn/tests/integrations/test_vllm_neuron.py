"""The functions that vllm-neuron calls, on the CPU and on a fake device."""

from __future__ import annotations

import numpy as np
import pytest
from nki_paged_attn import Buckets, paged_attention_reference
from nki_paged_attn._paged import devices

from .._cases import make_case
from .._devices import device as device

torch = pytest.importorskip("torch")
vllm_neuron = pytest.importorskip("nki_paged_attn.integrations.vllm_neuron")
SINKS = np.linspace(-1, 1, 4).astype(np.float32)


def make_step(queries, contexts, padding=3, dtype=torch.float32, **options):
    """Return the arguments of a step: caches without the new tokens, and slots for them."""
    case = make_case(
        queries, [c + n for c, n in zip(contexts, queries, strict=True)], head_dim=16, seed=3
    )
    tokens = sum(queries)
    slots = np.full(tokens + padding, -1)
    at = 0
    for row, (count, context) in enumerate(zip(queries, contexts, strict=True)):
        place = context + np.arange(count)
        slots[at : at + count] = case.block_table[row, place // 16] * 16 + place % 16
        at += count

    def padded(x):
        return torch.from_numpy(np.concatenate([x, np.full_like(x[:padding], 7.0)])).to(dtype)

    tensors = [padded(x) for x in (case.q, case.k, case.v)]
    tensors += [torch.from_numpy(x.copy()).to(dtype) for x in case.kv_cache]
    step = vllm_neuron.prepare(
        queries,
        [c + n for c, n in zip(contexts, queries, strict=True)],
        case.block_table,
        heads=4,
        kv_heads=2,
        head_dim=16,
        block_size=16,
        num_blocks=case.kv_cache.shape[1],
        tokens=tokens + padding,
        dtype=dtype,
        device="cpu",
        **options,
    )
    for name in ("packed_keys", "fused_write", "target", "return_lse"):
        options.pop(name, None)
    exact, lse = paged_attention_reference(
        case.q, case.k, case.v, case.kv_cache, case.block_table, queries, contexts, **options
    )
    exact = exact if not step.options.has_lse else (exact, lse)
    return step, [*tensors, torch.from_numpy(slots)], exact


FEATURES = [
    {}, {"window": 37}, {"softcap": 1.5, "scale": 2.0}, {"sinks": SINKS},
    {"k_scale": [0.5, 2.0], "v_scale": 3.0}, {"window": 5, "sinks": SINKS},
]  # fmt: skip
BATCH = ([20, 1, 0, 70, 1, 3], [100, 300, 5, 3, 0, 4500])


@pytest.mark.parametrize("options", FEATURES, ids=lambda o: " ".join(o) or "plain")
def test_on_the_cpu_pytorch_computes(options):
    step, tensors, exact = make_step(*BATCH, **options)
    out = vllm_neuron.paged_attention(*tensors, step)
    np.testing.assert_allclose(out[:95].numpy(), exact, atol=1e-5)
    assert (out[95:] == 0).all()


@pytest.mark.parametrize("options", FEATURES, ids=lambda o: " ".join(o) or "plain")
def test_on_a_device_the_kernel_computes(device, options):
    step, tensors, exact = make_step(*BATCH, **options)
    before = list(device.crossed)
    out = vllm_neuron.paged_attention(*tensors, step)
    np.testing.assert_allclose(out[:95].numpy(), exact, atol=1e-5)
    assert (out[95:] == 0).all()
    # a layer puts nothing on the device
    assert device.crossed == before
    caches = device.calls[0][1]["k_cache"], device.calls[0][1]["v_cache"]
    assert [x.data_ptr() for x in caches] == [x.data_ptr() for x in tensors[3:5]]


@pytest.mark.parametrize(
    ("queries", "contexts"), [([200], [1100]), ([129, 1], [1100, 1100]), ([1100], [40])], ids=str
)
def test_a_device_and_long_chunks(device, queries, contexts):
    step, tensors, exact = make_step(queries, contexts)
    out = vllm_neuron.paged_attention(*tensors, step)
    np.testing.assert_allclose(out[: len(exact)].numpy(), exact, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4100, 5000])
def test_new_tokens_behind_whole_parts(device, window):
    """Cached ones, which a part of 4096 keys does not hold: they lie in the chunk behind it."""
    step, tensors, exact = make_step([20, 32, 9], [4092, 8190, 4096], window=window)
    out = vllm_neuron.paged_attention(*tensors, step)
    np.testing.assert_allclose(out[: len(exact)].numpy(), exact, atol=1e-5)


def test_unused_blocks_and_what_no_token_sees_may_hold_anything(device):
    step, tensors, exact = make_step(*BATCH, window=60)
    for cache in tensors[3:5]:
        written = cache.clone()
        vllm_neuron.write_cache(tensors[1], written, tensors[5])
        # slots that neither a context nor a new token reaches
        used = np.zeros(written.shape[0] * 16, bool)
        table, ends = step.batch.table, step.batch.context_lens + step.batch.query_lens
        for row, end in enumerate(ends):
            place = np.arange(end)
            used[table[row, place // 16] * 16 + place % 16] = True
        free = torch.from_numpy(~used.reshape(-1, 16))
        cache.transpose(1, 2)[free] = float("nan")
    out = vllm_neuron.paged_attention(*tensors, step)
    np.testing.assert_allclose(out[:95].numpy(), exact, atol=1e-5)


@pytest.mark.parametrize("options", FEATURES, ids=lambda o: " ".join(o) or "plain")
@pytest.mark.parametrize("place", ["cpu", "neuron"])
def test_the_lse(place, options, request):
    if place == "neuron":
        request.getfixturevalue("device")
    step, tensors, (exact, exact_lse) = make_step(*BATCH, return_lse=True, **options)
    out, lse = vllm_neuron.paged_attention(*tensors, step)
    np.testing.assert_allclose(out[:95].numpy(), exact, atol=1e-5)
    assert lse.dtype == torch.float32
    assert lse.shape == (4, 98)
    np.testing.assert_allclose(lse[:, :95].numpy(), exact_lse, atol=1e-5)
    # padding sees the sink alone
    np.testing.assert_array_equal(lse[:, 97], options.get("sinks", np.full(4, -np.inf)))


def test_a_scale_of_vllm_neuron_is_the_reciprocal_of_ours():
    """Its models multiply by ``k_scale`` when they write; here tokens are divided by it."""
    theirs = torch.tensor([0.25, 8.0])
    step, tensors, _ = make_step(*BATCH, k_scale=(1 / theirs).tolist())
    key, slots = tensors[1], tensors[5]
    cache = tensors[3].clone()
    vllm_neuron.paged_attention(*tensors, step)
    kept = slots >= 0
    cache[slots[kept] // 16, :, slots[kept] % 16] = key[kept] * theirs[:, None]
    assert torch.equal(tensors[3], cache)


LARGEST = {("float8_e4m3fn", "trn2"): 240, ("float8_e4m3fn", "trn3"): 448}


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_writing_into_slots(dtype, target):
    cache = torch.zeros(3, 2, 4, 8).to(getattr(torch, dtype))
    x = torch.randn(5, 2, 8) * 300
    vllm_neuron.write_cache(x, cache, torch.tensor([5, -1, 0, 11, -1]), target=target)
    expected = torch.zeros(3, 2, 4, 8)
    most = LARGEST.get((dtype, target), torch.finfo(cache.dtype).max)
    for row, slot in ((0, 5), (2, 0), (3, 11)):
        expected[slot // 4, :, slot % 4] = x[row].clamp(-most, most)
    assert torch.equal(cache.float(), expected.to(cache.dtype).float())


def test_without_a_slot_nothing_is_written():
    cache = torch.ones(2, 1, 4, 8)
    vllm_neuron.write_cache(torch.zeros(3, 1, 8), cache, torch.tensor([-1, -1, -1]))
    assert (cache == 1).all()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"seq_lens": [2, 9]}, ValueError, r"seq_lens\[0\] must count the 3 new tokens, got 2"),
        ({"block_tables": [[-1], [1]]}, ValueError, r"block_tables\[0, 0\] must be from 0 to 3"),
        ({"dtype": torch.int8}, TypeError, "dtype must be one of float16, bfloat16, float32"),
        ({"device": "meta"}, ValueError, "device must be Neuron's or the CPU, got meta"),
        (
            {"seq_lens": [5]},
            ValueError,
            r"seq_lens must be as long as query_lens, \[2\], got \[1\]",
        ),
        ({"head_dim": 300}, ValueError, "head_dim must be from 1 to 256, got 300"),
        ({"num_blocks": 0}, ValueError, "num_blocks must be at least 1, got 0"),
        ({"tokens": 3}, ValueError, "query_lens must sum to at most q's 3 rows, got 4"),
        ({"tokens": "4"}, TypeError, "tokens must be an integer, got str"),
        ({"tokens": None}, TypeError, "tokens must be an integer, got NoneType"),
        ({"block_tables": [[0, 1], [2]]}, ValueError, "block_tables must have rows of one length"),
        ({"buckets": 3}, TypeError, "buckets must be Buckets or None, got int"),
        ({"buckets": Buckets(context=8)}, ValueError, "buckets.context must hold the call's 9"),
        ({"fused_write": "no"}, TypeError, "fused_write must be True or False, got 'no'"),
        (
            {"fused_write": True, "block_tables": [[0], [0]]},
            ValueError,
            "block_tables must give new tokens blocks of their own, got 0 in sequences 0 and 1",
        ),
    ],
)
def test_messages(changes, error, text):
    arguments = {
        "query_lens": [3, 1],
        "seq_lens": [5, 9],
        "block_tables": [[0], [1]],
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "block_size": 16,
        "num_blocks": 4,
        "tokens": 4,
        "dtype": torch.float32,
        "device": "cpu",
    }
    with pytest.raises(error, match=text):
        vllm_neuron.prepare(**arguments | changes)


@pytest.mark.parametrize(
    ("place", "change", "error", "text"),
    [
        (0, lambda x: x[:5], ValueError, r"query must be \[6, 4, 16\] in this step, got \[5, "),
        (1, lambda x: x[..., :8], ValueError, r"key must be \[6, 2, 16\] in this step"),
        (2, lambda x: x.half(), TypeError, "value must be torch.float32 in this step, got .*16"),
        (3, lambda x: x[:, :1], ValueError, r"k_cache must be \[\d+, 2, 16, 16\] in this step"),
        (4, lambda x: x[:-1], ValueError, r"v_cache must be \[\d+, 2, 16, 16\] in this step"),
        (4, lambda x: x.int(), TypeError, "v_cache must be one of .*, got torch.int32"),
        (4, lambda x: x.half(), TypeError, "v_cache must be .*, the same in both, got .*16"),
        (5, lambda x: x[:5], ValueError, r"slot_mapping must be \[6\] in this step, got \[5\]"),
        (5, lambda x: x.float(), TypeError, "slot_mapping must be int32 or int64"),
        (5, lambda x: x.to("meta"), ValueError, "slot_mapping must be on cpu, got meta"),
        (5, lambda x: x + 10_000, ValueError, r"slot_mapping must be below \d+, got 10"),
        (
            5,
            lambda x: x * 0 + 7,
            ValueError,
            "slot_mapping must give each token its own slot, got 7",
        ),
        (0, lambda x: x.numpy(), TypeError, "query must be a tensor, got ndarray"),
        (5, lambda x: None, TypeError, "slot_mapping must be a tensor, got NoneType"),
    ],
)
def test_tensors_must_fit_the_step(place, change, error, text):
    step, tensors, _ = make_step([3], [5])
    tensors[place] = change(tensors[place])
    with pytest.raises(error, match=text):
        vllm_neuron.paged_attention(*tensors, step)


@pytest.mark.parametrize(
    ("place", "other", "text"),
    [
        (4, 3, "k_cache must not share memory with v_cache, for it is written"),
        (0, 3, "k_cache must not share memory with query, for it is written"),
        (2, 4, "v_cache must not share memory with value, for it is written"),
    ],
)
def test_caches_share_no_memory(place, other, text):
    step, tensors, _ = make_step([3], [5])
    before = tensors[other].clone()
    shared = tensors[other].flatten()[: tensors[place].numel()]
    tensors[place] = shared.view_as(tensors[place])
    with pytest.raises(ValueError, match=text):
        vllm_neuron.paged_attention(*tensors, step)
    assert torch.equal(tensors[other], before)


def test_a_step_is_what_prepare_returns():
    _, tensors, _ = make_step([3], [5])
    with pytest.raises(TypeError, match="step must be what prepare returns, got NoneType"):
        vllm_neuron.paged_attention(*tensors, None)


def test_tensors_of_a_device_are_known():
    assert isinstance(devices.TENSORS, tuple)


@pytest.mark.parametrize("place", ["cpu", "neuron"])
def test_packed_keys(place, request):
    """Written and read: as with the same cache in the plain layout, bit for bit."""
    if place == "neuron":
        request.getfixturevalue("device")
    fp8 = torch.float8_e4m3fn
    outs, caches = [], []
    for packed in (False, True):
        step, tensors, _ = make_step(*BATCH, packed_keys=packed)
        tensors[3:5] = [x.to(fp8) for x in tensors[3:5]]
        if packed:
            pairs = tensors[3].view(torch.uint8).unflatten(2, (-1, 2)).transpose(3, 4).contiguous()
            tensors[3] = pairs.view(fp8)
        outs.append(vllm_neuron.paged_attention(*tensors, step))
        keys = tensors[3].view(torch.uint8)
        caches.append(keys.transpose(3, 4).flatten(2, 3) if packed else keys)
    assert torch.equal(*outs)
    assert torch.equal(*caches)


def test_packed_keys_are_fp8_of_their_shape():
    step, tensors, _ = make_step(*BATCH, packed_keys=True)
    with pytest.raises(ValueError, match=r"k_cache must be .*, 2, 8, 16, 2\] in this step, got"):
        vllm_neuron.paged_attention(*tensors, step)
    tensors[3] = tensors[3].reshape(*tensors[3].shape[:2], 8, 16, 2)
    with pytest.raises(TypeError, match="k_cache must be in FP8 for packed_keys, got"):
        vllm_neuron.paged_attention(*tensors, step)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("target", "most"), [("trn2", 240), ("trn3", 448)])
def test_a_step_writes_fp8_for_its_target(device, target, most, fused):
    """Of 1000, torch's own limit would leave bits that trn2 reads as NaN."""
    step, tensors, _ = make_step(*BATCH, fused_write=fused, target=target)
    tensors[1] = 1000 * tensors[1]
    tensors[3:5] = [x.to(torch.float8_e4m3fn) for x in tensors[3:5]]
    vllm_neuron.paged_attention(*tensors, step)
    assert tensors[3].float().abs().max() == most


@pytest.mark.parametrize("options", FEATURES, ids=lambda o: " ".join(o) or "plain")
@pytest.mark.parametrize("programs", ["1", "2"])
def test_the_kernel_writes_the_cache(device, options, programs, monkeypatch):
    """The same caches as without, in one call of the kernel, and nothing that crosses for it."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", programs)
    caches = []
    for fused in (False, True):
        step, tensors, exact = make_step(*BATCH, fused_write=fused, **options)
        before = list(device.crossed)
        out = vllm_neuron.paged_attention(*tensors, step)
        np.testing.assert_allclose(out[:95].numpy(), exact, atol=1e-5)
        assert (out[95:] == 0).all()
        assert device.crossed == before
        caches.append(tensors[3:5])
    for got, expected in zip(*caches, strict=True):
        torch.testing.assert_close(got, expected, atol=0, rtol=2**-22)


def test_the_kernel_writes_no_packed_keys():
    with pytest.raises(NotImplementedError, match="fused_write writes whole tokens, got packed_"):
        make_step(*BATCH, fused_write=True, packed_keys=True)
