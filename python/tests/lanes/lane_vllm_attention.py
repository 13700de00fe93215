"""The attention backend as vLLM finds and calls it, on the CPU: which layers it takes, and that it reads vLLM's own cache and metadata.

    pytest python/tests/lanes/lane_vllm_attention.py

needs vLLM 0.26 or later, and this package installed.
"""

import types

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch  # noqa: E402
from vllm.v1.attention.backends import flash_attn as theirs  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

import sigmascale.torch as fp8  # noqa: E402
import sigmascale.vllm  # noqa: E402

E4M3 = torch.float8_e4m3fn
HEADS, KV_HEADS, D, PAGE = 8, 2, 64, 16


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """What vLLM asks of a Hopper GPU while it builds a layer."""
    sigmascale.vllm._hook()
    for name in ("flash_attn_supports_kv_cache_dtype", "flash_attn_supports_quant_query_input", "flash_attn_supports_sinks"):
        monkeypatch.setattr(theirs, name, lambda *_, **__: True, raising=False)
    monkeypatch.setattr(theirs, "get_flash_attn_version", lambda *_, **__: 3)


def layer(d=D, window=None, cache="fp8", cap=None, **more):
    from sigmascale._vllm_attention import SigmascaleImpl

    return SigmascaleImpl(HEADS, d, d**-0.5, KV_HEADS, None, window, cache, cap, **more)


def test_vllm_finds_it_by_the_name_for_plugins():
    backend = AttentionBackendEnum.CUSTOM.get_class()
    assert backend.__module__ == "sigmascale._vllm_attention" and backend.get_name() == "CUSTOM"
    assert AttentionBackendEnum[backend.get_name()] is AttentionBackendEnum.CUSTOM and backend.supports_batch_invariance()
    assert issubclass(backend, theirs.FlashAttentionBackend)
    assert issubclass(backend.get_builder_cls(), theirs.FlashAttentionMetadataBuilder)
    assert not backend.get_builder_cls().use_cascade_attention(None)


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ({}, None),
        ({"d": 128, "window": 128, "sinks": torch.zeros(HEADS)}, None),
        ({"d": 96}, "heads have 96 channels"),
        ({"cache": "auto"}, "the cache is auto"),
        ({"cap": 50.0}, "soft-cap"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
    ],
)
def test_layers_that_the_kernels_do_not_take_are_left_to_vllm(changed, left):
    found = layer(**changed).left
    assert found is None if left is None else left in found
    assert layer(**changed).supports_quant_query_input == (left is not None)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_step_reads_the_cache_and_the_metadata_of_vllm(window, order, monkeypatch):
    import sigmascale._vllm_attention as ours

    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator)
    queries, lengths = [1, 30, 1, 4], [70, 45, 3, 20]
    pages, each = 40, 6
    # Keys and values of a page lie in one row, as vLLM's update of the cache writes them.
    kv = (make(pages, PAGE, KV_HEADS, 2 * D) / 0.02).clamp(-448, 448).to(E4M3).view(torch.uint8)
    cache = kv.transpose(1, 2).contiguous() if order == "HND" else kv.transpose(1, 2)
    table = torch.randperm(pages, generator=generator)[: 4 * each].view(4, each).int()
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    tokens = int(starts[-1])
    q = make(tokens + 3, HEADS, D).bfloat16()
    scales = {f"_{x}_scale": torch.tensor([0.02]) for x in "qkv"}
    metadata = types.SimpleNamespace(
        num_actual_tokens=tokens, query_start_loc=starts, max_query_len=30, seq_lens=torch.tensor(lengths).int(), block_table=table, causal=True
    )

    class Kernels:
        def launch(self, direction, call, key):
            assert direction == "forward" and hash(key) is not None
            p, terms = call.pages, call.terms
            out, lse = fp8.flash_attn_with_kvcache(
                call.q[0], p.k, p.v, cache_seqlens=p.lengths, block_table=p.block_table, causal=terms.causal, softmax_scale=terms.scale,
                window_size=terms.window, cu_seqlens_q=p.cu_seqlens_q, max_seqlen_q=p.max_seqlen_q, return_softmax_lse=True,
                plan=[d[0].contiguous() for d in call.descales],
            )  # fmt: skip
            call.out.copy_(out[None])
            assert call.lse[0].shape == lse.shape

    monkeypatch.setattr(ours, "backend", lambda name: {"native": Kernels()}[name])
    output = torch.full((tokens + 3, HEADS, D), 7.0, dtype=torch.bfloat16)
    impl = layer(window=window)
    assert impl.forward(types.SimpleNamespace(**scales), q, None, None, cache, metadata, output) is output
    assert (output[tokens:] == 7.0).all()
    for s, (n, m) in enumerate(zip(queries, lengths)):
        rows = kv[table[s].long()].view(E4M3).float().reshape(-1, KV_HEADS, 2 * D)[:m] * 0.02
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in rows.split(D, 2))
        key, row = torch.arange(m), torch.arange(n)[:, None] + m - n
        seen = (key <= row) & (key > row - (window or m + 1))
        mine = slice(int(starts[s]), int(starts[s + 1]))
        want = torch.nn.functional.scaled_dot_product_attention(q[mine].float().transpose(0, 1), k, v, seen).transpose(0, 1)
        assert (output[mine].float() - want).norm() / want.norm() < 0.06, s
    with pytest.raises(NotImplementedError, match="choose FLASH_ATTN"):
        impl.forward(None, q, None, None, cache, types.SimpleNamespace(causal=False), output)
