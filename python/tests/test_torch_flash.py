"""The functions of ``flash_attn``, argument by argument: same order, same defaults, same results; every argument is
taken or refused."""

import inspect

import pytest

torch = pytest.importorskip("torch")

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402

# Of flash_attn 2 (flash_attn/flash_attn_interface.py at 005300258a22). REQUIRED: no default.
REQUIRED = inspect.Parameter.empty
COMMON = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
SIGNATURES = {
    "flash_attn_func": dict.fromkeys("qkv", REQUIRED) | COMMON,
    "flash_attn_varlen_func": dict.fromkeys(
        ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"], REQUIRED
    )
    | COMMON
    | {"block_table": None},
    "flash_attn_with_kvcache": {
        "q": REQUIRED,
        "k_cache": REQUIRED,
        "v_cache": REQUIRED,
        "k": None,
        "v": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "cache_seqlens": None,
        "cache_batch_idx": None,
        "cache_leftpad": None,
        "block_table": None,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
}
# Keywords of FlashAttention-3 (hopper/flash_attn_interface.py at 01afd16d248c) that the functions above do not have.
OTHERS = {
    "flash_attn_func": {"qv": 1, "q_descale": 1, "k_descale": 1, "v_descale": 1, "attention_chunk": 4},
    "flash_attn_varlen_func": {
        "seqused_q": 1,
        "qv": 1,
        "q_descale": 1,
        "k_descale": 1,
        "v_descale": 1,
        "attention_chunk": 4,
    },
    "flash_attn_with_kvcache": {
        "qv": 1,
        "rotary_seqlens": 1,
        "q_descale": 1,
        "k_descale": 1,
        "v_descale": 1,
        "attention_chunk": 4,
    },
}
SCHEDULES = {"num_splits": 1, "pack_gqa": True, "sm_margin": 8}


def make(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


PLAN = [torch.full((2,), 0.02) for _ in range(3)]
CU = torch.tensor([0, 5, 12], dtype=torch.int32)


def given(function):
    """Arguments of a call with new keys, by name."""
    if function == "flash_attn_func":
        return {"q": make(2, 12, 4, 32), "k": make(2, 12, 2, 32, seed=1), "v": make(2, 12, 2, 32, seed=2)}
    if function == "flash_attn_varlen_func":
        places = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 7, "max_seqlen_k": 7}
        return {"q": make(12, 4, 32), "k": make(12, 2, 32, seed=1), "v": make(12, 2, 32, seed=2)} | places
    caches = {"k_cache": make(2, 16, 2, 32, seed=1), "v_cache": make(2, 16, 2, 32, seed=2)}
    fresh = {"k": make(2, 3, 2, 32, seed=3), "v": make(2, 3, 2, 32, seed=4)}
    return {"q": make(2, 3, 4, 32)} | caches | fresh | {"cache_seqlens": torch.tensor([7, 9], dtype=torch.int32)}


def run(function, **changed):
    copied = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in (given(function) | changed).items()}
    return getattr(fp8, function)(**copied, plan=PLAN)


@pytest.mark.parametrize("function", SIGNATURES)
def test_positions_and_defaults_are_those_of_the_package(function):
    parameters = inspect.signature(getattr(fp8, function)).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(SIGNATURES[function].items())
    # All that is added is by keyword.
    added = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert added == {"plan", "sinks", "backend", "accumulator", "fallback"} | (
        {"seqused_k"} if function == "flash_attn_varlen_func" else set()
    )


@pytest.mark.parametrize("function", SIGNATURES)
def test_positional_calls_are_those_by_name(function):
    arguments = given(function)
    values = [arguments.get(name, default) for name, default in SIGNATURES[function].items()]
    copied = [x.clone() if isinstance(x, torch.Tensor) else x for x in values]
    assert torch.equal(getattr(fp8, function)(*copied, plan=PLAN), run(function))


