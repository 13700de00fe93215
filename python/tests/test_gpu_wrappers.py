"""Calls as models make them on a Hopper GPU: padding, caches, masks, packing, compilers, FlashAttention's functions."""

import pytest
from gpu import MODEL, SMALL, F, random_model, relative, tensors, torch, transformers

import sigmascale.torch as fp8


@pytest.fixture(autouse=True)
def registered():
    fp8.register()
    yield
    fp8.register()


def tokens(batch=3, length=192):
    return torch.randint(1, 128, (batch, length), generator=torch.Generator().manual_seed(0)).cuda()


def padding(side):
    mask = torch.ones(3, 192, dtype=torch.int64, device="cuda")
    mask[0, 150:] = mask[2, 70:] = 0
    return mask if side == "right" else mask.flip(1)


def both(model, call, other="sdpa"):
    """What a model gives through FP8 and through another attention."""
    model.set_attn_implementation("sigmascale_fp8")
    ours = call(model)
    model.set_attn_implementation(other)
    theirs = call(model)
    model.set_attn_implementation("sigmascale_fp8")
    return ours, theirs


def ran(runtime):
    """What ran the first layer's calls, since this was asked last."""
    calls = {name: int(count[0]) for name, count in runtime.stats()["calls"].items()}
    runtime.refresh()
    return calls


def test_explicit_masks_and_packing():
    model = random_model("llama")
    runtime = fp8.attach(model)
    causal = torch.ones(192, 192, dtype=torch.bool, device="cuda").tril()[None, None].expand(3, 1, -1, -1)
    with torch.no_grad():
        ours, theirs = both(model, lambda m: m(tokens(), attention_mask=causal).logits)
        assert relative(ours, theirs) < 0.1 and ran(runtime) == {"native": 1}
        positions = torch.cat([torch.arange(100), torch.arange(92)])[None].cuda()
        ours, theirs = both(model, lambda m: m(tokens(1), position_ids=positions, use_cache=False).logits)
        assert relative(ours, theirs) < 0.1 and ran(runtime) == {"native": 1}
        ends = torch.tensor([0, 100, 192], dtype=torch.int32, device="cuda")
        given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 100, "max_length_k": 100}
        again = model(tokens(1), position_ids=positions, use_cache=False, **given).logits
        assert relative(again, ours) < 1e-3


@pytest.mark.parametrize("cache", ["dynamic", "static", "compiled"])
@pytest.mark.parametrize("side", [None, "left"])
def test_generation(cache, side):
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).cuda().eval()
    runtime = fp8.attach(model)
    text = (MODEL.parents[1] / "README.md").read_bytes()
    prompt = torch.tensor([list(text[i : i + 64]) for i in (0, 500, 1000)], device="cuda")
    mask = torch.ones_like(prompt)
    if side:
        mask[0, :10] = mask[2, :33] = 0
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    if cache != "dynamic":
        options |= {"cache_implementation": "static", "disable_compile": cache == "static"}
    torch._dynamo.reset()
    ours, theirs = both(model, lambda m: m.generate(prompt, **options))
    # Greedy choices may differ where two tokens are close, but not from the first on.
    assert (ours[:, 64:66] == theirs[:, 64:66]).float().mean() > 0.6
    assert float((ours == theirs).float().mean()) > 0.7
    calls = ran(runtime)
    assert calls.keys() == {"native"}, calls


