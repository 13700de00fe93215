"""Mistakes that would go unnoticed, on the CPU: each is right, or says what to do."""

import copy
import io
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from recorded import Launches, batch, loss_of, model  # noqa: E402

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402

STALE = r"the weights of layer 0, layer 1 have changed since their FP8 scales were computed"
ADAMW = torch.optim.AdamW
OPTIMIZERS = {
    "fused": lambda p: ADAMW(p, lr=0.1, fused=True),
    "foreach": lambda p: ADAMW(p, lr=0.1, foreach=True),
    "one by one": lambda p: ADAMW(p, lr=0.1, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=10.0),
}


@pytest.fixture(autouse=True)
def no_other_warnings():
    """A warning that a test does not expect is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def exact(made, policy="geometry"):
    """The scales of the weights as they are."""
    return fp8.attach(made, policy=policy).descales


def grown(made, factor=8.0):
    """Writes to all weights as autograd and tensor versions do not see."""
    for parameter in made.parameters():
        parameter.data.mul_(factor)


# ---- optimizers


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_of_an_optimizer_are_followed(kind):
    made = model()
    optimizer = OPTIMIZERS[kind](made.parameters())
    runtime = fp8.attach(made, optimizer=optimizer, strict=True)
    for step in range(3):
        before = runtime.descales.clone()
        loss_of(made, step).backward()
        assert (runtime.stats()["amax"] > 0).all()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(runtime.descales, before) and torch.equal(runtime.descales, exact(made))
        # A step of the statistics ends there.
        assert (runtime.stats()["amax"] == 0).all()
    runtime.check()


def test_accumulation_and_closures():
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
    runtime = fp8.attach(made, policy="delayed-te", optimizer=optimizer, strict=True)
    once = model()
    other = fp8.attach(once, policy="delayed-te", strict=True)
    plain = torch.optim.SGD(once.parameters(), lr=1.0)

    def closure():
        """As Lightning steps: forward and backward inside of the step."""
        optimizer.zero_grad()
        for micro in range(3):
            loss = loss_of(made, micro)
            loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        plain.zero_grad()
        for micro in range(3):
            loss_of(once, micro).backward()
        plain.step()
        other.refresh()
    assert torch.equal(runtime.descales, other.descales)
    assert runtime.state_dict()["state"] == other.state_dict()["state"]


def trained(policy, split, explicit, steps=4):
    """A training with one optimizer or two, which follow or are followed by a call."""
    made = model()
    parameters = list(made.parameters())
    parts = [parameters] if not split else [parameters[::2], parameters[1::2]]
    optimizers = [torch.optim.SGD(part, lr=0.5) for part in parts]
    runtime = fp8.attach(made, policy=policy, optimizer=None if explicit else optimizers, strict=True)
    for step in range(steps):
        loss_of(made, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if explicit:
            runtime.refresh()
    return runtime.descales.clone(), runtime.state_dict()["state"], runtime._steps


@pytest.mark.parametrize("policy", ["geometry", "delayed-te", "delayed-paper", "auto-c"])
def test_several_optimizers_share_a_step(policy):
    one, two, called = (trained(policy, *how) for how in ((False, False), (True, False), (True, True)))
    assert torch.equal(one[0], called[0]) and one[1:] == called[1:]
    assert torch.equal(two[0], called[0])
    # The first of two ends a step: statistics are planned from once.
    assert two[2] == called[2]
    if policy != "auto-c":
        assert two[1] == called[1]


def test_optimizers_that_take_turns_each_end_a_step():
    made = model()
    parameters = list(made.parameters())
    optimizers = [torch.optim.SGD(part, lr=0.5) for part in (parameters[::2], parameters[1::2])]
    runtime = fp8.attach(made, optimizer=optimizers, strict=True)
    for step in range(4):
        loss_of(made, step).backward()
        optimizers[step % 2].step()
        made.zero_grad()
        assert torch.equal(runtime.descales, exact(made))


def test_a_step_that_a_scaler_skips_leaves_the_scales():
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    runtime = fp8.attach(made, optimizer=optimizer, strict=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = runtime.descales.clone()
    for step, factor in enumerate((float("inf"), 1.0)):
        scaler.scale(loss_of(made, step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(runtime.descales, before) == (step == 0)
    assert torch.equal(runtime.descales, exact(made))


def test_optimizers_inside_the_backward():
    made = model()
    optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in made.parameters()}
    runtime = fp8.attach(made, optimizer=list(optimizers.values()), strict=True)
    ended = []
    runtime.before_refresh.append(ended.append)

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in made.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        loss_of(made, number).backward()
        assert torch.equal(runtime.descales, exact(made)) and len(ended) == number + 1


def test_wrappers_with_a_step_of_their_own():
    class Wrapper:
        """Steps f32 copies and writes the model's weights behind that, as optimizers with master weights do."""

        def __init__(self, made):
            self.made, self.copies = made, [p.detach().clone() for p in made.parameters()]
            self.inner = torch.optim.SGD(self.copies, lr=0.5)

        def step(self):
            for copied, parameter in zip(self.copies, self.made.parameters()):
                copied.grad = parameter.grad
            self.inner.step()
            for copied, parameter in zip(self.copies, self.made.parameters()):
                parameter.data.copy_(copied)
            return "stepped"

    made = model()
    optimizer = Wrapper(made)
    with pytest.raises(sigmascale.ArgumentError, match="none of the model's parameters: give .* whose step\\(\\) updates"):
        fp8.attach(made, optimizer=optimizer.inner)
    with pytest.raises(TypeError, match="an object with step\\(\\), or a list of them, not int"):
        fp8.attach(made, optimizer=3)
    runtime = fp8.attach(made, optimizer=optimizer, strict=True)
    for step in range(2):
        loss_of(made, step).backward()
        assert optimizer.step() == "stepped"
        assert torch.equal(runtime.descales, exact(made))
    del runtime
    assert "step" not in vars(optimizer)