# What to change each argument to, and what that must do: change the result, leave it, or be refused by name.
CHANGES = {
    "dropout_p": (0.1, "refused"),
    "softmax_scale": (0.5, "changed"),
    "causal": (True, "changed"),
    "window_size": ((2, 0), "changed"),
    "softcap": (0.5, "changed"),
    "alibi_slopes": (torch.ones(4), "refused"),
    "deterministic": (True, "refused"),
    "cache_batch_idx": (torch.tensor([1, 0], dtype=torch.int32), "changed"),
    "cache_leftpad": (torch.tensor([2, 3], dtype=torch.int32), "changed"),
    "num_splits": (1, "same"),
    "rotary_interleaved": (False, "same"),
}


@pytest.mark.parametrize("function", SIGNATURES)
def test_every_argument_is_taken_or_refused_by_name(function):
    plain = run(function)
    for name in SIGNATURES[function]:
        if name not in CHANGES:
            continue
        value, effect = CHANGES[name]
        if effect == "refused":
            with pytest.raises(sigmascale.UnsupportedError, match=name.removesuffix("_p")):
                run(function, **{name: value})
        else:
            assert torch.equal(run(function, **{name: value}), plain) == (effect == "same"), name
    left = set(SIGNATURES[function]) - set(CHANGES) - set(given(function))
    assert left <= {"rotary_cos", "rotary_sin", "return_attn_probs", "return_softmax_lse", "block_table"}, left


@pytest.mark.parametrize("function", OTHERS)
def test_keywords_of_flash_attention_3_are_refused_unless_they_ask_for_nothing(function):
    plain = run(function)
    for name, value in OTHERS[function].items():
        nothing = 0 if name == "attention_chunk" else None
        assert torch.equal(run(function, **{name: nothing}), plain)
        with pytest.raises(sigmascale.UnsupportedError, match=name):
            run(function, **{name: value})
    assert torch.equal(run(function, **SCHEDULES), plain)
    with pytest.raises(TypeError, match="'page_size'"):
        run(function, page_size=16)


@pytest.mark.parametrize("function", SIGNATURES)
def test_results_have_the_types_of_the_package(function):
    out = run(function)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16 and out.shape == given(function)["q"].shape
    asked = {"return_softmax_lse": True} if function == "flash_attn_with_kvcache" else {"return_attn_probs": True}
    results = run(function, **asked)
    assert isinstance(results, tuple) and torch.equal(results[0], out)
    q = out.shape
    lse = (q[1], q[0]) if function == "flash_attn_varlen_func" else (q[0], q[2], q[1])
    assert results[1].shape == lse and results[1].dtype == torch.float32
    # The probabilities are not kept.
    assert results[2:] == (() if function == "flash_attn_with_kvcache" else (None,))


def test_operands_in_e4m3_give_an_output_in_bf16():
    from sigmascale.torch import _e4m3

    eight = lambda x: _e4m3.cast(x[None], PLAN[0].expand(1, -1))[0]
    arguments = given("flash_attn_varlen_func")
    plain = run("flash_attn_varlen_func")
    out = run("flash_attn_varlen_func", **{name: eight(arguments[name]) for name in "qkv"})
    assert out.dtype == torch.bfloat16 and torch.equal(out, plain)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_rotation_is_by_the_position_behind_the_cache(interleaved, causal):
    angles = torch.outer(torch.arange(20.0), torch.tensor([1.0, 0.3, 0.1, 0.01]))
    arguments = given("flash_attn_with_kvcache")
    lengths = arguments["cache_seqlens"].tolist()

    def turned(x, place):
        """By complex numbers."""
        x = x.float()
        width = 8
        pairs = (
            x[..., :width].reshape(*x.shape[:-1], 4, 2)
            if interleaved
            else torch.stack(x[..., :width].chunk(2, dim=-1), dim=-1)
        )
        z = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(4), angles[place])
        z = torch.view_as_real(z)
        z = z.flatten(-2) if interleaved else torch.cat([z[..., 0], z[..., 1]], dim=-1)
        return torch.cat([z, x[..., width:]], dim=-1).bfloat16()

    rotated = {"q": arguments["q"].clone(), "k": arguments["k"].clone()}
    for i, length in enumerate(lengths):
        for row in range(3):
            rotated["k"][i, row] = turned(arguments["k"][i, row], length + row)
            # Without a causal mask all queries stand at the first new key.
            rotated["q"][i, row] = turned(arguments["q"][i, row], length + (row if causal else 0))
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": interleaved}
    ours = run("flash_attn_with_kvcache", causal=causal, **tables)
    theirs = run("flash_attn_with_kvcache", causal=causal, **rotated)
    assert float((ours - theirs).float().norm() / theirs.float().norm()) < 0.01


