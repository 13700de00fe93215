"""How often training is compiled, on the CPU: once for a whole model, twice for blocks compiled one by one, whatever the number
of steps and of layers. Dynamo gives up after eight times, silently, and runs the rest eagerly."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch._dynamo.utils import counters  # noqa: E402

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


def losses(model, compiled=None, steps=STEPS, **attached):
    """Losses of some steps of training, and how many graphs were compiled for them."""
    runtime = fp8.attach(model, **attached)
    model.set_attn_implementation(fp8.register())
    run = model
    if compiled == "whole":
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    elif compiled == "blocks":
        for block in model.model.layers:
            block.compile(backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    found, before = [], counters["stats"]["unique_graphs"]
    for _ in range(steps):
        loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Compiled code counts its calls by layer as eager code does.
        assert [counts.tolist() for counts in runtime.stats()["calls"].values() if counts.any()] == [[1] * LAYERS]
        runtime.refresh()
        found.append(loss.item())
    return found, counters["stats"]["unique_graphs"] - before


@pytest.mark.parametrize(("compiled", "graphs"), [("whole", 1), ("blocks", 2)])
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


def test_telemetry_of_some_steps_is_compiled_twice(model):
    assert losses(model, "whole", steps=2 * STEPS, telemetry=3)[1] == 2
