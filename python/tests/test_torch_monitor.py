"""The monitor on the CPU: every column against another way to compute it, the file, sinks, and the Trainer."""

import json
import math
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np  # noqa: E402
import plain  # noqa: E402
from recorded import Launches, batch, loss_of, model  # noqa: E402

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402
from sigmascale.torch import _calls, _norms, _residual, _samples, _sinks, _terms  # noqa: E402


def lines(path, kind=None):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if kind in (None, row["kind"])]


@pytest.fixture
def run(tmp_path):
    made = model()
    runtime = fp8.attach(made, bound="worst-case")
    return made, runtime, tmp_path / "run.jsonl"


def trained(made, runtime, monitor, steps, refresh_first=False):
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for step in range(steps):
        loss = loss_of(made, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if refresh_first:
            runtime.refresh()
        monitor.step(loss=loss, lr=0.1)
        if not refresh_first:
            runtime.refresh()


def test_lines_are_those_of_the_format(run):
    made, runtime, path = run
    with fp8.Monitor(runtime, path, every=3, name="small") as monitor:
        trained(made, runtime, monitor, 5)
        monitor.event("note", "a sentence", layer=1, head=2)
    first, *rest = lines(path)
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 16, "width": 64}
    assert first["format"] == 1 and first["source"] == "monitor" and first["name"] == "small"
    assert first["layers"] == [{"layer": 0} | heads, {"layer": 1} | heads]
    assert [row["step"] for row in rest if row["kind"] == "step"] == [0, 1, 2, 3, 4]
    layers = [row for row in rest if row["kind"] == "layer"]
    assert [(row["step"], row["layer"]) for row in layers] == [(0, 0), (0, 1), (3, 0), (3, 1)]
    names = "sigma sigma_rope bound w_q repeated repeated_in_tile delta_bias error_sign entropy logit_max utilization saturated".split()
    for row in layers:
        assert set(row) == {"kind", "step", "layer", *names} and all(len(row[name]) == 4 for name in names)
        assert all(seen <= bound for seen, bound in zip(row["logit_max"], row["bound"]))
    assert rest[-1] == {"kind": "event", "step": 5, "name": "note", "layer": 1, "head": 2, "message": "a sentence"}


