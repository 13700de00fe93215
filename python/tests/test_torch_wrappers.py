"""Calls as models make them, on the CPU: masks, FlashAttention's functions, Hugging Face models."""

import copy
import functools
import unittest.mock
import warnings

import pytest

torch = pytest.importorskip("torch")

from planned import Planned, layer, planned  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402
from sigmascale.torch import _calls, _e4m3, _masks  # noqa: E402


def operands(batch=3, length=24, keys=None, heads=(4, 2), d=32):
    generator = torch.Generator().manual_seed(0)
    make = lambda length, n: torch.randn(batch, length, n, d, generator=generator)
    return make(length, heads[0]), make(keys or length, heads[1]), make(keys or length, heads[1])


def rows(value=0.02):
    return [torch.full((2,), value) for _ in range(3)]


def error(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def masked(q, k, v, mask, row=None):
    """Through the drop-in, and through PyTorch on what E4M3 holds."""
    row, heads = row or rows(), lambda x: x.transpose(1, 2)
    out = fp8.scaled_dot_product_attention(heads(q), heads(k), heads(v), mask, enable_gqa=True, plan=row)
    seen = [_e4m3.dequantised(x, d.expand(x.shape[0], -1)).float() for x, d in zip((q, k, v), row)]
    return heads(out), heads(sdpa(*(heads(x) for x in seen), attn_mask=mask, enable_gqa=True))


def kinds(batch, rows, keys):
    row, key = torch.arange(rows)[:, None], torch.arange(keys)[None, :]
    causal = key <= row + keys - rows
    lengths = torch.tensor([keys, keys - 9, keys - 4])[:, None, None, None]
    first = (keys - lengths).clamp_min(0)
    document = (torch.arange(keys) >= 7).int() + (torch.arange(keys) >= 15).int()
    yield "causal", causal[None, None], 1
    yield "of two dimensions", causal, 1
    yield "additive", torch.zeros(rows, keys).masked_fill(~causal, -torch.inf)[None, None], 1
    yield "additive with the least number", torch.zeros(rows, keys).masked_fill(~causal, torch.finfo().min), 1
    for value in (-1e4, -1e9):
        yield f"additive with {value}", torch.zeros(rows, keys).masked_fill(~causal, value), 1
    yield "a copy for each head", causal.expand(batch, 4, rows, keys).clone(), 1
    yield "everything", torch.ones(batch, 1, rows, keys, dtype=torch.bool), 1
    yield "padded right, both ways", (key < lengths).expand(batch, 1, rows, keys), 1
    yield "padded right, causal", (key < lengths) & causal, 2
    yield "padded left, causal", (key >= first) & causal, 1
    yield "the filled part of a cache", (key <= row + 3).expand(batch, 1, rows, keys), 1 if rows + 3 <= keys else 2
    yield "window", causal & (key > row + keys - rows - 6), 1
    yield "window and padding", (key >= first) & causal & (key > row + keys - rows - 6), 1
    if rows == keys:
        yield "packed", (causal & (document[:, None] == document[None, :]))[None], 1
        yield "packed windows", (causal & (key > row - 4) & (document[:, None] == document[None, :]))[None], 1
        yield "window on both sides", ((key - row).abs() <= 3).expand(batch, 1, rows, keys), 1
        yield "chunks", (causal & (row // 9 == key // 9))[None], 1
        image = lambda x: (x >= 5) & (x < 11)
        yield "text around an image", (causal | image(row) & image(key))[None], 3


@pytest.mark.parametrize("shape", [(24, 24), (5, 24), (1, 24)], ids=str)
def test_masks_that_are_dense_calls_are_recognised(shape):
    q, k, v = operands(length=shape[0], keys=shape[1])
    for name, mask, calls in kinds(3, *shape):
        out, reference = masked(q, k, v, mask)
        seen = (
            (mask if mask.dtype == torch.bool else mask == 0).expand(3, 4, *shape).any(dim=3).transpose(1, 2)[..., None]
        )
        assert error(out * seen, torch.where(seen, reference, 0.0)) < 0.03, name
        assert not (out * ~seen).any(), name
        found = _masks.recognise(mask, 3, *shape)
        assert len(found) <= calls, (name, found)
        if name in ("causal", "everything") or (shape[0] == shape[1] and name in ("window", "window on both sides")):
            assert found[0][2] is None, (name, found)


def test_random_runs_of_keys_are_computed_as_the_mask_says():
    generator = torch.Generator().manual_seed(1)
    one = lambda low, high: int(torch.randint(low, high, (), generator=generator))
    q, k, v = operands(2, 40, 50)
    recognised = 0
    for _ in range(40):
        mask = torch.zeros(2, 1, 40, 50, dtype=torch.bool)
        for sequence in range(2):
            row = 0
            while row < 40:
                count, first, last, grows = one(1, 30), one(0, 40), one(0, 50), one(0, 2)
                for i in range(row, min(row + count, 40)):
                    mask[sequence, 0, i, first : last + (i - row) * grows] = True
                row += count
        if isinstance(_masks.recognise(mask, 2, 40, 50), str):
            continue
        recognised += 1
        out, reference = masked(q, k, v, mask)
        seen = mask.any(dim=3).transpose(1, 2)[..., None]
        assert error(out, torch.where(seen, reference, 0.0)) < 0.04 and not (out * ~seen).any()
    assert recognised > 10


def test_gradients_go_through_masked_calls():
    q, k, v = (x.requires_grad_(True) for x in operands())
    mask = dict((name, mask) for name, mask, _ in kinds(3, 24, 24))["padded left, causal"]
    out, reference = masked(q, k, v, mask)
    direction = torch.randn(out.shape)
    ours, theirs = (
        torch.autograd.grad(x, (q, k, v), direction, retain_graph=True) for x in (out, masked(q, k, v, mask)[0])
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
    seen = mask.any(dim=3).transpose(1, 2)[..., None]
    exact = [x.detach().requires_grad_(True) for x in (q, k, v)]
    heads = lambda x: x.transpose(1, 2)
    plain = sdpa(*(heads(x) for x in exact), attn_mask=mask, enable_gqa=True)
    theirs = torch.autograd.grad(torch.where(heads(seen), plain, 0.0), exact, heads(direction))
    assert all(error(a, b) < 0.08 for a, b in zip(ours, theirs))


@pytest.mark.parametrize("shape", [(5, 24), (24, 5), (1, 24)], ids=str)
@pytest.mark.parametrize("how", ["is_causal", "causal_upper_left", "causal_lower_right"])
def test_causality_is_aligned_as_in_pytorch(how, shape):
    if how == "causal_lower_right" and shape[0] > shape[1]:
        pytest.skip("PyTorch's rows that see no key are NaN")
    q, k, v = (x.transpose(1, 2) for x in operands(length=shape[0], keys=shape[1]))
    given = {"is_causal": True} if how == "is_causal" else {"attn_mask": getattr(torch.nn.attention.bias, how)(*shape)}
    out = fp8.scaled_dot_product_attention(q, k, v, **given, enable_gqa=True, plan=rows())
    whole = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0] if how == "causal_lower_right" else 0)
    assert error(out, masked(*(x.transpose(1, 2) for x in (q, k, v)), whole)[1].transpose(1, 2)) < 0.03


def test_a_causal_bias_of_other_lengths_is_refused():
    q, k, v = (x.transpose(1, 2) for x in operands())
    bias = torch.nn.attention.bias.causal_lower_right(24, 30)
    with pytest.raises(sigmascale.MismatchError, match="24 queries .*30 keys.* 24 and 24"):
        fp8.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True, plan=rows())


def test_channels_may_have_any_stride_as_in_pytorch():
    plain = [x.transpose(1, 2).requires_grad_() for x in operands()]
    apart = [x.detach().mT.contiguous().mT.requires_grad_() for x in plain]
    outs = [fp8.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True, plan=rows()) for x in (plain, apart)]
    assert apart[0].stride(3) != 1 and torch.equal(*outs)
    grads = [torch.autograd.grad(out.square().sum(), x) for out, x in zip(outs, (plain, apart))]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_a_mask_is_read_again_when_it_changes(monkeypatch):
    q, k, v = operands()
    mask, reads = torch.ones(24, 24, dtype=torch.bool).tril(), []
    read = _masks._read
    monkeypatch.setattr(_masks, "_read", lambda *arguments: reads.append(1) or read(*arguments))
    for _ in range(3):
        masked(q, k, v, mask)
    mask.fill_(True)
    out, reference = masked(q, k, v, mask)
    assert len(reads) == 2 and error(out, reference) < 0.03