def test_a_cache_may_have_other_rows_than_the_batch():
    arguments = given("flash_attn_with_kvcache")
    wide = [torch.cat([x, x.flip(0)]) for x in (arguments["k_cache"], arguments["v_cache"])]
    order = torch.tensor([3, 1], dtype=torch.int32)
    caches = [x.clone() for x in wide]
    out = fp8.flash_attn_with_kvcache(
        arguments["q"], *caches, arguments["k"], arguments["v"], cache_seqlens=arguments["cache_seqlens"], cache_batch_idx=order,
        plan=PLAN,
    )  # fmt: skip
    plain = [x[order.long()].contiguous() for x in wide]
    expected = run("flash_attn_with_kvcache", k_cache=plain[0], v_cache=plain[1])
    assert torch.equal(out, expected)
    # New keys are in the rows that were named, and in no others.
    assert torch.equal(caches[0][3, 7:10], arguments["k"][0]) and torch.equal(caches[0][[0, 2]], wide[0][[0, 2]])
    # FlashAttention-3's name for the table of pages.
    pages = {"k_cache": wide[0], "v_cache": wide[1]}
    table = torch.tensor([[2], [1]], dtype=torch.int32)
    by_name = [run("flash_attn_with_kvcache", **pages, **{name: table}) for name in ("block_table", "page_table")]
    assert torch.equal(*by_name)


def test_entries_of_a_block_table_behind_a_sequence_may_hold_anything():
    arguments = given("flash_attn_with_kvcache")
    table = torch.tensor([[0, 1_000_000], [1, -7]], dtype=torch.int32)
    out = run("flash_attn_with_kvcache", block_table=table)
    assert torch.equal(out, run("flash_attn_with_kvcache")) and not torch.isnan(out).any()
    assert arguments["k_cache"].shape[1] == 16


def test_a_row_that_the_cache_does_not_have_is_named():
    with pytest.raises(ValueError, match="cache_batch_idx .*2 .*0 to 1"):
        run("flash_attn_with_kvcache", cache_batch_idx=torch.tensor([0, 2], dtype=torch.int32))


def test_packed_queries_over_pages_are_each_sequence_alone():
    arguments = given("flash_attn_with_kvcache")
    caches = [torch.cat([x, x.flip(0)]).reshape(8, 8, 2, 32) for x in (arguments["k_cache"], arguments["v_cache"])]
    # More rows than sequences, and entries behind their ends that name no page.
    table = torch.tensor([[3, 0], [5, -9], [6, 1], [99, 99]], dtype=torch.int32)
    lengths, cu = torch.tensor([11, 5, 16], dtype=torch.int32), torch.tensor([0, 4, 4, 5], dtype=torch.int32)
    q = make(5, 4, 32, seed=9)
    shared = {"causal": True, "plan": PLAN, "return_softmax_lse": True}
    out, lse = fp8.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths, block_table=table, cu_seqlens_q=cu, max_seqlen_q=4, **shared
    )
    assert out.shape == q.shape and lse.shape == (4, 5)
    for sequence, rows in enumerate([slice(0, 4), None, slice(4, 5)]):
        if rows is None:
            continue
        alone, alone_lse = fp8.flash_attn_with_kvcache(
            q[rows][None], *caches, cache_seqlens=lengths[[sequence]], block_table=table[[sequence]], **shared
        )
        assert torch.equal(out[rows], alone[0]) and torch.equal(lse[:, rows], alone_lse[0])
    # As engines call it.
    varlen = fp8.flash_attn_varlen_func(q, *caches, cu, None, 4, None, causal=True, block_table=table, seqused_k=lengths, plan=PLAN)
    assert torch.equal(varlen, out)


