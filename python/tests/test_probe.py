"""The probe finds planted faults and passes the right call."""

import emulated
import numpy as np
import pytest

import sigmascale

NUMPY = {"framework": "numpy", "seq_len": 64}
CHANGES = {
    "dropped": np.ones_like,
    "inverted": lambda descale: 1 / descale,
    "permuted": lambda descale: descale[:, ::-1],
    "squared": lambda descale: descale * descale,
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (6, 1), (8, 4)])
def test_the_right_call_passes(causal, heads):
    call = lambda *arguments: emulated.attention(*arguments, causal=causal)
    report = sigmascale.probe(call, n_q_heads=heads[0], n_kv_heads=heads[1], **NUMPY)
    assert report.ok and report.worst_error < 1e-4, report
    assert str(report).startswith("every descale is applied")


@pytest.mark.parametrize("fault", CHANGES)
@pytest.mark.parametrize("operand", "qkv")
def test_a_fault_is_named_at_its_operand(operand, fault):
    call = emulated.faulty(emulated.attention, 3 + "qkv".index(operand), CHANGES[fault])
    report = sigmascale.probe(call, **NUMPY)
    expected = {name: "applied" for name in "qkv"} | {operand: fault}
    assert {name: getattr(report, name) for name in "qkv"} == expected
    assert not report.ok and f"{operand} descale" in str(report)


@pytest.mark.parametrize("lag", [None, 1])
@pytest.mark.parametrize("operand", "qkv")
def test_descales_of_an_earlier_call_are_stale(operand, lag):
    call = emulated.Stale(emulated.attention, 3 + "qkv".index(operand), lag)
    report = sigmascale.probe(call, **NUMPY)
    assert getattr(report, operand) == "stale" and not report.ok


def test_two_faults_at_once():
    call = emulated.faulty(emulated.attention, 3, CHANGES["inverted"])
    report = sigmascale.probe(emulated.faulty(call, 5, CHANGES["dropped"]), **NUMPY)
    assert (report.q, report.k, report.v) == ("inverted", "applied", "dropped")


def test_sequences_swapped_and_one_scale_for_all():
    swapped = emulated.faulty(emulated.attention, 4, lambda descale: descale[::-1])
    assert sigmascale.probe(swapped, **NUMPY).k == "permuted"
    largest = emulated.faulty(emulated.attention, 4, lambda descale: np.full_like(descale, descale.max()))
    assert sigmascale.probe(largest, **NUMPY).k == "per-tensor"
    assert sigmascale.probe(largest, per_tensor=True, **NUMPY).ok


def test_an_output_in_bf16_is_precise_enough():
    def rounded(*arguments):
        bits = emulated.attention(*arguments).astype(np.float32).view(np.uint32)
        return ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32)

    assert sigmascale.probe(rounded, **NUMPY).ok
    dropped = emulated.faulty(rounded, 4, CHANGES["dropped"])
    assert sigmascale.probe(dropped, **NUMPY).k == "dropped"