def test_beams_and_assistants_generate():
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).cuda().eval()
    runtime = fp8.attach(model)
    prompt = torch.tensor([list(b"fn main() {\n    let mut ")], device="cuda")
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    ours, theirs = both(model, lambda m: m.generate(prompt, num_beams=3, **options))
    assert (ours == theirs)[0, : prompt.shape[1] + 2].all()
    ours, theirs = both(model, lambda m: m.generate(prompt, prompt_lookup_num_tokens=4, **options))
    assert (ours == theirs)[0, : prompt.shape[1] + 2].all()
    assert ran(runtime).keys() == {"native"}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_steps_compiled_and_checkpointed(compiled):
    model = random_model("llama").train()
    runtime, mask = fp8.attach(model), padding("right")
    name = fp8.register(padding="right")
    model.set_attn_implementation(name)

    def step(run):
        model.zero_grad()
        loss = run(input_ids=tokens(), attention_mask=mask, labels=tokens(), use_cache=False).loss
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    plain = step(model)
    if compiled:
        torch._dynamo.reset()
        other = step(torch.compile(model, fullgraph=True))
    else:
        model.gradient_checkpointing_enable()
        other = step(model)
    assert abs(plain[0] - other[0]) < 0.02 and relative(other[1], plain[1]) < 0.05
    assert ran(runtime).keys() == {"native"}


def test_an_encoder_sees_no_padding():
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SMALL)).to(torch.bfloat16).cuda().eval()
    runtime = fp8.attach(model)
    mask = padding("right")
    with torch.no_grad():
        ours, theirs = both(model, lambda m: m(tokens(), attention_mask=mask).last_hidden_state[mask.bool()])
    assert relative(ours, theirs) < 0.05 and ran(runtime) == {"native": 1}


@pytest.mark.parametrize(
    "kind",
    ["gemma2", "gemma3_text", "mistral", "phi3"],
)
def test_windows_and_soft_caps_reach_the_kernel(kind):
    config = {
        "gemma2": lambda: transformers.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=64, sliding_window=32),
        "gemma3_text": lambda: transformers.Gemma3TextConfig(
            **SMALL, num_key_value_heads=2, head_dim=64, sliding_window=32
        ),
        "mistral": lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=32),
        "phi3": lambda: transformers.Phi3Config(
            **SMALL, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, sliding_window=32
        ),  # fmt: skip
    }[kind]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).cuda().eval()
    runtime = fp8.attach(model)
    model.set_attn_implementation("sigmascale_fp8")
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    with torch.no_grad():
        ours = model(tokens()).logits
        model.set_attn_implementation("eager")
        theirs = model(tokens()).logits
    assert relative(ours, theirs) < 0.06 and ran(runtime).keys() == {"native"}


def test_head_dimensions_without_a_kernel_are_left_to_pytorch():
    q, k, v = tensors(d=320, length=64)
    row = [torch.full((2,), 0.02, device="cuda") for _ in range(3)]
    heads = lambda x: x.transpose(1, 2)
    out = fp8.attention(q, k, v, row, fallback="bf16")
    assert (
        relative(out, heads(F.scaled_dot_product_attention(*map(heads, (q, k, v)), is_causal=True, enable_gqa=True)))
        < 0.01
    )


def test_flash_attention_calls():
    row = [torch.full((2,), 0.02, device="cuda") for _ in range(3)]
    lengths = [300, 17, 200, 129]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = (x[0].requires_grad_(True) for x in tensors(1, sum(lengths)))
    out = fp8.flash_attn_varlen_func(q, k, v, ends, ends, 300, 300, causal=True, plan=row)
    parts = [x.split(lengths) for x in (q, k, v)]
    alone = torch.cat([fp8.flash_attn_func(*(x[None] for x in part), causal=True, plan=row)[0] for part in zip(*parts)])
    assert relative(out, alone) < 5e-3
    direction = torch.randn_like(out)
    grads = [torch.autograd.grad(x, (q, k, v), direction) for x in (out, alone)]
    assert all(relative(a, b) < 1e-2 for a, b in zip(*grads))
    # Lengths lie on the device: a replay takes those of the moment.
    graph, given = torch.cuda.CUDAGraph(), [x.detach() for x in (q, k, v)]
    call = lambda: fp8.flash_attn_varlen_func(*given, ends, ends, 300, 300, causal=True, plan=row)
    call()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        captured = call()
    ends[1:-1] = torch.tensor([17, 300, 500], device="cuda", dtype=torch.int32)
    graph.replay()
    assert torch.equal(captured, call()) and not torch.equal(captured, alone.detach())


