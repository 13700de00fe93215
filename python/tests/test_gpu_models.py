"""Whole models and what surrounds them on a Hopper GPU."""

import gc
import json
import pathlib
import subprocess
import sys
import threading

import pytest
from gpu import MODEL, SMALL, F, random_model, relative, tensors, torch, transformers

import sigmascale
import sigmascale.torch as fp8


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "qwen3", "ministral3", "llama4_text"])
def test_a_hugging_face_model_runs_and_trains(kind):
    model = random_model(kind)
    tokens = torch.randint(0, 128, (2, 96), device="cuda")
    reference = model(tokens).logits
    runtime = fp8.attach(model)
    model.set_attn_implementation(fp8.register())
    loss = model(tokens, labels=tokens).loss
    logits = model(tokens).logits
    assert relative(logits, reference) < 0.1 and not torch.equal(logits, reference)
    stats = runtime.stats()
    assert (stats["overflow"] == 0).all() and (stats["peak"] > 1).all() and (stats["peak"] <= 448).all()
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    runtime.refresh()
    with pytest.raises(ValueError, match="mask"):
        mask = torch.ones(2, 1, 96, 96, dtype=torch.bool, device="cuda").tril()
        mask[..., 40:, 5] = False
        model(tokens, attention_mask=mask)
    if any(plan.positions for plan in runtime.layers):
        with pytest.raises(sigmascale.MismatchError, match="grow with the position"):
            model(torch.zeros((1, 129), dtype=torch.int64, device="cuda"))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_in_f32_trains_under_autocast(kind):
    model = random_model(kind, torch.float32)
    runtime = fp8.attach(model)
    model.set_attn_implementation(fp8.register())
    tokens = torch.randint(0, 128, (2, 96), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in model.parameters())
    assert (runtime.stats()["amax"] > 0).all() and (runtime.stats()["overflow"] == 0).all()


@pytest.mark.parametrize(("style", "policies"), [("llama", ["bf16", "geometry"]), ("gpt2", ["delayed-te"])])
def test_the_training_example_runs(style, policies, tmp_path):
    root = MODEL.parents[1]
    text = tmp_path / "text"
    text.mkdir()
    source = (root / "README.md").read_text()
    (text / "a.md").write_text(source * (1 + 120_000 // len(source)))
    script = [sys.executable, str(root / "python" / "examples" / "train_gpt.py")]
    small = "--width 128 --layers 2 --heads 2 --kv-heads 2 --steps 12 --every 2 --seq-len 64 --batch 4 --warmup 2"
    moments = "--spike 6:4:2 --resume 8:state"
    logs = [str(tmp_path / f"{policy}.jsonl") for policy in policies]
    for policy, log in zip(policies, logs):
        named = ["--style", style, "--text", str(text), "--policy", policy, "--log", log]
        subprocess.run([*script, *named, *small.split(), *moments.split()], check=True)
    rows = [json.loads(line) for line in pathlib.Path(logs[-1]).read_text().splitlines()]
    steps = [row for row in rows if "step" in row]
    assert [row["step"] for row in steps] == [0, 2, 4, 6, 8, 10, 11] and steps[3]["lr"] > 2 * steps[2]["lr"]
    # Delayed scaling starts with descales of 1, and these operands are near 1 at first: how near is up to the text.
    assert all(max(row["peak"]) > 0.5 for row in steps)
    if policies[-1] == "geometry":
        assert rows[-1]["overflow_steps"] == 0 and all(max(row["peak"]) <= 448 for row in steps)
    printed = subprocess.run([*script, "--table", *logs], check=True, capture_output=True, text=True).stdout
    assert len(printed.splitlines()) == 2 + len(logs) and policies[-1] in printed


def test_an_encoder_sees_both_ways():
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SMALL)).to(torch.bfloat16).cuda().eval()
    tokens = torch.randint(0, 128, (2, 96), device="cuda")
    with torch.no_grad():
        reference = model(tokens).last_hidden_state
        runtime = fp8.attach(model)
        model.set_attn_implementation(fp8.register())
        out = model(tokens).last_hidden_state
    assert relative(out, reference) < 0.05 and not torch.equal(out, reference)
    assert (runtime.stats()["overflow"] == 0).all()


def test_values_without_a_bound_are_planned_from_what_is_seen():
    torch.manual_seed(0)
    config = transformers.Olmo2Config(**SMALL, num_key_value_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).cuda()
    with pytest.raises(sigmascale.UnsupportedError, match="v has no bound"):
        fp8.attach(model)
    tokens = torch.randint(0, 128, (2, 96), device="cuda")
    reference = model(tokens).logits
    runtime = fp8.attach(model, policy="delayed-te")
    model.set_attn_implementation(fp8.register())
    for _ in range(2):
        out = model(tokens).logits
        runtime.refresh()
    assert relative(out, reference) < 0.1 and (runtime.descales != 1).any()