def test_columns_are_what_the_runtime_says(run):
    made, runtime, path = run
    monitor = fp8.Monitor(runtime, path, every=1, rows=0)
    loss_of(made, 0).backward()
    stats, logits = runtime.stats(), runtime.logits.clone()
    monitor.step()
    layer = lines(path, "layer")[1]
    seen = np.maximum(stats["logit_max"][1], -stats["logit_min"][1])
    assert np.allclose(layer["logit_max"], seen, rtol=1e-6)
    peak = stats["peak"][1] / 448.0
    # amax of q is of a group of query heads there, and of each here.
    whole = np.repeat(peak, 2, axis=1).max(axis=0)
    assert np.allclose(np.max(layer["utilization"]), whole.max(), rtol=1e-6)
    assert (np.array(layer["utilization"]) <= whole * (1 + 1e-6)).all()
    for name, place in (("sigma_rope", 0), ("bound", 2)):
        own = logits[1, :, place].double().numpy()
        assert (layer[name] >= own).all() and np.allclose(layer[name], own, rtol=2e-6)
    q, k = (getattr(made.model.layers[1].self_attn, f"{name}_proj").weight.detach().double() for name in "qk")
    gain = made.model.layers[1].input_layernorm.weight.detach().double()
    q, k = ((x * gain).unflatten(0, (-1, 16)) for x in (q, k))
    norms = [float(torch.linalg.matrix_norm(q[h].T @ k[h // 2], 2)) for h in range(4)]
    assert np.allclose(layer["sigma"], norms, rtol=1e-3) and (np.array(layer["sigma"]) >= np.array(norms) * (1 - 1e-9)).all()
    assert (np.array(layer["sigma_rope"]) >= np.array(norms) * (1 - 1e-6)).all()
    bounds = fp8.max_logit_bound(runtime)
    assert list(bounds) == [0, 1] and np.array_equal(bounds[1], logits[1, :, 2].double().numpy())
    weights = made.model.layers[1].self_attn.q_proj.weight.detach().double().unflatten(0, (4, 16))
    exact = torch.linalg.matrix_norm(weights, ord=2).numpy()
    assert (layer["w_q"] >= exact).all() and np.allclose(layer["w_q"], exact, rtol=1.1e-3)


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 64, 64), (1, 128, 24)])
@pytest.mark.parametrize("kind", ["random", "one", "equal", "zero"])
def test_norms_of_weights_are_upper_bounds(shape, kind):
    heads, d, columns = shape
    weight = torch.randn(heads * d, columns, generator=torch.Generator().manual_seed(d))
    if kind == "one":
        weight = weight[:, :1] * weight[:1] * 1e-20
    elif kind == "equal":
        # All singular values are one: the loosest case.
        weight = torch.cat([torch.eye(d, columns) for _ in range(heads)])
    elif kind == "zero":
        weight = torch.zeros_like(weight)
    layer = fp8.Layer(q=weight, k=weight, v=weight, n_q_heads=heads, n_kv_heads=heads)
    exact = torch.linalg.matrix_norm(weight.double().unflatten(0, (heads, d)), ord=2)
    (found,) = _norms.query_norms([layer])
    assert (found >= exact * (1 - 1e-15)).all() and (found <= exact * 1.001).all()


def test_saturation_is_counted_over_all_calls(run):
    made, runtime, path = run
    monitor = fp8.Monitor(runtime, path, every=1, rows=0)
    seen = {}
    keep = lambda q, k, v, *_: seen.setdefault("qkv", []).append([x.detach() for x in (q, k, v)])
    _calls.observe(runtime.layers[0].key, keep)
    runtime.descales[0, :3] /= 20
    for step in range(2):
        loss_of(made, step).backward()
    monitor.step()
    for head, share in enumerate(lines(path, "layer")[0]["saturated"]):
        over = count = 0
        for operands in seen["qkv"]:
            for x, place, own in zip(operands, range(3), (head, head // 2, head // 2)):
                # As the cast multiplies.
                scaled = x[:, :, own].float() * runtime.descales[0, place, head // 2].reciprocal()
                over, count = over + int((scaled.abs() > 448).sum()), count + scaled.numel()
        assert over > 0 and math.isclose(share, over / count, rel_tol=1e-6)


@pytest.mark.parametrize("refresh_first", [True, False])
def test_what_happens_between_two_lines_is_in_the_later_one(run, refresh_first):
    made, runtime, path = run
    monitor = fp8.Monitor(runtime, path, every=4, rows=0)
    peaks = []
    weight = made.model.layers[0].self_attn.q_proj.weight.data
    for step in range(9):
        if step == 2:
            weight *= 3
        loss = loss_of(made, step)
        if step == 2:
            weight /= 3
        stats = runtime.stats()
        peaks.append(np.maximum(stats["logit_max"][0], -stats["logit_min"][0]))
        if refresh_first:
            runtime.refresh()
        monitor.step(loss=loss)
        if not refresh_first:
            runtime.refresh()
    found = [row["logit_max"] for row in lines(path, "layer") if row["layer"] == 0]
    for line, steps in zip(found, (range(0, 1), range(1, 5), range(5, 9))):
        assert np.allclose(line, np.max([peaks[step] for step in steps], axis=0), rtol=1e-6)
    assert np.max(found[1]) > 2 * np.max(found[2])


def naive(q, k, v, grad, out, rows, scale, visible, cap, sinks):
    """Logits, weights and deltas of some rows one by one, in f64."""
    n_q, group = q.shape[1], q.shape[1] // k.shape[1]
    table = np.zeros((6, n_q))
    for head in range(n_q):
        repeated, tiled, entropy, delta, reference, largest, signs = [], [], [], [], [], [], []
        for row in rows:
            keys = [j for j in range(k.shape[0]) if visible(row, j)]
            if not keys:
                continue
            s = np.array([float(q[row, head] @ k[j, head // group]) * scale for j in keys])
            s = (cap * np.tanh(s / cap) if cap else s).astype(np.float32)
            places = [keys[i] for i in np.flatnonzero(s == s.max())]
            repeated.append(len(places) > 1)
            tiled.append(len({p // 128 for p in places}) < len(places))
            p = np.exp(s.astype(np.float64) - s.max())
            p /= p.sum() + (np.exp(float(sinks[head]) - s.max()) if sinks is not None else 0.0)
            entropy.append(-sum(x * np.log(x) for x in p if x > 0))
            exact = sum(x * v[j, head // group].numpy() for x, j in zip(p, keys))
            delta.append(float(grad[row, head] @ out[row, head]))
            reference.append(float(grad[row, head].numpy() @ exact))
            signs.append(np.mean(np.sign(grad[row, head].numpy()) * np.sign(out[row, head].numpy() - exact)))
            largest.append(np.abs(s).max())
        bias = sum(np.subtract(delta, reference)) / np.abs(reference).sum()
        table[:, head] = np.mean(repeated), np.mean(tiled), bias, np.mean(signs), np.mean(entropy), max(largest)
    return table


@pytest.mark.parametrize("case", ["causal", "full", "window", "capped", "sinks", "packed", "groups"])
def test_sampled_rows_agree_with_a_loop(case, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    length, keys, n_q, n_kv, d, batch_size, rows = 40, 300, 4, 2, 16, 2, 7
    make = lambda n, heads: torch.randn(batch_size, n, heads, d, generator=generator)
    eight = [(x * 40).to(torch.float8_e4m3fn) for x in (make(length, n_q), make(keys, n_kv), make(keys, n_kv))]
    # Keys that repeat: next to each other for one KV head, and tiles apart for the other.
    k = eight[1].view(torch.uint8)
    k[:, 1::2, 0] = k[:, ::2, 0]
    k[:, 150:, 1] = k[:, :150, 1]
    descales = [torch.rand(batch_size, n_kv, generator=generator) * 0.02 + 0.01 for _ in range(3)]
    grad, out = make(length, n_q).bfloat16(), make(length, n_q).bfloat16()
    options = {"causal": case == "causal"}
    if case == "window":
        options |= {"causal": True, "window_left": 9}
    options |= {"soft_cap": 2.0} if case == "capped" else {}
    options |= {"sinks": torch.randn(n_q, generator=generator)} if case == "sinks" else {}
    if case == "packed":
        places = [
            torch.tensor(x, dtype=torch.int32) for x in ([0, 40, 55], [30, 50, 80], [0, 300, 420], [150, 390, 600])
        ]
        options["sequences"] = _terms.Sequences(*places, 40, 300)
    if case == "groups":
        monkeypatch.setattr(_samples, "_BYTES", 1)
    terms = _terms.Terms(scale=0.3, **{"causal": False} | options)
    for turn in range(3):
        found = sampled(grad, eight, descales, out, terms, rows, turn)
        entry = turn % batch_size
        chosen = [int((i + turn * 0.6180339887498949 % 1.0) * length / rows) for i in range(rows)]
        spans = {0: [(0, 30, 0, 150)], 1: [(0, 10, 0, 90), (15, 40, 120, 300)]}[entry]

        def visible(i, j):
            if case == "packed":
                for a, b, c, e in spans:
                    if a <= i < b:
                        return c <= j < e
                return False
            here = i + keys - length
            return {"causal": j <= here, "window": here - 9 <= j <= here}.get(case, True)

        one = lambda x, d: x[entry].double() * d[entry].repeat_interleave(x.shape[2] // n_kv).view(-1, 1)
        q, k, v = (one(x.float(), d.double()) for x, d in zip(eight, descales))
        expected = naive(
            q, k, v, grad[entry].double(), out[entry].double(), chosen, 0.3, visible, terms.soft_cap, terms.sinks
        )
        assert np.allclose(found.numpy(), expected, rtol=1e-5, atol=1e-9), (turn, found.numpy() - expected)
        # Several calls together are each by themselves, and an output is that with what its rounding took.
        other = sampled(grad, eight, descales, _residual.value(out, torch.tensor(100, dtype=torch.int8)), terms, rows, turn)
        places = _samples.places_of(length, rows, turn, q.device)
        rests = [torch.full(out.shape, code, dtype=torch.int8) for code in (0, 100, 0)]
        taken = [_samples.take(grad, eight, descales, out, terms, places, turn, rest) for rest in rests]
        ((indices, together),) = _samples.measure(dict(zip((4, 0, 7), taken)))
        assert indices == [4, 0, 7] and torch.allclose(together, torch.stack([found, other, found]), rtol=1e-12, atol=0)
        if case in ("full", "groups"):
            assert found[0].tolist() == [1.0] * 4 and found[1].tolist() == [1.0, 1.0, 0.0, 0.0]


def sampled(grad, operands, descales, out, terms, rows, turn):
    """Of one call."""
    places = _samples.places_of(grad.shape[1], rows, turn, grad.device)
    ((_, found),) = _samples.measure({0: _samples.take(grad, operands, descales, out, terms, places, turn)})
    return found[0]


def test_delta_bias_is_the_share_by_which_outputs_are_off():
    generator = torch.Generator().manual_seed(5)
    q, k, v = ((torch.randn(1, 32, 2, 16, generator=generator) * 50).to(torch.float8_e4m3fn) for _ in range(3))
    descales, terms = [torch.full((1, 2), 0.02)] * 3, _terms.Terms(causal=True, scale=0.25)
    exact, _ = plain.attention(*map(plain.held, (q, k, v), descales), scale=0.25)
    # A gradient along the output: every delta is positive, and 1 % of the output is 1 % of delta.
    found = sampled(exact, (q, k, v), descales, exact * 0.99, terms, 32, 0)
    assert torch.allclose(found[2], torch.full((2,), -0.01, dtype=torch.float64), rtol=1e-3)
    # Every error has the other sign than its gradient.
    assert torch.allclose(found[3], torch.full((2,), -1.0, dtype=torch.float64))


def test_values_on_a_device_wait_for_the_next_layer_lines(run):
    """What stands for a device here is a tensor that says it is on one."""
    made, runtime, path = run
    monitor = fp8.Monitor(runtime, path, every=3)
    lines_of, read = monitor._lines, []

    class Remote(torch.Tensor):
        def __float__(self):
            read.append(1)
            return 7.0

    row = {"kind": "step", "step": 0, "loss": torch.zeros(()).as_subclass(Remote)}
    lines_of.pending.append(row)
    monitor.next_step = 1
    monitor.step(loss=1.0)
    monitor.step(loss=2.0)
    assert not read and len(lines(path)) == 1
    monitor.step(loss=3.0)
    assert [row["loss"] for row in lines(path, "step")] == [0.0, 1.0, 2.0, 3.0] and not read


def test_layers_are_measured_together(tmp_path, monkeypatch):
    """Of small kernels the launches are what a recorded step costs."""
    counts, taken, take = {}, [], _samples.take

    def counted(*args):
        with Launches() as launches:
            kept = take(*args)
        taken.append(launches.count)
        return kept

    monkeypatch.setattr(_samples, "take", counted)
    for layers in (2, 5):
        made = model(layers=layers)
        monitor = fp8.Monitor(fp8.attach(made, bound="worst-case"), tmp_path / f"{layers}.jsonl", every=2)
        loss_of(made, 0).backward()
        with Launches() as recorded:
            monitor.step()
        with Launches() as between:
            monitor.step()
        counts[layers] = recorded.count, between.count
    assert counts[2] == counts[5] and counts[2][0] <= 300 and counts[2][1] == 0, counts
    # Rows of four tensors, k, v and descales.
    assert taken == [7] * 7


def test_a_closed_monitor_leaves_nothing_behind(run):
    made, runtime, path = run
    monitor = fp8.Monitor(runtime, path)
    loss_of(made, 0).backward()
    monitor.close()
    monitor.close()
    assert not runtime.before_refresh and not any(
        _calls._OBSERVERS.get(plan.key) for plan in runtime.layers
    )
    with pytest.raises(sigmascale.SigmascaleError, match="closed"):
        monitor.step()
    other = fp8.Monitor(runtime, None)
    del other
    assert not runtime.before_refresh


def test_a_file_is_never_overwritten_and_goes_on_where_it_ended(run):
    made, runtime, path = run
    with fp8.Monitor(runtime, path, every=2) as monitor:
        trained(made, runtime, monitor, 2)
    with pytest.raises(sigmascale.ArgumentError, match="resume=True"):
        fp8.Monitor(runtime, path)
    before = path.read_text()
    path.write_text(before + '{"kind":"step","st')
    with fp8.Monitor(runtime, path, every=2, resume=True, first_step=2) as monitor:
        trained(made, runtime, monitor, 1)
    assert path.read_text().startswith(before)
    assert [row["step"] for row in lines(path, "step")] == [0, 1, 2] and len(lines(path, "run")) == 1
    other = model(layers=1)
    runtime = fp8.attach(other)
    with pytest.warns(RuntimeWarning, match="bound"), pytest.raises(sigmascale.ArgumentError, match="other layers"):
        fp8.Monitor(runtime, path, resume=True)
    path.write_text("nonsense\n")
    with pytest.raises(sigmascale.ArgumentError, match="does not begin"):
        fp8.Monitor(fp8.attach(other, bound="worst-case"), path, resume=True)
    assert path.read_text() == "nonsense\n"


def test_numbers_that_json_cannot_hold_are_null(run):
    made, runtime, path = run
    monitor = fp8.Monitor(runtime, path, every=1)
    with torch.no_grad():
        made.model.layers[1].self_attn.q_proj.weight[:16] = math.nan
    monitor.step(loss=torch.tensor(math.nan), grad_norm=math.inf)
    (step,) = lines(path, "step")
    assert step == {"kind": "step", "step": 0, "loss": None, "grad_norm": None}
    assert lines(path, "layer")[1]["w_q"][0] is None and lines(path, "layer")[1]["w_q"][1] > 0
    assert "logit_max" not in lines(path, "layer")[0]


def test_wrong_arguments_are_named(run):
    made, runtime, path = run
    with pytest.raises(TypeError, match="runtime"):
        fp8.Monitor(made, path)
    with pytest.raises(sigmascale.ArgumentError, match="every"):
        fp8.Monitor(runtime, path, every=0)
    with pytest.raises(TypeError, match="sink"):
        fp8.Monitor(runtime, path, sinks=[3])
    assert not path.exists() and not runtime.before_refresh
    monitor = fp8.Monitor(runtime, path)
    with pytest.raises(sigmascale.ArgumentError, match="loss has shape"):
        monitor.step(loss=torch.zeros(2))
    with pytest.raises(sigmascale.UnsupportedError, match="bound='worst-case'"):
        fp8.max_logit_bound(fp8.attach(made))


class Writer:
    def __init__(self):
        self.rows = []

    def add_scalar(self, name, value, step):
        self.rows.append((name, value, step))


class WandbRun:
    def __init__(self):
        self.rows, self.metrics = [], []

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, data):
        self.rows.append(data)


def test_sinks_get_the_largest_value_of_each_layer(run):
    made, runtime, path = run
    writer, wandb = Writer(), WandbRun()
    monitor = fp8.Monitor(runtime, path, every=2, sinks=[writer, wandb])
    trained(made, runtime, monitor, 3)
    layer = lines(path, "layer")[-1]
    told = {name: value for name, value, step in writer.rows if step == 2}
    assert told["sigmascale/w_q/layer 1"] == max(layer["w_q"])
    assert told["sigmascale/entropy/layer 1"] == min(layer["entropy"]) and told["sigmascale/lr"] == 0.1
    assert wandb.metrics[1] == ("sigmascale/*", "sigmascale/step")
    assert [row["sigmascale/step"] for row in wandb.rows] == [0, 2]
    assert wandb.rows[1] == told | {"sigmascale/step": 2}


def test_tensorboard_itself_reads_them_back(run, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made, runtime, path = run
    with fp8.Monitor(runtime, path, every=1, sinks="tensorboard") as monitor:
        trained(made, runtime, monitor, 2)
    read = EventAccumulator(str(tmp_path / "run")).Reload()
    found = read.Scalars("sigmascale/bound/layer 0")
    expected = [max(row["bound"]) for row in lines(path, "layer") if row["layer"] == 0]
    assert np.allclose([event.value for event in found], expected) and [event.step for event in found] == [0, 1]


def test_a_gradient_checkpoint_is_sampled_once(run):
    made, runtime, path = run
    made.gradient_checkpointing_enable({"use_reentrant": False})
    made.train()
    monitor = fp8.Monitor(runtime, path, every=1)
    trained(made, runtime, monitor, 1)
    assert all("entropy" in row for row in lines(path, "layer"))
    assert not _calls._BACKWARDS


def test_calls_without_gradients_are_not_sampled(run):
    made, runtime, path = run
    monitor = fp8.Monitor(runtime, path, every=1)
    with torch.no_grad():
        loss_of(made, 0)
    monitor.step()
    assert all("entropy" not in row and "logit_max" in row for row in lines(path, "layer"))


def test_alarms_are_raised_written_and_cleared(run):
    made, runtime, path = run
    told = []
    monitor = fp8.Monitor(runtime, path, every=1, on_alarm=told.append)
    for step in range(40):
        monitor.step(loss=math.nan if step == 20 else 2.0)
    events = lines(path, "event")
    assert told == events and any(event["alarm"] == "non-finite-loss" for event in events)


def test_the_trainer_records_its_run(run, tmp_path):
    pytest.importorskip("accelerate")
    import transformers

    made, runtime, path = run
    data = [{"input_ids": batch(i)[0], "labels": batch(i)[0]} for i in range(16)]
    options = dict(output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, max_steps=6, logging_steps=2)
    options |= dict(report_to=[], use_cpu=True, save_strategy="no", learning_rate=1e-3, disable_tqdm=True)
    before = runtime.descales.clone()
    callback = fp8.TrainerMonitor(runtime, path, every=3)
    transformers.Trainer(
        made, transformers.TrainingArguments(**options), train_dataset=data, callbacks=[callback]
    ).train()
    steps = lines(path, "step")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [("loss" in row) for row in steps] == [False, True] * 3
    assert all("grad_norm" in row for row in steps[1::2]) and steps[0]["lr"] == 1e-3 > steps[5]["lr"] > 0
    layers = lines(path, "layer")
    assert [row["step"] for row in layers] == [3, 3, 6, 6] and all("entropy" in row for row in layers)
    assert not torch.equal(before, runtime.descales) and callback.monitor is None


def test_scales_are_those_of_weights_that_the_trainer_loads(run, tmp_path):
    """Those of a checkpoint from which it goes on, and of the best one at the end."""
    pytest.importorskip("accelerate")
    import transformers

    made, runtime, path = run
    data = [{"input_ids": batch(i)[0], "labels": batch(i)[0]} for i in range(16)]
    options = dict(output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, learning_rate=0.05)
    options |= dict(report_to=[], use_cpu=True, disable_tqdm=True, eval_strategy="steps", eval_steps=1, save_steps=1)

    class Trainer(transformers.Trainer):
        def evaluate(self, *_, **__):
            # The earlier, the better.
            return {"eval_loss": float(self.state.global_step)}

    trained_by = lambda net, callback, data, **more: Trainer(
        net, transformers.TrainingArguments(**options | more), train_dataset=data, eval_dataset=data, callbacks=[callback]
    )
    trained_by(made, fp8.TrainerMonitor(runtime, path, every=1), data, max_steps=2).train()
    trained_to = runtime.descales.clone()

    class First(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            seen.append(again.descales.clone())

    seen, other = [], model()
    again = fp8.attach(other, bound="worst-case")
    assert not torch.equal(again.descales, trained_to)
    callback = fp8.TrainerMonitor(again, path, every=1, resume=True)
    trainer = trained_by(other, callback, data, max_steps=4, load_best_model_at_end=True)
    trainer.add_callback(First())
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert len(seen) == 2 and torch.equal(seen[0], trained_to)
    assert trainer.state.best_model_checkpoint.endswith("-3")
    now = again.descales.clone()
    again.refresh()
    assert torch.equal(now, again.descales)


def test_scalars_leave_out_what_is_not_finite():
    layer = {"kind": "layer", "step": 3, "layer": 7, "w_q": [None, 1.0], "delta_bias": [-3.0, 2.0], "sigma": [None]}
    found = _sinks.scalars({"kind": "step", "step": 3, "loss": math.nan}, [layer])
    assert found == {"sigmascale/skipped": 0.0, "sigmascale/w_q/layer 7": 1.0, "sigmascale/delta_bias/layer 7": -3.0}


def test_the_training_example_records_its_run(tmp_path):
    root = pathlib.Path(__file__).resolve().parents[2]
    (tmp_path / "text").mkdir()
    source = (root / "README.md").read_text()
    (tmp_path / "text" / "a.md").write_text(source * (1 + 120_000 // len(source)))
    record = tmp_path / "run.jsonl"
    small = "--device cpu --width 32 --layers 1 --heads 2 --kv-heads 1 --steps 8 --every 2 --seq-len 16 --batch 1 --warmup 2"
    script = [sys.executable, str(root / "python" / "examples" / "train_gpt.py"), "--text", str(tmp_path / "text")]
    # The runtime is made anew at step 5, and the record goes on.
    asked = [*script, *small.split(), "--resume", "5", "--monitor", str(record), "--guard", "--log", str(tmp_path / "log")]
    subprocess.run(asked, check=True)
    assert [row["step"] for row in lines(record, "step")] == list(range(8))
    assert [row["step"] for row in lines(record, "layer")] == [0, 2, 4, 6]
    found = sigmascale.diagnose(record)
    assert found["verdict"] == "calm" and len(found["heads"]) == 2 and found["heads"][0]["w_q"]["last"] > 0
    control = [*script, "--device", "cpu", "--policy", "bf16", "--monitor", "x"]
    refused = subprocess.run(control, capture_output=True, text=True)
    assert refused.returncode == 1 and "for FP8 attention" in refused.stderr