def test_a_container_that_steps_several_optimizers():
    """As torchtitan's: an Optimizer whose step() steps those of the model's parts."""

    class Container(torch.optim.Optimizer):
        def __init__(self, parts):
            self.parts = [torch.optim.SGD(part, lr=0.5) for part in parts]
            super().__init__([p for part in parts for p in part], {})

        def step(self, closure=None):
            for each in self.parts:
                each.step()

    made = model()
    parameters = list(made.parameters())
    optimizer = Container([parameters[::2], parameters[1::2]])
    runtime = fp8.attach(made, policy="delayed-te", optimizer=optimizer, strict=True)
    for step in range(3):
        loss_of(made, step).backward()
        optimizer.step()
        made.zero_grad()
    assert runtime._steps == 3
    runtime.check()


def test_a_scheduler_and_a_saved_optimizer():
    made = model()
    optimizer = ADAMW(made.parameters(), lr=0.1)
    runtime = fp8.attach(made, optimizer=optimizer, strict=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in range(2):
        loss_of(made, step).backward()
        optimizer.step()
        schedule.step()
    assert torch.equal(runtime.descales, exact(made))
    pickle.loads(pickle.dumps(copy.deepcopy(optimizer))).step()
    again = ADAMW(made.parameters(), lr=0.1)
    again.load_state_dict(optimizer.state_dict())


def test_the_trainer(tmp_path):
    import transformers

    made = model()
    runtime = fp8.attach(made, strict=True)
    tokens = [{"input_ids": x, "labels": x} for x in batch(0)]
    arguments = transformers.TrainingArguments(tmp_path, max_steps=3, report_to=[], use_cpu=True, save_strategy="no", learning_rate=0.1)
    monitor = fp8.TrainerMonitor(runtime, None)
    with pytest.warns(RuntimeWarning, match="no logit bounds"):
        transformers.Trainer(made, arguments, train_dataset=tokens, callbacks=[monitor]).train()
    assert torch.equal(runtime.descales, exact(made)) and runtime._steps == 3
    # With the optimizer, which the Trainer is given too.
    made = model()
    optimizer = ADAMW(made.parameters(), lr=0.1)
    runtime = fp8.attach(made, optimizer=optimizer, strict=True)
    trainer = transformers.Trainer(made, arguments, train_dataset=tokens, optimizers=(optimizer, None))
    trainer.train()
    assert torch.equal(runtime.descales, exact(made)) and runtime._steps == 3


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.made, self.at_start = model(), []

        def configure_optimizers(self):
            optimizer = ADAMW(self.made.parameters(), lr=0.1)
            self.runtime = fp8.attach(self.made, optimizer=optimizer, strict=True)
            return optimizer

        def training_step(self, tokens, _):
            self.at_start.append(torch.equal(self.runtime.descales, exact(self.made)))
            return self.made(tokens, labels=tokens).loss

    module = Module()
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, accumulate_grad_batches=2,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.cat([batch(step) for step in range(6)]), batch_size=2))
    assert module.at_start == [True] * 6 and module.runtime._steps == 3
    assert torch.equal(module.runtime.descales, exact(module.made))
    module.runtime.check()


