"""The guard on the CPU: every rule, restores bit for bit, and what an exception leaves behind."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from recorded import equal, loss_of, model, values  # noqa: E402

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402
from sigmascale.torch import _points  # noqa: E402

KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adam with a tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), foreach=False),
}


class Run:
    """A model, its loop, and losses that fail where ``bad`` says."""

    def __init__(self, policy="geometry", kind="adamw", **options):
        self.model = model()
        self.runtime = fp8.attach(self.model, policy=policy, bound="worst-case", backend="emulated")
        self.optimizer = KINDS[kind](self.model.parameters())
        self.events = []
        options = {"every": 4, "patience": 2, "points": 1} | options
        told = lambda name, message: self.events.append(name)
        self.guard = fp8.Guard(self.runtime, self.optimizer, on_event=told, **options)

    def step(self, number, bad=False):
        loss = loss_of(self.model, number)
        (loss * math.nan if bad else loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.guard.step(loss, norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.runtime.refresh()

    def values(self):
        return values(self.optimizer, self.model, self.runtime)


def test_a_step_that_is_not_finite_is_skipped():
    run = Run(patience=9)
    run.step(0)
    before = run.values()
    for bad in (math.nan, math.inf, -math.inf):
        for loss, norm in ((bad, 1.0), (1.0, bad)):
            assert not run.guard.step(loss, norm) and run.guard.skipped
    assert equal(run.values(), before) and run.events == ["skip"] * 6
    assert run.guard.step(torch.tensor(1.0), 1.0) and not run.guard.skipped


def test_without_a_norm_the_gradients_are_looked_at():
    run = Run(patience=9)
    loss = loss_of(run.model, 0)
    loss.backward()
    assert run.guard.step(loss)
    next(run.model.parameters()).grad.view(-1)[3] = math.inf
    assert not run.guard.step(loss)
    assert all(parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.filterwarnings("ignore:.*outside the range:RuntimeWarning")
@pytest.mark.parametrize(
    "policy, kind",
    [(policy, "adamw") for policy in ("geometry", "delayed-te", "delayed-paper", "auto-c", "current")]
    + [("geometry", kind) for kind in KINDS if kind != "adamw"],
)
def test_a_restore_has_the_bits_of_a_run_that_skipped_that_step(policy, kind):
    """The point is that of step 4. One run skips step 4; the other goes on to step 7, fails twice, and comes back."""
    skipping, failing = Run(policy, kind, patience=9), Run(policy, kind)
    for step in range(4):
        skipping.step(step)
        failing.step(step)
    loss = loss_of(skipping.model, 4)
    loss.backward()
    skipping.optimizer.zero_grad()
    skipping.runtime.refresh()
    for step in (4, 5, 6):
        failing.step(step)
    failing.step(7, bad=True)
    assert failing.guard.restored == 0
    failing.step(8, bad=True)
    # Delayed scales do saturate here.
    events = [name for name in failing.events if name != "saturation"]
    assert failing.guard.restored == 1 and events == ["skip", "skip", "restore", "lower-rate"]
    assert equal(failing.values(), skipping.values())
    failing.guard.rate = 1.0
    for step in range(9, 12):
        skipping.step(step)
        failing.step(step)
    assert equal(failing.values(), skipping.values())


def test_addresses_stay_and_state_from_before_the_first_step_is_dropped():
    run = Run()
    addresses = [p.data_ptr() for p in run.model.parameters()]
    run.step(0)
    assert run.optimizer.state
    run.guard.restore()
    assert [p.data_ptr() for p in run.model.parameters()] == addresses and not run.optimizer.state


def test_the_rate_is_halved_inside_the_step_alone():
    run = Run(cooldown=3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 50)
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-2)
    other = torch.optim.lr_scheduler.CosineAnnealingLR(plain, 50)
    seen = []
    run.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    rates = []
    for step in range(10):
        if step == 3:
            run.guard.restore()
        before = run.optimizer.param_groups[0]["lr"]
        run.step(step)
        rates.append(seen[-1] / before)
        plain.step()
        schedule.step()
        other.step()
        assert run.optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert rates == [1, 1, 1, 0.5, 0.5, 1, 1, 1, 1, 1] and run.events[-1] == "raise-rate"


def test_a_rate_comes_back_after_a_step_that_raised():
    run = Run()
    run.step(0)
    run.guard.restore()
    broken = run.optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run.step(1)
    broken.remove()
    assert run.optimizer.param_groups[0]["lr"] == 0.005
    assert run.guard.step(1.0, 1.0) and run.optimizer.param_groups[0]["lr"] == 0.01


def test_a_loss_spike_is_restored_and_one_batch_is_not():
    run = Run(every=1000, patience=2, spike=7.0)
    noise = torch.Generator().manual_seed(0)
    calm = lambda: float(2.0 + 0.01 * torch.randn((), generator=noise))
    for _ in range(300):
        assert run.guard.step(calm(), 1.0)
    assert run.guard.step(2.2, 1.0) and run.guard.step(calm(), 1.0) and run.events == ["spike"]
    assert run.guard.step(2.2, 1.0) and not run.guard.step(2.2, 1.0)
    assert run.events[-2:] == ["restore", "lower-rate"] and run.guard.rate == 0.5
    off = Run(spike=None)
    assert all(off.guard.step(loss, 1.0) for loss in [2.0, 2.001] * 100 + [50.0] * 5)


def test_losses_that_hardly_vary_have_no_spikes():
    run = Run(patience=1)
    for number in range(150):
        run.guard.step(2.0, 1.0)
    # The next value in BF16.
    assert run.guard.step(2.015625, 1.0) and run.guard.step(2.0 + 1e-9, 1.0) and run.events == []
    assert not run.guard.step(2.1, 1.0) and run.events == ["spike", "restore", "lower-rate"]


def test_points_from_before_parameters_were_added_are_passed_over():
    run = Run(every=2, points=2)
    for number in range(3):
        run.step(number)
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    for number in range(3, 5):
        run.step(number)
    first, second = run.guard._points
    assert (first.step, second.step) == (2, 4)
    before = run.model.lm_head.weight.clone()
    run.step(5)
    run.step(6, bad=True)
    run.step(7, bad=True)
    assert run.guard.restored == 1 and list(run.guard._points) == [second]
    assert not torch.equal(run.model.lm_head.weight, before)
    # Where no point fits, each failure says so, and healthy steps go on.
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    run.step(8, bad=True)
    with pytest.raises(sigmascale.MismatchError, match="other parameters than at the restore point"):
        run.step(9, bad=True)
    run.optimizer.zero_grad()
    run.step(10)
    assert not run.guard.skipped


def test_points_are_kept_apart_and_the_oldest_is_restored():
    run = Run(points=2, every=2)
    for step in range(6):
        run.step(step)
    assert [point.step for point in run.guard._points] == [2, 4]
    run.guard.restore()
    assert [point.step for point in run.guard._points] == [2]


def test_it_ends_with_an_exception_when_nothing_helps():
    run = Run(restores=2, patience=1)
    run.step(0)
    before = Run()
    for step in (1, 2):
        run.step(step, bad=True)
    with pytest.raises(sigmascale.SigmascaleError, match="2 restores of step 0.*0.125"):
        run.step(3, bad=True)
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), before.model.parameters()))
    first = Run(restores=2, patience=1)
    first.step(0, bad=True)
    with pytest.raises(sigmascale.SigmascaleError, match="no restore point yet"):
        first.step(1, bad=True)


def test_an_interrupted_restore_is_completed_by_the_next_step(monkeypatch):
    run = Run()
    run.step(0)
    whole = _points.Point(0, run.runtime, run.optimizer)
    expected = run.guard._points[0]
    for step in range(1, 3):
        run.step(step)
    put, count = _points._put, [0]

    def failing(present, saved):
        count[0] += 1
        if count[0] == 9:
            raise KeyboardInterrupt
        return put(present, saved)

    monkeypatch.setattr(_points, "_put", failing)
    with pytest.raises(KeyboardInterrupt):
        run.guard.restore()
    monkeypatch.setattr(_points, "_put", put)
    assert run.guard._points[0] is expected and not run.guard.step(1.0, 1.0)
    other = Run()
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), other.model.parameters()))
    assert not run.optimizer.state and whole is not expected


def test_a_point_that_cannot_be_taken_leaves_the_earlier_ones(monkeypatch):
    run = Run()
    run.step(0)
    (point,) = run.guard._points
    monkeypatch.setattr(_points, "_saved", lambda value: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        run.guard.keep()
    assert list(run.guard._points) == [point]


def test_nothing_is_written_where_the_model_has_changed():
    run = Run()
    run.step(0)
    weights = [p.clone() for p in run.model.parameters()]
    run.model.lm_head.weight = torch.nn.Parameter(torch.zeros(8, 64))
    with pytest.raises(sigmascale.MismatchError, match=r"lm_head.weight .*.64, 64."):
        run.guard.restore()
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), weights) if a.shape == b.shape)


def test_a_store_of_the_users_own():
    made = []
    run = Run()
    run.guard.close()
    save = lambda: (made.append(len(made)), {k: v.clone() for k, v in run.model.state_dict().items()})[1]
    guard = fp8.Guard(run.runtime, run.optimizer, every=4, store=(save, run.model.load_state_dict))
    run.guard = guard
    run.step(0)
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    run.step(1)
    assert made == [0] and not torch.equal(before["lm_head.weight"], run.model.lm_head.weight)
    guard.restore()
    assert torch.equal(run.model.lm_head.weight, Run().model.lm_head.weight)


def test_with_a_scaler_its_scale_is_halved_once():
    run = Run(patience=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
    run.guard.scaler = scaler

    def step(number, factor=1.0, loss_value=None, unscale=True):
        loss = loss_of(run.model, number)
        scaler.scale(loss * factor).backward()
        norm = None
        if unscale:
            scaler.unscale_(run.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        taken = run.guard.step(loss if loss_value is None else loss_value, norm)
        if taken:
            scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        run.runtime.refresh()
        return taken

    assert step(0) and scaler.get_scale() == 1024.0
    assert not step(1, math.inf) and scaler.get_scale() == 512.0 and run.guard.restored == 1
    assert not step(2, math.inf, unscale=False) and scaler.get_scale() == 256.0
    # The loss alone is not finite: the scaler sees nothing, and the restore halves it.
    assert not step(3, loss_value=math.nan) and scaler.get_scale() == 128.0
    with pytest.warns(RuntimeWarning, match="loss scale 64 is below 128"):
        scaler.load_state_dict(scaler.state_dict() | {"scale": 64.0})
        step(4)
    assert run.events.count("loss-scale") == 1


def test_a_scale_that_falls_for_a_hundred_steps_is_a_warning():
    run = Run(every=10**6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.zeros(()))
    run.guard.scaler = scaler
    with pytest.warns(RuntimeWarning, match="65536 to 16384 .*100 steps"):
        for step in range(120):
            if step in (40, 80):
                scaler.load_state_dict(scaler.state_dict() | {"scale": scaler.get_scale() / 2})
            run.guard.step(1.0, 1.0)
    assert run.events == ["loss-scale"]


def test_saturation_is_a_warning_until_it_is_gone():
    run = Run(policy="delayed-te", every=1)
    run.step(0)
    with pytest.warns(RuntimeWarning, match="outside the range of E4M3") as found:
        for step in range(1, 4):
            run.runtime.descales[0, :3] /= 1e4
            run.step(step)
        run.step(4)
    assert run.events == ["saturation"] and len(found) == 1


def test_events_are_in_the_record(tmp_path):
    import json

    run = Run(patience=1)
    with fp8.Monitor(run.runtime, tmp_path / "run.jsonl", every=2) as monitor:
        run.guard.monitor = monitor
        for step in range(4):
            run.step(step, bad=step == 2)
            monitor.step(loss=1.0, skipped=run.guard.skipped)
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    found = [(row["step"], row["name"]) for row in rows if row["kind"] == "event"]
    assert [pair for pair in found if pair[1] != "alarm"] == [(2, "skip"), (2, "restore"), (2, "lower-rate")]
    assert [row["step"] for row in rows if row.get("skipped")] == [2]


def test_wrong_arguments_are_named():
    run = Run()
    for arguments, message in [
        ((run.model, run.optimizer), "runtime"),
        ((run.runtime, run.model), "optimizer"),
    ]:
        with pytest.raises(TypeError, match=message):
            fp8.Guard(*arguments)
    for options in ({"every": 0}, {"saturation": 2.0}, {"spike": -1.0}):
        with pytest.raises(sigmascale.ArgumentError, match=next(iter(options))):
            fp8.Guard(run.runtime, run.optimizer, **options)
    with pytest.raises(TypeError, match="store"):
        fp8.Guard(run.runtime, run.optimizer, store=print)
    with pytest.raises(sigmascale.ArgumentError, match="loss has shape"):
        run.guard.step(torch.zeros(2), 1.0)
    with pytest.raises(sigmascale.SigmascaleError, match="no restore point"):
        run.guard.restore()