def test_new_keys_of_packed_queries_go_behind_their_sequences():
    arguments = given("flash_attn_with_kvcache")
    caches = [x.clone() for x in (arguments["k_cache"], arguments["v_cache"])]
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    k, v, q = make(4, 2, 32, seed=5), make(4, 2, 32, seed=6), make(3, 4, 32, seed=7)
    call = lambda: fp8.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=arguments["cache_seqlens"], cu_seqlens_q=starts, cu_seqlens_k_new=starts, plan=PLAN
    )
    before = [x.clone() for x in caches]
    call()
    for cache, old, new in zip(caches, before, (k, v)):
        assert torch.equal(cache[0, 7], new[0]) and torch.equal(cache[1, 9:11], new[1:3])
        old[0, 7], old[1, 9:11] = new[0], new[1:3]
        assert torch.equal(cache, old)
    with pytest.raises(sigmascale.ArgumentError, match="give cu_seqlens_k_new"):
        fp8.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=7, cu_seqlens_q=starts, plan=PLAN)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"softcap": -1.0}, "softcap"),
        ({"softmax_scale": 0.0}, "softmax_scale"),
        ({"sinks": torch.ones(3)}, "sinks have shape"),
        ({"num_splits": 2}, "num_splits=2"),
        ({"num_splits": -1}, "num_splits -1"),
        ({"accumulator": "fp8-7"}, "accumulator"),
        ({"backend": "fa4"}, "backend"),
        ({"plan": [x.double() for x in PLAN]}, "float64"),
        ({"plan": [x.expand(3, -1) for x in PLAN]}, "the q descale has shape"),
        ({"q": make(2, 3, 3, 32)}, "not a multiple"),
        ({"v_cache": torch.zeros(1, 2, 1, 4, 8, 16, dtype=torch.bfloat16)}, "value_pages"),
    ],
)
def test_nothing_is_written_before_every_check_has_passed(changed, message):
    arguments = given("flash_attn_with_kvcache") | {"plan": PLAN} | changed
    before = [arguments[name].clone() for name in ("k_cache", "v_cache")]
    with pytest.raises((ValueError, sigmascale.SigmascaleError, TypeError), match=message):
        fp8.flash_attn_with_kvcache(**arguments)
    assert all(torch.equal(arguments[name], x) for name, x in zip(("k_cache", "v_cache"), before))


def test_a_call_without_queries_has_no_rows():
    empty = {"q": make(2, 0, 4, 32), "k": None, "v": None}
    out, lse = run("flash_attn_with_kvcache", **empty, return_softmax_lse=True)
    assert out.shape == (2, 0, 4, 32) and lse.shape == (2, 4, 0)
    # New keys are written all the same.
    arguments = given("flash_attn_with_kvcache") | {"q": empty["q"]}
    assert fp8.flash_attn_with_kvcache(**arguments, plan=PLAN).shape == (2, 0, 4, 32)
    assert torch.equal(arguments["k_cache"][0, 7:10], arguments["k"][0])
    q = make(0, 5, 4, 32).requires_grad_()
    k = make(0, 5, 2, 32)
    out = fp8.flash_attn_func(q, k, k, plan=PLAN)
    out.sum().backward()
    assert out.shape == q.shape == q.grad.shape
    none = {"q": make(0, 4, 32), "cu_seqlens_q": torch.zeros(3, dtype=torch.int32), "max_seqlen_q": 0}
    assert run("flash_attn_varlen_func", **none).shape == (0, 4, 32)