def test_an_output_in_e4m3_is_precise_enough():
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def rounded(q, k, v, q_descale, k_descale, v_descale):
        out = emulated.attention(q, k, v, q_descale, k_descale, v_descale)
        o_descale = 2 * v_descale.max()
        return (out / o_descale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * o_descale

    assert sigmascale.probe(rounded, per_tensor=True, **NUMPY).ok
    for fault in ("dropped", "inverted"):
        for operand in "qkv":
            broken = emulated.faulty(rounded, 3 + "qkv".index(operand), CHANGES[fault])
            assert getattr(sigmascale.probe(broken, per_tensor=True, **NUMPY), operand) == fault


@pytest.mark.parametrize("operand", "qkv")
def test_a_descale_that_is_a_little_off_does_not_pass(operand):
    off = emulated.faulty(emulated.attention, 3 + "qkv".index(operand), lambda descale: 1.08 * descale)
    assert not sigmascale.probe(off, **NUMPY).ok


def test_what_no_fault_explains_is_said_so():
    wrong = lambda *arguments: emulated.attention(*arguments)[:, ::-1] * 3.7
    assert sigmascale.probe(wrong, **NUMPY).q == "unexplained"
    with pytest.raises(ValueError, match="returned shape"):
        sigmascale.probe(lambda *arguments: emulated.attention(*arguments).swapaxes(1, 2), **NUMPY)


def test_memory_of_one_call_is_not_that_of_another():
    """Else a call that keeps an address (a CUDA graph) would read the new values there, and not look stale."""
    seen = []

    def call(*arguments):
        seen.append([x.ctypes.data for x in arguments])
        return emulated.attention(*arguments)

    assert sigmascale.probe(call, **NUMPY).ok
    assert all(len(set(column)) == len(seen) for column in zip(*seen))


def test_a_call_may_write_into_its_operands():
    def call(q, k, v, q_descale, k_descale, v_descale):
        out = emulated.attention(q, k, v, q_descale, k_descale, v_descale)
        q *= 0
        k *= 3
        v_descale *= 7
        return out

    assert sigmascale.probe(call, **NUMPY).ok


@pytest.mark.parametrize(("d_head", "scale"), [(64, 1.0), (256, 1.0), (512, 1.0), (64, 1e-5), (1, None), (8, 30.0)])
def test_any_softmax_scale_is_probed(d_head, scale):
    def call(*arguments):
        factor = (d_head**-0.5 if scale is None else scale) * d_head**0.5
        return emulated.attention(arguments[0] * factor, *arguments[1:])

    settings = NUMPY | {"d_head": d_head, "softmax_scale": scale}
    assert sigmascale.probe(call, **settings).ok
    dropped = emulated.faulty(call, 4, CHANGES["dropped"])
    assert sigmascale.probe(dropped, **settings).k == "dropped"


@pytest.mark.parametrize("scale", [None, 1e-3, 30.0])
def test_the_bias_of_the_output_is_measured(scale):
    def shrunk(q, k, v, *descales):
        out = emulated.attention(q * (1 if scale is None else scale * 8), k, v, *descales)
        # Only a long context loses anything, as with an FP8 accumulator.
        return out * (0.98 if len(k[0]) > 64 else 1.0)

    settings = NUMPY | {"softmax_scale": scale}
    report = sigmascale.probe(shrunk, **settings, bias_seq_len=300)
    assert report.ok and report.bias_seq_len == 300 and abs(report.output_bias + 0.02) < 1e-6
    assert str(report).endswith("output bias -2.00 % with 300 keys and V ~ N(1, 1)")


def test_operands_of_the_bias_call_are_e4m3():
    from sigmascale._probe import _e4m3

    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).standard_normal(10_000) * np.exp2(np.arange(10_000) % 16 - 10.0)
    np.testing.assert_array_equal(_e4m3(x), x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_no_bias_is_reported_where_none_is_measured():
    report = sigmascale.probe(emulated.attention, **NUMPY)
    assert report.output_bias is None and report.bias_seq_len is None and "bias" not in str(report)
    with pytest.raises(sigmascale.ArgumentError, match="bias_seq_len -1"):
        sigmascale.probe(emulated.attention, **NUMPY, bias_seq_len=-1)


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (sigmascale.ArgumentError, "n_q_heads 0", {"n_q_heads": 0}),
        (sigmascale.ArgumentError, "multiple", {"n_q_heads": 3}),
        (TypeError, "batch must be an integer", {"batch": 2.5}),
        (sigmascale.ArgumentError, "seq_len 7", {"seq_len": 7}),
        (sigmascale.ArgumentError, "softmax_scale -1", {"softmax_scale": -1}),
        (sigmascale.ArgumentError, "softmax_scale nan", {"softmax_scale": float("nan")}),
        (sigmascale.ArgumentError, "cannot give", {"softmax_scale": 1e-9}),
        (sigmascale.ArgumentError, "framework 'jax'", {"framework": "jax"}),
    ],
)
def test_bad_settings_are_refused(kind, message, options):
    with pytest.raises(kind, match=message):
        sigmascale.probe(emulated.attention, **NUMPY | options)
    with pytest.raises(TypeError, match="call must be a function"):
        sigmascale.probe(None, **NUMPY)


def test_no_place_keeps_its_descale_from_call_to_call():
    from sigmascale._probe import _ladder

    for count in (1, 4, 9, 16):
        rows = np.stack([_ladder(count, shift, False) for shift in range(4)])
        assert all(len(set(column)) == 4 for column in rows.T)
        assert ((rows > 1.19) & (rows < 2.81)).all() and len(set(rows[0])) == count
