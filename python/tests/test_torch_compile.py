"""Training under torch.compile, on the CPU: it is compiled once for a whole model and for blocks compiled one by one,
whatever the number of steps and of layers. Dynamo gives up after eight times, silently, and runs the rest eagerly."""

import functools

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch._dynamo.utils import counters  # noqa: E402
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts  # noqa: E402

import sigmascale.torch as fp8  # noqa: E402

LAYERS, STEPS = 4, 3


@pytest.fixture
def model():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        max_position_embeddings=64,
    )
    yield transformers.LlamaForCausalLM(config)
    torch._dynamo.reset()


def losses(model, compiled=None, steps=STEPS, lengths=(17,), dynamic=None, **attached):
    """Losses of some steps of training, and how many graphs were compiled for them."""
    runtime = fp8.attach(model, **attached)
    model.set_attn_implementation(fp8.register())
    run, how = model, {"backend": "aot_eager", "fullgraph": True, "dynamic": dynamic}
    if compiled == "whole":
        run = torch.compile(model, **how)
    elif compiled == "blocks":
        for block in model.model.layers:
            block.compile(**how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, before = [], counters["stats"]["unique_graphs"]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 64, (2, lengths[step % len(lengths)]), generator=generator)
        loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Compiled code counts its calls by layer as eager code does.
        assert [counts.tolist() for counts in runtime.stats()["calls"].values() if counts.any()] == [[1] * LAYERS]
        runtime.refresh()
        found.append(loss.item())
    return found, counters["stats"]["unique_graphs"] - before


@pytest.mark.parametrize(("compiled", "graphs"), [("whole", 1), ("blocks", 1)])
@pytest.mark.parametrize("policy", ["geometry", "delayed-te"])
def test_training_is_compiled_once(model, compiled, graphs, policy):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected, none = losses(model, policy=policy)
    model.load_state_dict(state)
    found, compiled = losses(model, compiled, policy=policy)
    assert (none, compiled) == (0, graphs)
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_packed_batch_is_nan_where_its_sequences_cannot_be_read(model):
    runtime = fp8.attach(model)
    model.set_attn_implementation(fp8.register())
    tokens = torch.randint(0, 64, (2, 16))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    logits = lambda run, positions: run(tokens, position_ids=positions, use_cache=False).logits
    with torch.no_grad():
        whole = torch.arange(16).expand(2, -1)
        assert torch.equal(logits(compiled, whole), logits(model, whole))
        packed = torch.stack([torch.arange(16), torch.arange(16) % 8])
        out = logits(compiled, packed)
    assert out[0].isfinite().all() and out[1].isnan().all()
    assert len(runtime) == LAYERS


@pytest.mark.parametrize("cache", [False, True])
def test_windows_without_a_mask_are_compiled_with_and_without_a_cache(cache):
    """With a cache transformers composes no packing, and the window's function says the same of every text."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.MistralConfig(**sizes, num_hidden_layers=2, vocab_size=64, sliding_window=8)
    windowed = transformers.MistralForCausalLM(config).eval()
    runtime = fp8.attach(windowed)
    windowed.set_attn_implementation(fp8.register())
    tokens = torch.randint(0, 64, (2, 17))
    compiled = torch.compile(windowed, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected, found = (run(tokens, use_cache=cache).logits for run in (windowed, compiled))
    assert torch.allclose(found, expected, atol=1e-5) and len(runtime) == 2
    torch._dynamo.reset()


def test_telemetry_of_some_steps_is_compiled_twice(model):
    assert losses(model, "whole", steps=2 * STEPS, telemetry=3)[1] == 2


def test_blocks_of_static_shapes_are_compiled_once(model):
    assert losses(model, "blocks", dynamic=False)[1] == 1


def test_dynamic_shapes_are_compiled_once_from_the_start(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # Of two texts of 4 tokens, as many as there are layers and rows of descales.
    lengths = (4, 17, 9)
    expected, _ = losses(model, lengths=lengths)
    model.load_state_dict(state)
    assert losses(model, "blocks", lengths=lengths, dynamic=True) == (pytest.approx(expected, abs=1e-5), 1)


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, [torch.ops.sigmascale.attention.default])


@pytest.mark.parametrize("options", [{}, {"context_fn": SELECTIVE}], ids=["all", "selective"])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpoints_in_and_around_compiled_blocks(model, inside, options):
    """Two forwards before their backwards, as pipelines have them."""
    fp8_layers = fp8.attach(model)
    model.set_attn_implementation(fp8.register())
    texts = [torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(i)) for i in range(2)]

    def grads():
        # Overflows are counted, which maxima alone would not show.
        fp8_layers.descales.fill_(1e-4)
        sum(model(input_ids=text, labels=text, use_cache=False).loss for text in texts).backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        words = fp8_layers.words.clone()
        fp8_layers.refresh()
        return found, words

    expected, words = grads()
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    kept = lambda run: lambda *args, **given: checkpoint(run, *args, use_reentrant=False, **options, **given)
    for block in model.model.layers:
        block.forward = compiled(kept(block.forward)) if inside else kept(compiled(block.forward))
    found, reported = grads()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert counters["stats"]["unique_graphs"] == 1
    # Each call reports once. A checkpoint around compiled code runs all of it again, and it reports again.
    rows, kinds = words[:, 2:], slice(1, 3)
    assert rows[..., kinds].any() and torch.equal(reported[..., 0], words[..., 0])
    assert torch.equal(reported[:, 2:, kinds], (1 if inside else 2) * rows[..., kinds])


def test_the_compiler_knows_what_has_its_place_for_life():
    """CUDA graphs of compiled code are left out where they would write into other inputs, here the telemetry."""
    torch._dynamo.reset()
    q = torch.randn(2, 6, 2, 16)
    runtime = fp8.attach(torch.nn.Linear(1, 1), layers=[one_layer()])
    inputs = {}

    def backend(graph, _):
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            if node.op == "placeholder" and isinstance(value, torch.Tensor):
                known = node.meta.get("tensor_dict", {})
                inputs[node.name] = known.get("_dynamo_static_input_type"), value
        return graph.forward

    torch.compile(lambda q: fp8.attention(q, q, q, runtime.layers[0]), backend=backend, fullgraph=True, dynamic=True)(q)
    (words,) = (place for place in inputs.values() if place[1].dtype == torch.int32)
    (rows,) = (place for place in inputs.values() if tuple(place[1].shape) == (4, 2))
    assert words[0] == rows[0] == "unguarded"
    assert all(type(length) is int for place in (words, rows) for length in place[1].shape)


def one_layer():
    weight = torch.nn.Parameter(torch.eye(32))
    heads = {"n_q_heads": 2, "n_kv_heads": 2, "rotary": 16}
    return fp8.Layer(q=weight, k=weight, v=weight, norm="rms", gain=torch.ones(32), **heads)