def others():
    row, key = torch.arange(24)[:, None], torch.arange(24)[None, :]
    causal = key <= row
    yield "kind than causal", causal & (key != 5)
    yield "kind than causal", causal & (key > row - 6 - row // 3)
    yield "values for each head", causal & (key > row - torch.tensor([24, 24, 24, 3])[:, None, None])[None]
    yield "kind than causal", torch.zeros(24, 24).masked_fill(~causal, -1e3)
    yield "does not fit", torch.ones(24, 23, dtype=torch.bool)
    yield "type torch.int64", torch.ones(24, 24, dtype=torch.int64)
    yield "kind than causal", torch.zeros(24, 24).masked_fill(~causal, -torch.inf) - 0.1 * (row - key)


@pytest.mark.parametrize(("reason", "mask"), list(others()))
def test_other_masks_are_refused_or_left_to_pytorch(reason, mask):
    q, k, v = (x.transpose(1, 2) for x in operands())
    runtime = Planned([layer()])
    call = lambda **options: fp8.scaled_dot_product_attention(
        q, k, v, mask, enable_gqa=True, plan=runtime.layers[0], **options
    )
    with pytest.raises(sigmascale.UnsupportedError, match=f"{reason}.*fallback='bf16'"):
        call()
    if "fit" in reason or "type" in reason:
        return
    _calls._SAID.clear()
    with pytest.warns(RuntimeWarning, match=reason):
        out = call(fallback="bf16")
    assert torch.equal(out, sdpa(q, k, v, mask, enable_gqa=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(fallback="bf16")
    assert runtime.calls[0] == {"bf16": 2}


def test_dropout_falls_back_with_the_other_terms_as_they_are():
    from sigmascale.torch import _fallback
    from sigmascale.torch._attention import How, attend
    from sigmascale.torch._terms import Sequences

    q, k, v = operands()
    row = rows()
    places = torch.tensor([[2, 24, 2, 24], [24, 44, 24, 44], [48, 72, 48, 72]], dtype=torch.int32).t().contiguous()
    terms = {"softcap": 2.0, "sinks": torch.tensor([0.0, 1.0, 5.0, -3.0]), "window": (3, -1)}
    for given in ({}, {"softcap": 2.0}, {"window": (3, -1)}, {"window": (2, 4), "causal": False}, terms):
        for sequences in (None, Sequences(*places, 24, 24)):
            call = {"causal": True, "sequences": sequences} | given
            with pytest.raises(sigmascale.UnsupportedError, match="dropout 0.1"):
                attend(q, k, v, row, dropout=0.1, **call)
            ours, ours_lse = attend(q, k, v, row, **call)
            # No weight is dropped, so that both mean the same.
            plain = functools.partial(_fallback.attend, dropout=1e-30)
            with unittest.mock.patch.object(_fallback, "attend", plain):
                out, lse = attend(q, k, v, row, dropout=1e-30, return_lse=True, how=How(fallback="bf16"), **call)
                again, _ = attend(q, k, v, row, dropout=1e-30, how=How(fallback="bf16"), **call)
            assert error(ours, out) < 0.06 and torch.allclose(again, out, atol=1e-5)
            seen = ours_lse > -torch.inf
            assert torch.allclose(ours_lse[seen], lse[seen], atol=0.2)


def test_windows_that_hide_nothing_are_none():
    q, k, v = operands()
    runtime = Planned([layer()])
    plan = runtime.layers[0]
    expected = fp8.attention(q, k, v, plan)
    assert torch.equal(fp8.attention(q, k, v, plan, window=(23, 0)), expected)
    assert torch.equal(fp8.attention(q, k, v, plan, causal=False, window=(-1, 0)), expected)
    assert not torch.equal(fp8.attention(q, k, v, plan, window=(22, 0)), expected)
    for options, message in [
        ({"softcap": -1.0}, "softcap"),
        ({"sinks": torch.zeros(3)}, r"sinks have shape \(3,\)"),
    ]:
        with pytest.raises((sigmascale.ArgumentError, sigmascale.MismatchError), match=message):
            fp8.attention(q, k, v, plan, **options)


def test_flash_attention_has_its_own_arguments():
    q, k, v = operands()
    out, lse, none = fp8.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, plan=rows())
    expected, expected_lse = fp8.attention(q, k, v, rows(), return_lse=True)
    assert (
        out.dtype == q.dtype and torch.equal(out, expected.float()) and torch.equal(lse, expected_lse) and none is None
    )
    assert torch.equal(fp8.flash_attn_func(q, k, v, plan=rows()), fp8.attention(q, k, v, rows(), causal=False).float())
    options = {"softcap": 1.0, "window_size": (4, 0), "sinks": torch.ones(4)}
    ours = fp8.flash_attn_func(q, k, v, causal=True, plan=rows(), **options)
    options = {"softcap": 1.0, "window": (4, 0), "sinks": torch.ones(4)}
    assert torch.equal(ours, fp8.attention(q, k, v, rows(), **options).float()) and error(ours, out) > 0.1
    for options in ({"alibi_slopes": torch.ones(4)}, {"deterministic": True}):
        with pytest.raises(sigmascale.UnsupportedError, match="not supported|setting"):
            fp8.flash_attn_func(q, k, v, **options, plan=rows())


@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_see_their_own_keys(causal):
    lengths_q, lengths_k = [5, 0, 30, 1, 17], [9, 4, 30, 0, 20]
    cu = lambda lengths: torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (x[0] for x in operands(1, sum(lengths_q), sum(lengths_k)))
    out, lse, _ = fp8.flash_attn_varlen_func(
        q, k, v, cu(lengths_q), cu(lengths_k), 30, 30, causal=causal, return_attn_probs=True, plan=rows()
    )
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
    for part, ours, ours_lse in zip(parts, out.split(lengths_q), lse.split(lengths_q, dim=1)):
        if part[0].shape[0] and part[1].shape[0]:
            alone, alone_lse = fp8.attention(*(x[None] for x in part), rows(), causal=causal, return_lse=True)
            assert torch.equal(ours, alone[0].float()) and torch.equal(ours_lse, alone_lse[0])
        else:
            assert not ours.any() and (ours_lse == -torch.inf).all()
    used = torch.tensor([9, 4, 30, 0, 20], dtype=torch.int32)
    again = fp8.flash_attn_varlen_func(q, k, v, cu(lengths_q), cu(lengths_k), None, None, causal=causal, seqused_k=used, plan=rows())
    assert torch.equal(again, out)
    # Lengths are not read.
    torch._dynamo.reset()
    compiled = torch.compile(fp8.flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    whole = compiled(q, k, v, cu(lengths_q), cu(lengths_k), 30, 30, causal=causal, plan=rows())
    assert torch.equal(whole, out)
    for bad, message in [(cu([5, 30, 18]), "4 and 6 entries"), (cu([5, 0, 30, 1, 18]), "ends with 54, but q has 53 tokens")]:
        with pytest.raises(ValueError, match=message):
            fp8.flash_attn_varlen_func(q, k, v, bad, cu(lengths_k), None, None, plan=rows())


@pytest.mark.parametrize("kind", ["bf16", "e4m3", "pages"])
@pytest.mark.parametrize("new", [0, 3])
def test_caches_grow_in_place(kind, new):
    plan, lengths = rows(), torch.tensor([20, 7, 7], dtype=torch.int32)
    q, k, v = (x.bfloat16() for x in operands(3, 3, 32))
    _, k_new, v_new = (x.bfloat16() for x in operands(3, 3))
    table = None
    caches = [k.clone(), v.clone()]
    if kind == "e4m3":
        caches = [_e4m3.cast(x, d.expand(3, -1)) for x, d in zip((k, v), plan[1:])]
    if kind == "pages":
        table = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(3, 4).int()
        pages = []
        for x in caches:
            page = torch.empty(12, 8, 2, 32, dtype=x.dtype)
            page[table.long()] = x.unflatten(1, (4, 8))
            pages.append(page)
        caches = pages
    given = {"k": k_new, "v": v_new} if new else {}
    out, lse = fp8.flash_attn_with_kvcache(
        q, *caches, **given, cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True, plan=plan
    )
    for i, length in enumerate(lengths.tolist()):
        keys, values = (torch.cat([x[i, :length], y[i, :new]]) for x, y in ((k, k_new), (v, v_new)))
        alone, alone_lse = fp8.attention(q[i : i + 1], keys[None], values[None], plan, return_lse=True)
        assert torch.equal(out[i], alone[0]) and torch.equal(lse[i], alone_lse[0])
    # In a compiled call the lengths stay on the device.
    if kind == "bf16" and not new:
        torch._dynamo.reset()
        compiled = torch.compile(fp8.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
        whole = compiled(q, *caches, cache_seqlens=lengths, causal=True, plan=plan)
        assert torch.equal(whole, out)
    if new:
        with pytest.raises(sigmascale.MismatchError, match="fit"):
            fp8.flash_attn_with_kvcache(q, *caches, **given, cache_seqlens=30, block_table=table, plan=plan)
        with pytest.raises(sigmascale.ArgumentError, match="cache_seqlens"):
            fp8.flash_attn_with_kvcache(q, *caches, **given, block_table=table, plan=plan)


def model(kind="Llama", **options):
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**common, vocab_size=100, **options)
    made = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    return made


def tokens(batch=3, length=24):
    return torch.randint(1, 100, (batch, length), generator=torch.Generator().manual_seed(0))


def both(made, call):
    """What a model gives through FP8 and through PyTorch's attention."""
    ours = call(made)
    made.set_attn_implementation("sdpa")
    theirs = call(made)
    made.set_attn_implementation("sigmascale_fp8")
    return ours, theirs


def test_a_model_with_plans_can_be_copied_and_saved(tmp_path):
    made = model(num_key_value_heads=2)
    runtime = planned(made)
    with torch.no_grad():
        expected = made(tokens()).logits
    torch.save(made, tmp_path / "model.pt")
    for other in (copy.deepcopy(made), torch.load(tmp_path / "model.pt", weights_only=False)):
        with pytest.raises(sigmascale.ArgumentError, match="has no plan"):
            other(tokens())
        again = planned(other)
        with torch.no_grad():
            assert torch.equal(other(tokens()).logits, expected) and again.calls[0] == {"native": 1}
    assert runtime.calls[0] == {"native": 1}


def padding():
    right = torch.ones(3, 24, dtype=torch.int64)
    right[0, 20:] = right[2, 9:] = 0
    return right


@torch.no_grad()
def test_explicit_masks_and_packed_positions_of_a_hugging_face_model():
    made = model(num_key_value_heads=2)
    runtime = planned(made)
    causal = torch.ones(24, 24, dtype=torch.bool).tril()[None, None].expand(3, 1, -1, -1)
    ours, theirs = both(made, lambda m: m(tokens(), attention_mask=causal).logits)
    assert error(ours, theirs) < 0.06 and runtime.calls[0] == {"native": 1}
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    ours, theirs = both(made, lambda m: m(tokens(1), position_ids=positions, use_cache=False).logits)
    assert error(ours, theirs) < 0.06 and runtime.calls[0] == {"native": 2}
    alone = made(tokens(1)[:, :10]).logits
    assert torch.allclose(ours[:, :10], alone, atol=1e-5)
    ends = torch.tensor([0, 10, 24], dtype=torch.int32)
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 14, "max_length_k": 14}
    assert torch.allclose(made(tokens(1), position_ids=positions, use_cache=False, **given).logits, ours, atol=1e-5)




@pytest.mark.parametrize("window", [None, 8])
def test_continuous_batching(window):
    from transformers import ContinuousBatchingConfig, GenerationConfig

    kind = {} if window is None else {"kind": "Mistral", "sliding_window": window}
    made = model(num_key_value_heads=2, **kind)
    runtime = planned(made)
    prompts = [tokens(1)[0, :n].tolist() for n in (5, 20, 13)]
    # Prompts are longer than a step, so some are cut.
    sizes = ContinuousBatchingConfig(block_size=16, num_blocks=8, max_batch_tokens=16, max_requests_per_batch=4, return_logprobs=True)
    options = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def generated(m):
        results = m.generate_batch(prompts, options, sizes).values()
        assert not any(result.error for result in results)
        return torch.tensor([result.logprobs[0] for result in results])

    ours, theirs = both(made, generated)
    assert not torch.equal(ours, theirs) and error(ours, theirs) < 0.1
    assert runtime.calls[0].keys() == {"native"}
    made.set_attn_implementation("paged|" + fp8.register())
    with pytest.raises(sigmascale.ArgumentError, match="for generate_batch"):
        made(tokens())


@torch.no_grad()
def test_tokens_behind_prompts_that_are_padded_on_the_right_in_a_static_cache():
    from transformers import StaticCache

    made, mask = model(num_key_value_heads=2), padding()
    runtime = planned(made)
    longer = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)

    def decoded(m):
        cache = StaticCache(config=m.config, max_cache_len=40)
        m(tokens(), attention_mask=mask, past_key_values=cache)
        place = longer.cumsum(dim=1)[:, -1:] - 1
        return m(tokens()[:, :1], attention_mask=longer, position_ids=place, past_key_values=cache).logits

    assert error(*both(made, decoded)) < 0.06 and runtime.calls[0] == {"native": 2}


def test_training_steps_compiled_and_checkpointed_agree():
    made = model(num_key_value_heads=2).train()
    runtime = planned(made)
    name = fp8.register(padding="right")
    mask = padding()

    def step(run):
        made.zero_grad()
        loss = run(input_ids=tokens(), attention_mask=mask, labels=tokens(), use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in made.parameters())]

    try:
        made.set_attn_implementation(name)
        plain = step(made)
        made.gradient_checkpointing_enable()
        checkpointed = step(made)
        made.gradient_checkpointing_disable()
        torch._dynamo.reset()
        compiled = step(torch.compile(made, fullgraph=True, backend="aot_eager"))
    finally:
        fp8.register()
    assert runtime.calls[0].keys() == {"native"}
    for other in (checkpointed, compiled):
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(plain, other))
    with pytest.raises(sigmascale.ArgumentError, match="padding 'left'"):
        fp8.register(padding="left")