@pytest.mark.parametrize("kind", ["bf16", "e4m3", "pages"])
def test_caches(kind):
    from sigmascale.torch import _e4m3

    row = [torch.full((2,), 0.02, device="cuda") for _ in range(3)]
    lengths = torch.tensor([500, 77, 77], dtype=torch.int32, device="cuda")
    q, k, v = tensors(3, 512)
    q, k_new, v_new = (x[:, :2].contiguous() for x in tensors(3, 8, seed=1))
    caches, table = [k.clone(), v.clone()], None
    if kind == "e4m3":
        caches = [_e4m3.cast(x, d.expand(3, -1)) for x, d in zip((k, v), row[1:])]
    if kind == "pages":
        table = torch.randperm(24, device="cuda").view(3, 8).int()
        pages = [torch.empty(24, 64, 2, 128, device="cuda", dtype=x.dtype) for x in caches]
        for page, x in zip(pages, caches):
            page[table.long()] = x.unflatten(1, (8, 64))
        caches = pages
    out = fp8.flash_attn_with_kvcache(
        q, *caches, k_new, v_new, cache_seqlens=lengths, block_table=table, causal=True, plan=row
    )
    for i, length in enumerate(lengths.tolist()):
        keys, values = (torch.cat([x[i, :length], y[i]])[None] for x, y in ((k, k_new), (v, v_new)))
        assert relative(out[i], fp8.attention(q[i : i + 1], keys, values, row)[0]) < 0.03


@pytest.mark.parametrize(
    "function, wrong, message",
    [
        ("packed", {"cu_seqlens_q": [0, 64, 32, 96]}, "cu_seqlens_q decreases from 64 to 32"),
        ("packed", {"cu_seqlens_k": [0, 32, 64, 97]}, "cu_seqlens_k ends with 97, but k has 96 tokens"),
        ("packed", {"seqused_k": [32, 33, 1]}, "seqused_k says 33 keys of sequence 1, which has 32"),
        ("cached", {"cache_seqlens": [8, 65]}, "cache_seqlens must be from 0 to 64"),
        ("cached", {"cache_batch_idx": [0, 2]}, "cache_batch_idx names row 2 of a cache with 2"),
        ("paged", {"block_table": [[0, 1], [2, 9]]}, "9"),
    ],
)
def test_wrong_lengths_on_the_device_are_named_on_request(monkeypatch, function, wrong, message):
    monkeypatch.setattr("sigmascale.torch._terms._CHECK", True)
    plan = [torch.ones(2, device="cuda")] * 3
    new = lambda *shape: torch.randn(*shape, device="cuda").bfloat16()
    places = {name: torch.tensor(x, dtype=torch.int32, device="cuda") for name, x in wrong.items()}

    def call(**places):
        if function == "packed":
            of = {name: torch.tensor([0, 32, 64, 96], dtype=torch.int32, device="cuda") for name in ("cu_seqlens_q", "cu_seqlens_k")}
            of |= {"max_seqlen_q": 64, "max_seqlen_k": 64, "plan": plan}
            return fp8.flash_attn_varlen_func(new(96, 4, 64), new(96, 2, 64), new(96, 2, 64), **(of | places))
        e4m3 = torch.float8_e4m3fn
        cache = [new(4, 32, 2, 64).to(e4m3) if function == "paged" else new(2, 64, 2, 64) for _ in "kv"]
        of = {"cache_seqlens": torch.tensor([8, 48], dtype=torch.int32, device="cuda"), "plan": plan, "causal": True}
        if function == "paged":
            of["block_table"] = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device="cuda")
        return fp8.flash_attn_with_kvcache(new(2, 1, 4, 64), *cache, **(of | places))

    assert torch.isfinite(call()[0]).all()
    with pytest.raises(ValueError, match=message):
        call(**places)
