"""``flash_attn_with_kvcache`` on pages in E4M3 on a Hopper GPU: append, rotation and attention in one call."""

import pytest
from gpu import relative, sdpa, torch

import sigmascale
import sigmascale.torch as fp8

E4M3 = torch.float8_e4m3fn
LENGTHS = [0, 1, 37, 63, 64, 200]
HEADS, KV_HEADS, D = 8, 2, 128


def rotated(x, positions, cosine, sine, interleaved):
    c, s = (t.float()[positions][:, :, None] for t in (cosine, sine))
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pair = (a * c - b * s, b * c + a * s)
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


class Cache:
    """Shuffled pages, NaN where no token is."""

    def __init__(self, page, tiled, room=320):
        torch.manual_seed(page)
        each, self.page, batch = room // page, page, len(LENGTHS)
        self.count = batch * each + 2
        self.table = torch.randperm(self.count, device="cuda")[: batch * each].view(batch, each).int()
        self.lengths = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
        self.descales = [torch.tensor(x, device="cuda") for x in ([0.02, 0.03], [0.025, 0.02], [0.015, 0.03])]
        nan = lambda *shape: torch.full(shape, 0x7F, device="cuda", dtype=torch.uint8).view(E4M3)
        self.k = nan(self.count, page, KV_HEADS, D)
        shape = fp8.value_pages(self.count, page, KV_HEADS, D).shape
        self.v = nan(*shape) if tiled else nan(self.count, page, KV_HEADS, D)

    def call(self, q, k, v, lengths, **options):
        return fp8.flash_attn_with_kvcache(
            q, self.k, self.v, k, v, cache_seqlens=lengths, block_table=self.table, plan=self.descales, causal=True, **options
        )


@pytest.mark.parametrize("interleaved", [None, False, True], ids=["plain", "halves", "neighbours"])
@pytest.mark.parametrize("tiled", [True, False], ids=["tiled", "rows"])
@pytest.mark.parametrize("page", [16, 64])
def test_steps_of_a_decode_are_attention_over_all_tokens(page, tiled, interleaved):
    cache, batch, longest = Cache(page, tiled), len(LENGTHS), max(LENGTHS)
    make = lambda n, heads: torch.randn(batch, n, heads, D, device="cuda", dtype=torch.bfloat16)
    k, v = make(longest + 4, KV_HEADS), make(longest + 4, KV_HEADS)
    angles = torch.outer(torch.arange(320, device="cuda"), 1e4 ** (-torch.arange(D // 2, device="cuda") / (D // 2)))
    tables = {} if interleaved is None else dict(rotary_cos=angles.cos(), rotary_sin=angles.sin(), rotary_interleaved=interleaved)
    turn = (lambda x, at: x.float()) if interleaved is None else lambda x, at: rotated(x.float(), at, angles.cos(), angles.sin(), interleaved)
    # Prefill of each sequence as a batch of its own, then a step of four queries
    for i, n in enumerate(LENGTHS):
        if n:
            row = Cache.__new__(Cache)
            row.__dict__ = cache.__dict__ | {"table": cache.table[i : i + 1]}
            row.call(make(n, HEADS)[:1], k[i : i + 1, :n], v[i : i + 1, :n], 0, **tables)
    q = make(4, HEADS)
    at = cache.lengths.long()[:, None] + torch.arange(4, device="cuda")
    pick = lambda x: x[torch.arange(batch, device="cuda")[:, None], at]
    out, lse = cache.call(q, pick(k), pick(v), cache.lengths, return_softmax_lse=True, **tables)
    assert out.dtype == q.dtype and not out.isnan().any() and not lse.isnan().any()
    for i, n in enumerate(LENGTHS):
        total = n + 4
        where = torch.arange(total, device="cuda")[None]
        keys, values = turn(k[i : i + 1, :total], where), v[i : i + 1, :total].float()
        want = sdpa(turn(q[i : i + 1], at[i : i + 1]).double(), keys.double(), values.double())
        # Casts of q, k, v and P.
        assert relative(out[i : i + 1], want) < 0.09, (i, relative(out[i : i + 1], want))


def test_a_graph_serves_every_step():
    cache = Cache(64, tiled=True)
    batch = len(LENGTHS)
    make = lambda heads: torch.randn(batch, 1, heads, D, device="cuda", dtype=torch.bfloat16)
    lengths, q, k, v = torch.zeros(batch, device="cuda", dtype=torch.int32), make(HEADS), make(KV_HEADS), make(KV_HEADS)
    step = lambda: cache.call(q, k, v, lengths)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    seen = []
    for n in range(3):
        lengths.fill_(n)
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        graph.replay()
        again = step()
        assert torch.equal(out, again)
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1])


def test_wrong_block_tables_are_named(monkeypatch):
    monkeypatch.setattr("sigmascale.torch._terms._CHECK", True)
    cache = Cache(64, tiled=False)
    q, k = (torch.randn(len(LENGTHS), 1, heads, D, device="cuda", dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS))
    cache.call(q, k, k, cache.lengths)
    with pytest.raises(sigmascale.MismatchError, match="1 keys after 320 .*cache of 320"):
        cache.call(q, k, k, 320)
    with pytest.raises(sigmascale.MismatchError, match="1 keys after 320 .*cache of 320"):
        cache.call(q, k, k, torch.full_like(cache.lengths, 320))
    cache.table[2, 0] = cache.count
    with pytest.raises(sigmascale.ArgumentError, match=rf"block_table\[2\]\[0\] = {cache.count} "):
        cache.call(q, k, k, cache.lengths)