def test_a_guard_ends_the_steps_that_it_skips():
    runs = []
    for follows in (True, False):
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
        runtime = fp8.attach(made, policy="auto-c", optimizer=optimizer if follows else None, strict=True)
        guard = fp8.Guard(runtime, optimizer, patience=1, every=2)
        for step in range(6):
            loss = loss_of(made, step)
            (loss * float("nan") if step == 4 else loss).backward()
            if guard.step(loss * float("nan") if step == 4 else loss, 1.0):
                optimizer.step()
            optimizer.zero_grad()
            if not follows:
                runtime.refresh()
        assert guard.restored == 1
        runtime.check()
        runs.append((runtime.descales.clone(), runtime.state_dict()["state"]))
    assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]


def test_an_optimizer_outlives_its_runtime():
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    runtime = fp8.attach(made, optimizer=optimizer)
    hooks = len(optimizer._optimizer_step_post_hooks)
    del runtime
    assert (hooks, len(optimizer._optimizer_step_post_hooks)) == (1, 0)
    assert not made._forward_hooks and not made._load_state_dict_post_hooks
    optimizer.step()


# ---- loaded weights


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("follows", [False, True])
def test_loaded_weights_get_their_scales(assign, follows):
    made, other = model(), model(seed=1)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5) if follows else None
    runtime = fp8.attach(made, policy="geometry", optimizer=optimizer, strict=True)
    loss_of(made, 0)
    seen = runtime.stats()["amax"]
    made.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(runtime.descales, exact(other))
    # That ended no step.
    assert (runtime.stats()["amax"] == seen).all()
    loss_of(made, 0)
    runtime.check()