def test_a_hugging_face_model_generates():
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).cuda().eval()
    prompt = torch.tensor([list(b"fn main() {\n    let ")], device="cuda")
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    before = model.generate(prompt, **options)
    runtime = fp8.attach(model)
    model.set_attn_implementation(fp8.register())
    after = model.generate(prompt, **options)
    assert after.shape == before.shape and (runtime.stats()["peak"] > 1).all()
    # Greedy choices may differ where two tokens are close, but not from the first on.
    assert (after == before)[0, : prompt.shape[1] + 4].all()


def test_two_threads_on_one_stream_do_not_mix():
    q, k, v = tensors(length=512)
    row = [torch.full((2,), 0.02, device="cuda") for _ in range(3)]
    expected = [fp8.attention(scale * q, k, v, row) for scale in (1, 2)]
    wrong = []

    def work(index):
        with torch.no_grad():
            for _ in range(50):
                if not torch.equal(fp8.attention((1 + index) * q, k, v, row), expected[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_carried_checkpoint_keeps_its_loss():
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).cuda().eval()
    text = (MODEL.parents[1] / "data" / "sample.py").read_bytes()[:8192]
    tokens = torch.tensor(list(text), device="cuda").view(16, 512)
    with torch.no_grad():
        before = float(model(tokens, labels=tokens).loss)
        runtime = fp8.attach(model)
        model.set_attn_implementation(fp8.register())
        after = float(model(tokens, labels=tokens).loss)
    assert (runtime.stats()["overflow"] == 0).all()
    assert abs(after / before - 1) < 0.01, (before, after)


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = torch.nn.LayerNorm(256), torch.nn.Linear(256, 768)

    def forward(self, x):
        q, k, v = (y.unflatten(2, (4, 64)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, dim=2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_plain_modules_go_through_the_patched_call():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Plain(), Plain()).cuda().to(torch.bfloat16)
    layers = [
        fp8.Layer(
            *m.qkv.weight.chunk(3),
            n_q_heads=4,
            n_kv_heads=4,
            norm="layer",
            gain=m.norm.weight,
            shift=m.norm.bias,
            q_bias=m.qkv.bias[:256],
            k_bias=m.qkv.bias[256:512],
            v_bias=m.qkv.bias[512:],
            module=m,
        )
        for m in model
    ]
    runtime = fp8.attach(model, layers=layers)
    before = runtime.descales.clone()
    with torch.no_grad():
        model[1].qkv.weight.mul_(2)
    runtime.refresh()
    assert torch.equal(runtime.descales[0], before[0]) and (runtime.descales[1] > before[1]).all()
    x = torch.randn(2, 100, 256, device="cuda", dtype=torch.bfloat16)
    reference, original = model(x), F.scaled_dot_product_attention
    with fp8.patched(runtime):
        out = model(x)
    assert F.scaled_dot_product_attention is original
    assert relative(out, reference) < 0.1 and not torch.equal(out, reference)
    assert (runtime.stats()["peak"] > 1).all() and (runtime.stats()["overflow"] == 0).all()
    # Slices of a weight that is no longer the model's own.
    model[0].qkv.weight = torch.nn.Parameter(model[0].qkv.weight.detach().clone())
    with pytest.raises(sigmascale.SigmascaleError, match="attach again"):
        runtime.refresh()


def test_calls_of_another_shape_or_device_are_refused(llama):
    runtime = fp8.attach(llama)
    q, k, v = tensors(heads=(4, 2), d=128)
    with pytest.raises(sigmascale.MismatchError, match="heads of 64"):
        fp8.attention(q, k, v, runtime.layers[0])
    q, k, v = tensors(heads=(4, 2), d=64)
    with pytest.raises(ValueError, match="move q, k and v there"):
        fp8.attention(q.cpu(), k.cpu(), v.cpu(), runtime.layers[0])
    plan = runtime.layers[0]
    del runtime
    gc.collect()
    with pytest.raises(sigmascale.SigmascaleError, match="keep what attach"):
        fp8.attention(q, k, v, plan)


def test_transformer_engine_gets_scales_that_follow_refresh(llama):
    import types

    from sigmascale.torch import te

    runtime = fp8.attach(llama)
    factory = te.quantizer_factory(runtime, {"b": 2}, lambda role: "other", lambda scale, amax: scale)
    o = factory(types.SimpleNamespace(module_type="", tensor_type="", name="b.dpa_output"))
    before = o.clone()
    with torch.no_grad():
        llama.model.layers[2].self_attn.v_proj.weight.mul_(4)
    runtime.refresh()
    assert torch.allclose(o, before / 4, rtol=1e-5)
