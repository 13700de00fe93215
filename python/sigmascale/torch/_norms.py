"""The spectral norm of each query head's own weight, without the norm's gain, biases and rotation."""

import math

import torch

# Bytes of f64 that are held at a time.
_BYTES = 64 << 20


@torch.no_grad()
def query_norms(layers):
    """Certified upper bounds on the spectral norms of W_Q of each head ``(d_head, d_model)``: for each layer f64 ``(n_q_heads,)`` on
    the weight's device, without waiting for it.

    With G = W W^T, G_0 = G / |G|_F and G_{i+1} = (G_i / |G_i|_F)^2, the largest eigenvalue of G is at most |G|_F prod_i
    |G_i|_F^(2^-i). After n squarings of a matrix of r rows, its root is at most r^(2^-(n+2)) times the norm: less than
    0.1 % more. Rounding: the product of d columns errs by at most d u |W|_F^2 <= d r u lambda, a squaring by 2 r^2 u,
    and the 2^-i-th root shrinks that of G_i. All of it is added.
    """
    grams = [_grams(layer) for layer in layers]
    # The squarings of all layers together: they are many small kernels.
    found = [None] * len(layers)
    alike = {}
    for i, gram in enumerate(grams):
        alike.setdefault((gram.shape[1], gram.device), []).append(i)
    for places in alike.values():
        roots = _largest(torch.cat([grams[i] for i in places])).sqrt()
        for i, root in zip(places, roots.split([layers[i].n_q_heads for i in places])):
            d = layers[i].d_head
            found[i] = root * (1 + (d * layers[i].q.shape[1] + 4 * d * d + 64) * 2.0**-52)
    return found


@torch.no_grad()
def interaction_norms(layer):
    """Upper bounds on the norms of W_Q^T W_K of each query head without rotation, with the norm's gain and without its mean, up to
    rounding: f64 ``(n_q_heads,)`` on the weight's device, without waiting for it. None where q and k are normalized.

    They are the roots of the largest eigenvalues of G_Q G_K, a product that is not symmetric: a power of it is as large as its
    largest eigenvalue's, times at most the root of the condition number of G_K, which 14 squarings make negligible.
    """
    if layer.q_norm is not None or layer.latent is not None:
        return None
    keys = _grams(layer, 1, True).repeat_interleave(layer.n_q_heads // layer.n_kv_heads, dim=0)
    return _largest(_grams(layer, 0, True) @ keys, 14).sqrt()


def _grams(layer, which=0, effective=False):
    """W W^T of each head of q (0) or k (1) in f64, ``(heads, d_head, d_head)``; ``effective``: as the norm in front makes W."""
    weight, heads = ((layer.q, layer.n_q_heads), (layer.k, layer.n_kv_heads))[which]
    weight, d = weight.detach(), layer.d_head
    starts = range(0, heads * d, d) if layer.heads is None else layer.heads[which]
    step = max(1, _BYTES // (8 * d * weight.shape[1]))
    grams = []
    for first in range(0, heads, step):
        rows = torch.stack([weight[start : start + d] for start in starts[first : first + step]]).double()
        if effective and layer.gain is not None:
            rows = rows * (layer.gain.detach().double() + layer.gain_offset)
        if effective and layer.norm == "layer":
            rows = rows - rows.mean(dim=2, keepdim=True)
        grams.append(rows @ rows.transpose(1, 2))
    return torch.cat(grams)


def _largest(gram, squarings=None):
    """At least the largest eigenvalue of each positive semidefinite matrix, or product of two, up to rounding."""
    logarithm, share = torch.zeros(gram.shape[0], dtype=gram.dtype, device=gram.device), 1.0
    squarings = squarings or max(1, math.ceil(math.log2(math.log(gram.shape[1]) / 4e-3)))
    for turn in range(squarings + 1):
        norm = torch.linalg.matrix_norm(gram)
        logarithm = logarithm + share * norm.log()
        if turn < squarings:
            # A head of zeros stays one.
            gram = gram / torch.where(norm > 0, norm, 1.0)[:, None, None]
            gram, share = gram @ gram, share / 2
    return logarithm.exp()