def test_a_resumed_run_goes_on_with_the_same_bits():
    def run(steps, saved=None):
        made = model()
        optimizer = ADAMW(made.parameters(), lr=0.1)
        runtime = fp8.attach(made, policy="delayed-te", optimizer=optimizer, strict=True)
        if saved is not None:
            for part, state in zip((made, optimizer, runtime), saved):
                part.load_state_dict(state)
        for step in steps:
            loss_of(made, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [copy.deepcopy(part.state_dict()) for part in (made, optimizer, runtime)], runtime.descales

    whole, descales = run(range(4))
    half, _ = run(range(2))
    resumed, same = run(range(2, 4), half)
    assert torch.equal(descales, same) and whole[2]["state"] == resumed[2]["state"]
    assert all(torch.equal(x, y) for x, y in zip(whole[0].values(), resumed[0].values()))


def test_weights_that_the_runtime_cannot_follow_are_named_when_they_are_loaded():
    made = model()
    layers = fp8.find_layers(made)
    runtime = fp8.attach(made, layers=layers)
    with pytest.warns(RuntimeWarning, match="not those of the loaded weights: weights were replaced by others since attach"):
        made.load_state_dict({name: x.clone() for name, x in made.state_dict().items()}, assign=True)
    del runtime


# ---- weights that changed without a word


def changed_by_an_optimizer(made, kind="fused"):
    optimizer = OPTIMIZERS[kind](made.parameters())
    loss_of(made, 0).backward()
    optimizer.step()


def replaced(made):
    for parameter in made.parameters():
        parameter.data = parameter.data * 8


def one_head(made):
    for layer in made.model.layers:
        layer.self_attn.k_proj.weight.data[16:32] *= 3


def one_channel(made):
    for layer in made.model.layers:
        layer.input_layernorm.weight.data[5] = 2


WRITES = {
    **{f"a step, {kind}": lambda made, kind=kind: changed_by_an_optimizer(made, kind) for kind in OPTIMIZERS},
    "in place": grown,
    "other tensors": replaced,
    "one head": one_head,
    "one channel": one_channel,
    "half precision": lambda made: made.half(),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_forgotten_refresh_is_said_once_with_the_line_to_add(write):
    made = model()
    runtime = fp8.attach(made)
    loss_of(made, 0)
    WRITES[write](made)
    line = r"give the optimizer, as in attach\(model, optimizer=optimizer\), or call runtime.refresh\(\) after every optimizer.step\(\)"
    with pytest.warns(RuntimeWarning, match=f"{STALE}, so values can be out of range: {line}") as found:
        loss_of(made, 1)
        loss_of(made, 2)
    assert len(found) == 1
    with pytest.raises(sigmascale.SigmascaleError, match=STALE):
        runtime.check()
    runtime.refresh()
    runtime.check()


def test_strict_raises_in_every_forward_until_it_is_mended():
    made = model()
    runtime = fp8.attach(made, strict=True)
    loss_of(made, 0)
    grown(made)
    for step in range(2):
        with pytest.raises(sigmascale.SigmascaleError, match=STALE):
            loss_of(made, step)
    runtime.refresh()
    loss_of(made, 0)


def test_a_long_run_is_looked_at_in_one_of_a_few_forwards():
    made = model()
    runtime = fp8.attach(made)
    with torch.no_grad():
        for step in range(50):
            loss_of(made, step)
        grown(made)
        with pytest.warns(RuntimeWarning, match=STALE):
            for step in range(8):
                loss_of(made, step)
    del runtime


def test_a_look_is_a_few_launches_over_a_few_kilobytes():
    for layers in (2, 4):
        weights = fp8.attach(model(layers=layers))._weights
        looking, marking = Launches(), Launches()
        with looking:
            assert not weights.look()
        with marking:
            weights.mark()
        # Gathered, compared, reduced, taken in; read and cleared, which on a GPU is a copy of one byte.
        assert (looking.count, marking.count) == (6, 1)
        kept = [x for _, _, x in weights._groups]
        assert sum(x.numel() * x.element_size() for x in kept) <= layers * 4 * 4096


def test_refreshes_and_unchanged_weights_are_nothing_to_say():
    made = model()
    runtime = fp8.attach(made, policy="delayed-te", strict=True)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
    for step in range(4):
        loss_of(made, step).backward()
        # A step that changes nothing.
        optimizer.step()
        loss_of(made, step)
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        runtime.refresh()
        optimizer.param_groups[0]["lr"] = 0.0
    runtime.check()


def test_scales_of_each_call_have_no_weights_to_be_of():
    made = model()
    runtime = fp8.attach(made, policy="current", strict=True)
    loss_of(made, 0)
    grown(made)
    loss_of(made, 0)
    runtime.check()


def test_other_weights_for_a_call_are_found():
    """`functional_call` runs a model with other weights than its own."""
    made = model()
    runtime = fp8.attach(made, strict=True)
    others = {name: 8 * parameter.detach() for name, parameter in made.named_parameters()}
    with pytest.raises(sigmascale.SigmascaleError, match=STALE):
        torch.func.functional_call(made, others, (batch(0),))
    runtime.refresh()
    made(batch(0))


# ---- layers that run elsewhere

ELSEWHERE = r"layer 0, layer 1 of 2 made no attention call through sigmascale in the forward, and ran without FP8: call "
ELSEWHERE += r"model.set_attn_implementation\(sigmascale.torch.register\(\)\)"


def test_a_model_that_never_comes_here_is_named_once():
    made = model()
    made.set_attn_implementation("sdpa")
    runtime = fp8.attach(made)
    runtime.check()
    with pytest.warns(RuntimeWarning, match=ELSEWHERE) as found:
        loss_of(made, 0)
        loss_of(made, 1)
    assert len(found) == 1
    with pytest.raises(sigmascale.SigmascaleError, match=ELSEWHERE):
        runtime.check()
    made.set_attn_implementation(fp8.register())
    loss_of(made, 0)
    runtime.check()


def test_the_plans_of_a_later_runtime_are_no_other_place():
    made = model()
    first, second = fp8.attach(made, strict=True), fp8.attach(made, policy="delayed-te", strict=True)
    loss_of(made, 0)
    first.check()
    second.check()


def test_layers_that_run_elsewhere_are_told_from_the_others():
    made = model(layers=6)
    for layer in made.model.layers[1:]:
        layer.self_attn.config = copy.deepcopy(made.config)
        layer.self_attn.config._attn_implementation = "sdpa"
    runtime = fp8.attach(made, strict=True)
    with pytest.raises(sigmascale.SigmascaleError, match="^layer 1, layer 2, layer 3 and 2 other layers of 6 made no attention call"):
        loss_of(made, 0)
    del runtime


def test_compiled_models_are_seen_at_the_next_step():
    made = model()
    made.set_attn_implementation("sdpa")
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    runtime = fp8.attach(made, optimizer=optimizer)
    torch._dynamo.reset()
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    compiled(batch(0)).logits.sum().backward()
    with pytest.warns(RuntimeWarning, match=ELSEWHERE):
        optimizer.step()
    del runtime


def test_compiled_models_are_followed_without_a_break():
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    runtime = fp8.attach(made, optimizer=optimizer, strict=True)
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(made, backend=counted, fullgraph=True)
    for step in range(3):
        compiled(batch(step)).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(runtime.descales, exact(made))
    # Once: exact() attaches a second runtime, whose plans the modules use from then on.
    runtime.check()
    made.lm_head.weight.data.mul_(2)
    runtime.check()


# ---- copies, transforms and modes


def test_copies_and_pickles_of_an_attached_model_have_no_runtime():
    made = model()
    runtime = fp8.attach(made, optimizer=torch.optim.SGD(made.parameters(), lr=0.5))
    averaged = torch.optim.swa_utils.AveragedModel(made)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    for other in (copy.deepcopy(made), averaged.module, torch.load(file, weights_only=False)):
        with pytest.raises(sigmascale.ArgumentError, match=r"LlamaAttention has no plan: call sigmascale.torch.attach\(model\)"):
            other(batch(0))
        # Nothing of the copy reaches the runtime.
        grown(other)
        other.load_state_dict(other.state_dict())
        runtime.check()
    made(batch(0))
    runtime.check()


def test_two_models_with_the_same_modules_share_their_plans():
    made = model()
    runtime = fp8.attach(made, strict=True)
    other = type(made)(made.config)
    other.set_attn_implementation(fp8.register())
    other.model, other.lm_head = made.model, made.lm_head
    assert torch.equal(made(batch(0)).logits, other(batch(0)).logits)
    runtime.check()


def test_a_plan_of_another_model_is_refused_by_its_shape():
    made = model()
    runtime = fp8.attach(made, strict=True)
    q, k = torch.randn(1, 8, 8, 16), torch.randn(1, 8, 4, 16)
    with pytest.raises(sigmascale.MismatchError, match="pass the plan of this layer of this model"):
        fp8.attention(q, k, k, runtime.layers[0])


def test_gradients_of_gradients_raise():
    made = model()
    runtime = fp8.attach(made, strict=True)
    # The gradient of a sum needs none, and PyTorch's once_differentiable would drop it.
    x = torch.randn(1, 8, 4, 16, requires_grad=True)
    for reduce in (torch.Tensor.sum, lambda out: out.float().square().sum()):
        out = fp8.attention(x, x[:, :, :2], x[:, :, :2], runtime.layers[0])
        (grad,) = torch.autograd.grad(reduce(out), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no gradients of gradients: for penalties .*set_attn_implementation\\('sdpa'\\)"):
            grad.square().sum().backward()
    # A graph that nobody uses is no error.
    loss_of(made, 0).backward(create_graph=True)
    embedded = made.get_input_embeddings()(batch(0)).detach().requires_grad_()
    (grad,) = torch.autograd.grad(made(inputs_embeds=embedded).logits.float().logsumexp(-1).sum(), embedded, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        grad.norm().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_to_half(dtype):
    made = model()
    runtime = fp8.attach(made, strict=True)
    full = loss_of(made, 0)
    grads = torch.autograd.grad(full, list(made.parameters()))
    with torch.autocast("cpu", dtype):
        loss = loss_of(made, 0)
    lowered = torch.autograd.grad(loss, list(made.parameters()))
    assert abs(loss.item() - full.item()) < 0.02 * full.item()
    one, other = (torch.cat([x.flatten() for x in each]) for each in (grads, lowered))
    assert other.isfinite().all() and torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.99
    assert runtime.stats()["non_finite"].sum() == 0


def test_inference_mode_and_training_behind_it():
    with torch.inference_mode():
        made = model()
    trained = model()
    for one in (made, trained):
        with torch.inference_mode():
            runtime = fp8.attach(one, strict=True)
            first = one(batch(0)).logits
        with torch.no_grad():
            assert torch.equal(first, one(batch(0)).logits)
        runtime.check()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    runtime = fp8.attach(trained, optimizer=optimizer, strict=True)
    with torch.inference_mode():
        trained(batch(0))
    loss_of(trained, 0).backward()
    optimizer.step()
    with torch.inference_mode():
        trained(batch(0))
    assert torch.equal(runtime.descales, exact(trained))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_give_the_same_bits(reentrant):
    made = model()
    runtime = fp8.attach(made, strict=True)
    made.train()
    loss = loss_of(made, 0)
    loss.backward()
    expected = [p.grad.clone() for p in made.parameters()]
    made.zero_grad()
    made.gradient_checkpointing_enable({"use_reentrant": reentrant})
    made.enable_input_require_grads()
    again = loss_of(made, 0)
    again.backward()
    assert torch.equal(loss, again)
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, made.parameters()))
    runtime.check()


def test_a_model_that_has_moved_is_named():
    made = model()
    runtime = fp8.attach(made, strict=True)
    made.to("meta")
    with pytest.raises(sigmascale.ArgumentError, match="q is on meta and the plan of layer 0 on cpu: attach to the model again"):
        made(batch(0).to("meta"))
    with pytest.raises(sigmascale.ArgumentError, match="meta device and has no values: load the weights first"):
        runtime.refresh()
