"""Mistakes in attention calls: each gives one sentence that names the argument, the rule and what to do."""

import re

import pytest

torch = pytest.importorskip("torch")

from planned import Planned, layer  # noqa: E402

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402

E4M3 = torch.float8_e4m3fn
CU = torch.tensor([0, 5, 12], dtype=torch.int32)


def make(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows(n_kv=2):
    return [torch.full((n_kv,), 0.02) for _ in range(3)]


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def dense(**changed):
    given = {"q": make(2, 12, 4, 32), "k": make(2, 12, 2, 32), "v": make(2, 12, 2, 32), "plan": rows()}
    return fp8.attention(**(given | changed))


def drop_in(**changed):
    given = {"query": make(2, 4, 12, 32), "key": make(2, 2, 12, 32), "value": make(2, 2, 12, 32), "enable_gqa": True}
    return fp8.scaled_dot_product_attention(**(given | {"plan": rows()} | changed))


def flash(**changed):
    given = {"q": make(2, 12, 4, 32), "k": make(2, 12, 2, 32), "v": make(2, 12, 2, 32), "plan": rows()}
    return fp8.flash_attn_func(**(given | changed))


def packed(**changed):
    given = {"q": make(12, 4, 32), "k": make(12, 2, 32), "v": make(12, 2, 32), "cu_seqlens_q": CU, "cu_seqlens_k": CU}
    return fp8.flash_attn_varlen_func(**(given | {"max_seqlen_q": 7, "max_seqlen_k": 7, "plan": rows()} | changed))


def cached(**changed):
    given = {"q": make(2, 1, 4, 32), "k_cache": make(2, 16, 2, 32), "v_cache": make(2, 16, 2, 32)}
    return fp8.flash_attn_with_kvcache(**(given | {"cache_seqlens": ints(7, 9), "plan": rows()} | changed))


def new(**changed):
    return cached(**({"k": make(2, 1, 2, 32), "v": make(2, 1, 2, 32)} | changed))


def paged(**changed):
    pages = {"k_cache": make(5, 16, 2, 32), "v_cache": make(5, 16, 2, 32), "block_table": ints(0, 1, 2, 3).view(2, 2)}
    return cached(**(pages | {"cache_seqlens": ints(17, 20)} | changed))


def stale():
    plan = Planned([layer()]).layers[0]
    plan.stale = True
    return plan


def kept(**options):
    """A plan whose runtime stays."""
    KEPT.append(Planned([layer(**options)]))
    return KEPT[-1].layers[0]


KEPT = []
Argument, Mismatch, Unsupported = sigmascale.ArgumentError, sigmascale.MismatchError, sigmascale.UnsupportedError
Other = sigmascale.SigmascaleError
# A name, the mistake, the exception, and what its sentence says: the argument, the rule and the remedy.
MISTAKES = [
    ("type", lambda: dense(q=make(2, 12, 4, 32, dtype=torch.float64)), Argument, "q has type torch.float64.*bfloat16"),
    ("types", lambda: dense(k=make(2, 12, 2, 32, dtype=torch.float16)), Argument, "k has type torch.float16.*one type"),
    ("device", lambda: dense(k=make(2, 12, 2, 32).to("meta")), Argument, "k is on meta and q on cpu.*one device"),
    ("no tensor", lambda: dense(v=None), Argument, "v must be.*not NoneType"),
    (
        "dimensions",
        lambda: dense(q=make(12, 4, 32)),
        Argument,
        r"q must be \(batch, seq, heads, d_head\), not \(12, 4, 32\)",
    ),
    ("stride", lambda: dense(q=make(2, 12, 32, 4).transpose(2, 3)), Argument, "q has stride 4.*contiguous"),
    ("no keys", lambda: dense(k=make(2, 0, 2, 32), v=make(2, 0, 2, 32)), Argument, "nothing to attend"),
    ("lengths", lambda: dense(v=make(2, 11, 2, 32)), Mismatch, "k and v must have the same length"),
    ("head dimensions", lambda: dense(k=make(2, 12, 2, 64)), Mismatch, "q and k must have the same d_head"),
    (
        "batches",
        lambda: dense(k=make(3, 12, 2, 32), v=make(3, 12, 2, 32)),
        Mismatch,
        "q and k must have the same batch",
    ),
    ("heads", lambda: dense(q=make(2, 12, 3, 32)), Mismatch, "3 query heads are not a multiple of 2"),
    ("no plan", lambda: dense(plan=None), TypeError, "plan must be a layer of a Runtime.*not None"),
    (
        "a whole runtime",
        lambda: dense(plan=object()),
        TypeError,
        r"plan must be a layer of a Runtime.*runtime.layers\[i\]",
    ),
    ("two descales", lambda: dense(plan=rows()[:2]), TypeError, "plan must be.*three descales"),
    ("descales of other heads", lambda: dense(plan=rows(3)), Mismatch, r"q descale has shape \(3,\): \(2,\)"),
    (
        "descales in f64",
        lambda: dense(plan=[x.double() for x in rows()]),
        Argument,
        "descale is torch.float64.*float32",
    ),
    ("descales as numbers", lambda: dense(plan=[0.1, 0.1, 0.1]), TypeError, "q descale must be a tensor, not float"),
    (
        "another model",
        lambda: dense(plan=kept(heads=(8, 2))),
        Mismatch,
        "plan of layer has 8 query.*the call has 4.*plan of this layer",
    ),
    ("another head dimension", lambda: dense(plan=kept(d=64)), Mismatch, "KV heads of 64.*of 32"),
    ("stale", lambda: dense(plan=stale()), Other, "scales of layer|runtime of this plan is gone"),
    (
        "a runtime that is gone",
        lambda: dense(plan=Planned([layer()]).layers[0]),
        Other,
        "runtime of this plan is gone: keep",
    ),
    ("softmax scale", lambda: dense(softmax_scale=0.0), Argument, "softmax_scale"),
    ("soft-cap", lambda: dense(softcap=-1.0), Argument, "softcap"),
    ("window", lambda: dense(window=(1, 2, 3)), Argument, r"window \(1, 2, 3\) must be two whole numbers"),
    ("window of one number", lambda: dense(window=7), Argument, "window 7 must be two whole numbers"),
    ("sinks", lambda: dense(sinks=torch.zeros(3)), Mismatch, r"sinks have shape \(3,\): \(4,\)"),
    ("sinks as numbers", lambda: dense(sinks=[0.0] * 4), TypeError, "sinks must be a tensor.*not list"),
    ("backend", lambda: dense(backend="flash"), Argument, "backend 'flash' is not one of auto"),
    ("fallback", lambda: dense(fallback="fp16"), Argument, "fallback 'fp16' must be 'bf16'"),
    ("accumulator", lambda: dense(accumulator="fp8-100"), Argument, "accumulator 'fp8-100' must be"),
    (
        "head dimension of no kernel",
        lambda: dense(q=make(2, 12, 4, 20), k=make(2, 12, 2, 20), v=make(2, 12, 2, 20), backend="native"),
        Argument,
        "d_head 20 must be a multiple of 8 from 16 to 576",
    ),  # fmt: skip
    ("mask and is_causal", lambda: drop_in(attn_mask=torch.ones(12, 12).bool(), is_causal=True), Argument, "not both"),
    (
        "mask of another shape",
        lambda: drop_in(attn_mask=torch.ones(12, 11).bool()),
        Unsupported,
        r"mask of shape.*12 queries",
    ),
    ("mask of integers", lambda: drop_in(attn_mask=torch.ones(12, 12).int()), Unsupported, "give it as bool"),
    ("mask that is no tensor", lambda: drop_in(attn_mask="causal"), TypeError, "attn_mask must be a tensor"),
    ("grouped heads", lambda: drop_in(enable_gqa=False), Argument, "set enable_gqa=True"),
    ("dropout", lambda: drop_in(dropout_p=0.1), Unsupported, "dropout 0.1.*fallback='bf16'"),
    ("alibi", lambda: flash(alibi_slopes=torch.ones(4)), Unsupported, "alibi_slopes is not supported.*mask"),
    ("descales of FlashAttention-3", lambda: flash(q_descale=torch.ones(2, 2)), Unsupported, "q_descale.*plan"),
    ("unknown keyword", lambda: flash(softmax=1.0), TypeError, "flash_attn_func.*'softmax'"),
    ("window_size", lambda: flash(window_size=None), Argument, "window_size None must be two whole numbers"),
    (
        "deterministic",
        lambda: flash(deterministic=True),
        Unsupported,
        "deterministic=True.*use_deterministic_algorithms",
    ),
    ("packed dimensions", lambda: packed(q=make(1, 12, 4, 32)), Argument, r"q must be \(tokens, heads, d_head\)"),
    (
        "places that decrease",
        lambda: packed(cu_seqlens_q=ints(0, 8, 5)),
        Argument,
        "cu_seqlens_q decreases from 8 to 5",
    ),
    (
        "places that begin late",
        lambda: packed(cu_seqlens_k=ints(2, 5, 12)),
        Argument,
        "cu_seqlens_k begins with 2.*with 0",
    ),
    (
        "places past the tokens",
        lambda: packed(cu_seqlens_k=ints(0, 5, 13)),
        Mismatch,
        "cu_seqlens_k ends with 13, but k has 12",
    ),
    ("places in float", lambda: packed(cu_seqlens_q=CU.float()), Argument, "cu_seqlens_q is torch.float32.*int32"),
    ("places of fewer sequences", lambda: packed(cu_seqlens_q=ints(0, 12)), Mismatch, "2 and 3 entries.*one more"),
    ("places on another device", lambda: packed(cu_seqlens_q=CU.to("meta")), Argument, "cu_seqlens_q is on meta"),
    ("max_seqlen too small", lambda: packed(max_seqlen_q=5), Argument, "max_seqlen_q is 5.*7 tokens"),
    (
        "max_seqlen on the device",
        lambda: packed(max_seqlen_k=torch.tensor(7)),
        Argument,
        "max_seqlen_k is a tensor.*host",
    ),
    ("keys used", lambda: packed(seqused_k=ints(5, 9)), Argument, "seqused_k says 9 keys of sequence 1, which has 7"),
    ("keys and values", lambda: packed(v=make(11, 2, 32)), Mismatch, "k has 12 tokens and v 11"),
    (
        "block table of packed keys",
        lambda: packed(block_table=ints(0, 1).view(2, 1)),
        Argument,
        "k_cache.*four dimensions",
    ),
    ("keys without values", lambda: cached(k=make(2, 1, 2, 32)), Argument, "k and v are given together"),
    ("new keys without lengths", lambda: new(cache_seqlens=None), Argument, "need cache_seqlens"),
    ("a full cache", lambda: new(cache_seqlens=ints(7, 16)), Mismatch, "after 16 do not fit a cache of 16.*0 to 15"),
    ("negative lengths", lambda: cached(cache_seqlens=-1), Mismatch, "cache_seqlens must be from 0 to 16"),
    ("lengths as a list", lambda: cached(cache_seqlens=[7, 9]), Argument, "cache_seqlens is list: give an int or"),
    ("lengths of another batch", lambda: cached(cache_seqlens=ints(7, 9, 3)), Mismatch, "3 entries for a batch of 2"),
    (
        "a cache of another batch",
        lambda: cached(k_cache=make(3, 16, 2, 32), v_cache=make(3, 16, 2, 32)),
        Mismatch,
        "k_cache has 3 rows for a batch of 2.*cache_batch_idx",
    ),  # fmt: skip
    ("a cache of three dimensions", lambda: cached(k_cache=make(2, 16, 64)), Argument, "k_cache is .*four dimensions"),
    (
        "caches of two types",
        lambda: cached(v_cache=make(2, 16, 2, 32).to(E4M3)),
        Argument,
        "k_cache has type.*one type",
    ),
    ("caches of two shapes", lambda: cached(v_cache=make(2, 15, 2, 32)), Mismatch, "k_cache has shape.*v_cache"),
    (
        "new keys of other heads",
        lambda: new(k=make(2, 1, 4, 32)),
        Mismatch,
        r"k has shape \(2, 1, 4, 32\): \(2, new keys, 2, 32\)",
    ),
    (
        "gradients of a cache",
        lambda: cached(q=make(2, 1, 4, 32).requires_grad_()),
        Unsupported,
        "q requires gradients.*no_grad",
    ),
    (
        "a page that is not there",
        lambda: paged(block_table=ints(0, 1, 2, 5).view(2, 2)),
        Argument,
        "names page 5 of a cache with 5: give numbers from 0 to 4",
    ),
    (
        "a block table of one dimension",
        lambda: paged(block_table=ints(0, 1)),
        Argument,
        "block_table is .*2 dimensions",
    ),
    (
        "a block table in float",
        lambda: paged(block_table=torch.zeros(2, 2)),
        Argument,
        "block_table is torch.float32.*int32",
    ),
    (
        "a block table of another batch",
        lambda: paged(block_table=ints(0, 1).view(1, 2)),
        Mismatch,
        "1 rows for a batch of 2",
    ),
    ("two places", lambda: paged(cache_batch_idx=ints(0, 1)), Unsupported, "cache_batch_idx and block_table"),
    (
        "rotation of nothing",
        lambda: cached(rotary_cos=torch.ones(16, 8), rotary_sin=torch.ones(16, 8)),
        Argument,
        "give k and v",
    ),
    ("rotation without sines", lambda: new(rotary_cos=torch.ones(16, 8)), Argument, "rotary_sin must be"),
    (
        "rotation of too few positions",
        lambda: new(rotary_cos=torch.ones(9, 8), rotary_sin=torch.ones(9, 8)),
        Mismatch,
        "9 positions for a cache of 16",
    ),  # fmt: skip
    (
        "left padding of another batch",
        lambda: cached(cache_leftpad=ints(1)),
        Mismatch,
        r"cache_leftpad has shape \(1,\)",
    ),
    (
        "an unknown policy",
        lambda: fp8.attach(torch.nn.Linear(2, 2), policy="static"),
        Argument,
        "policy 'static' is not one of",
    ),
    (
        "a model without a config",
        lambda: fp8.attach(torch.nn.Linear(2, 2)),
        Unsupported,
        "no Hugging Face config.*layers=",
    ),
    ("no model", lambda: fp8.attach(None), TypeError, "model must be a torch.nn.Module"),
    (
        "telemetry",
        lambda: attached(telemetry="sometimes"),
        Argument,
        "telemetry 'sometimes' must be 'full', 'off' or a number",
    ),
    ("telemetry of no step", lambda: attached(telemetry=0), Argument, "telemetry 0 must be"),
    (
        "telemetry of a policy that plans from it",
        lambda: attached(telemetry=4, policy="delayed-te"),
        Unsupported,
        "plans from the statistics of every step.*'full'",
    ),  # fmt: skip
    ("a padding side", lambda: fp8.register(padding="left"), Argument, "padding 'left' must be 'right'"),
]


def attached(**options):
    weight = make(128, 64, dtype=torch.float32)
    one = fp8.Layer(q=weight, k=weight[:64], v=weight[:64], n_q_heads=4, n_kv_heads=2)
    return fp8.attach(torch.nn.Linear(2, 2), layers=[one], **options)


@pytest.mark.parametrize("name", [mistake[0] for mistake in MISTAKES])
def test_a_mistake_is_named_with_its_remedy(name):
    mistake, kind, text = next(rest for first, *rest in MISTAKES if first == name)
    with pytest.raises(kind) as raised:
        mistake()
    sentence = str(raised.value)
    assert re.search(text, sentence), sentence
    # One sentence, and no exception of another library inside.
    assert "\n" not in sentence and len(sentence) < 320


def test_the_calls_without_mistakes_run():
    for call in (dense, drop_in, flash, packed, cached, new, paged):
        assert not torch.isnan(call()).any()
    # Whole numbers of 64 bits, as PyTorch makes them, are taken.
    table = ints(0, 1, 2, 3, dtype=torch.int64).view(2, 2)
    assert torch.equal(paged(block_table=table, cache_seqlens=ints(17, 20, dtype=torch.int64)), paged())
    assert torch.equal(packed(cu_seqlens_q=CU.long()), packed())


def test_an_empty_cache_gives_zeros():
    for lengths in (0, ints(0, 0)):
        out, lse = cached(cache_seqlens=lengths, return_softmax_lse=True)
        assert not out.any() and (lse == -torch.inf).all()


def test_a_layer_that_is_not_there_is_an_index_error():
    with pytest.raises(IndexError):
        attached().layers[1]
