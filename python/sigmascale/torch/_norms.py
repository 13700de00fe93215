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
    found = {}
    for places in _alike(layers):
        alike = [layers[place] for place in places]
        d, columns = alike[0].d_head, alike[0].q.shape[1]
        roots = _largest(_grams(alike)).sqrt() * (1 + (d * columns + 4 * d * d + 64) * 2.0**-52)
        found |= dict(zip(places, roots.unflatten(0, (len(alike), -1)).unbind()))
    return [found[place] for place in range(len(layers))]


@torch.no_grad()
def interaction_norms(layers):
    """Upper bounds on the norms of W_Q^T W_K of each query head without rotation, with the norm's gain and without its mean, up to
    rounding: f64 ``(n_q_heads,)`` on the weight's device, without waiting for it, by the place of the layer. Without those where
    q and k are normalized.

    They are the roots of the largest eigenvalues of G_Q G_K, a product that is not symmetric: a power of it is as large as its
    largest eigenvalue's, times at most the root of the condition number of G_K, which 14 squarings make negligible.
    """
    found = {}
    for places in _alike(layers):
        alike = [layers[place] for place in places]
        if alike[0].q_norm is not None or alike[0].latent is not None:
            continue
        queries, keys = _grams(alike, 0, True), _grams(alike, 1, True)
        products = queries.unflatten(0, (keys.shape[0], -1)) @ keys[:, None]
        roots = _largest(products.flatten(0, 1), 14).sqrt()
        found |= dict(zip(places, roots.unflatten(0, (len(alike), -1)).unbind()))
    return found


def _alike(layers):
    """Places of layers by their form: those of one form are computed together, since squarings are many small kernels."""
    alike = {}
    for place, layer in enumerate(layers):
        heads = layer.d_head, layer.n_q_heads, layer.n_kv_heads, layer.q.shape[1]
        types = layer.q.dtype, layer.k.dtype, None if layer.gain is None else layer.gain.dtype, layer.q.device
        form = heads, types, layer.norm, layer.gain_offset, layer.q_norm is None, layer.latent is None
        alike.setdefault(form, []).append(place)
    return alike.values()


def _grams(layers, which=0, effective=False):
    """W W^T of each head of q (0) or k (1) of layers of one form in f64, ``(heads of all layers, d_head, d_head)``;
    ``effective``: as the norm in front makes W."""
    weights = torch.cat([by_head(layer, which) for layer in layers])
    gains = None
    if effective and layers[0].gain is not None:
        gains = torch.stack([layer.gain.detach() for layer in layers]).double() + layers[0].gain_offset
        gains = gains.repeat_interleave(weights.shape[0] // len(layers), dim=0)[:, None]
    step, grams = max(1, _BYTES // (8 * weights.shape[1] * weights.shape[2])), []
    for first in range(0, weights.shape[0], step):
        rows = weights[first : first + step].double()
        if gains is not None:
            rows = rows * gains[first : first + step]
        if effective and layers[0].norm == "layer":
            rows = rows - rows.mean(dim=2, keepdim=True)
        grams.append(rows @ rows.transpose(1, 2))
    return torch.cat(grams)


def by_head(layer, which):
    """The weight of q (0) or k (1), ``(heads, d_head, d_model)``."""
    weight, heads = ((layer.q, layer.n_q_heads), (layer.k, layer.n_kv_heads))[which]
    weight, d = weight.detach(), layer.d_head
    if layer.heads is None:
        return weight.unflatten(0, (heads, d))
    return torch.stack([weight[start : start + d] for start in layer.heads[which]])


def _largest(gram, squarings=None):
    """At least the largest eigenvalue of each positive semidefinite matrix, or product of two, up to rounding."""
    squarings = squarings or max(1, math.ceil(math.log2(math.log(gram.shape[1]) / 4e-3)))
    norms = [torch.linalg.matrix_norm(gram)]
    for _ in range(squarings):
        # A head of zeros stays one.
        gram = gram / norms[-1].clamp_min(torch.finfo(gram.dtype).tiny)[:, None, None]
        gram = gram @ gram
        norms.append(torch.linalg.matrix_norm(gram))
    shares = torch.logspace(0, -squarings, squarings + 1, base=2, dtype=gram.dtype, device=gram.device)
    return (torch.stack(norms).log() * shares[:, None]).sum(dim=0).exp()
