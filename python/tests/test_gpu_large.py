"""Calls past 2^31 elements on a Hopper GPU: their last rows are those of a call that has nothing else. Up to 40 GB."""

import pytest
from gpu import relative, torch

import sigmascale.torch as fp8

PAST = 2**31
E4M3 = torch.float8_e4m3fn
PLAN = [0.02, 0.02, 0.02]
HEADS, KV_HEADS, D = 64, 8, 128


def normal(*shape, dtype=torch.bfloat16):
    """Drawn block by block: a generator in BF16 has no room beside it."""
    x = torch.empty(shape, device="cuda", dtype=dtype)
    descale = PLAN[0] if dtype == E4M3 else 1
    for rows in x.view(-1, D).split(2**22):
        rows.copy_(torch.randn(rows.shape, device="cuda", dtype=torch.bfloat16) / descale)
    return x


def descales(kv_heads=KV_HEADS):
    return [torch.full((kv_heads,), x, device="cuda") for x in PLAN]


def same(have, want):
    """Up to the rounding of P: the shorter call may split its keys."""
    assert not have.isnan().any() and relative(have, want) < 0.06, relative(have, want)


@pytest.fixture(autouse=True)
def memory():
    free, _ = torch.cuda.mem_get_info()
    if free < 44 << 30:
        pytest.skip(f"needs 44 GiB of GPU memory, {free >> 30} are free")
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["cast", "e4m3"])
def test_queries(dtype):
    rows = PAST // (HEADS * D) + 200
    q = normal(1, rows, HEADS, D, dtype=dtype)
    k, v = (normal(1, 300, KV_HEADS, D, dtype=dtype) for _ in range(2))
    assert q.numel() > PAST
    out, lse = fp8.attention(q, k, v, descales(), causal=False, backend="native", return_lse=True)
    last, last_lse = fp8.attention(q[:, -700:], k, v, descales(), causal=False, backend="native", return_lse=True)
    same(out[:, -700:], last)
    same(lse[..., -700:], last_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["cast", "e4m3"])
def test_keys_of_many_sequences(dtype):
    batch, length = 33, 2**16
    k, v = (normal(batch, length, KV_HEADS, D, dtype=dtype) for _ in range(2))
    q = normal(batch, 16, HEADS, D, dtype=dtype)
    assert k.numel() > PAST
    out = fp8.attention(q, k, v, descales(), backend="native")
    same(out[-1:], fp8.attention(q[-1:], k[-1:], v[-1:], descales(), backend="native"))


def test_packed_sequences():
    each, count = 256, PAST // (HEADS * D * 256) + 3
    q = normal(each * count, HEADS, D)
    k, v = normal(each * count, KV_HEADS, D), normal(each * count, KV_HEADS, D)
    starts = torch.arange(count + 1, device="cuda", dtype=torch.int32) * each

    def call(q, k, v, starts):
        return fp8.flash_attn_varlen_func(q, k, v, starts, starts, each, each, causal=True, plan=descales())

    assert q.numel() > PAST
    same(call(q, k, v, starts)[-each:], call(q[-each:], k[-each:], v[-each:], starts[:2]))


def test_gradients():
    rows = PAST // (HEADS * D) + 200
    k, v = normal(1, 300, KV_HEADS, D), normal(1, 300, KV_HEADS, D)
    q = normal(1, rows, HEADS, D).requires_grad_()
    out = fp8.attention(q, k, v, descales(), causal=False, backend="native")
    d_out = normal(*out.shape)
    out.backward(d_out)
    last = q.detach()[:, -700:].clone().requires_grad_()
    fp8.attention(last, k, v, descales(), causal=False, backend="native").backward(d_out[:, -700:])
    same(q.grad[:, -700:], last.grad)


def test_paged_cache():
    page = 64
    pages = PAST // (page * KV_HEADS * D) + 40
    k, v = normal(pages, page, KV_HEADS, D, dtype=E4M3), normal(pages, page, KV_HEADS, D, dtype=E4M3)
    table = torch.arange(pages - 32, pages, device="cuda", dtype=torch.int32).view(2, 16)
    lengths = torch.tensor([1000, 513], device="cuda", dtype=torch.int32)
    q = normal(2, 4, HEADS, D)
    assert k.numel() > PAST
    call = lambda k, v, table: fp8.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, block_table=table, plan=descales(), causal=True
    )
    same(call(k, v, table), call(k[-32:].clone(), v[-32:].clone(), table - (pages - 32)))
