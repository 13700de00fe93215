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
    alike = {}
    for index, layer in enumerate(layers):
        alike.setdefault((layer.d_head, layer.q.shape[1], layer.q.dtype, layer.q.device), []).append(index)
    found = [None] * len(layers)
    # All layers together: the squarings are many small kernels.
    for (d, columns, *_), indices in alike.items():
        roots = _largest(_grams([layers[index] for index in indices])).sqrt()
        roots = roots * (1 + (d * columns + 4 * d * d + 64) * 2.0**-52)
        for index, root in zip(indices, roots.split([layers[index].n_q_heads for index in indices])):
            found[index] = root
    return found


def _grams(layers):
    """W W^T of each head in f64, ``(heads of all layers, d_head, d_head)``."""
    weights = torch.cat([_by_head(layer) for layer in layers])
    step = max(1, _BYTES // (8 * weights.shape[1] * weights.shape[2]))
    rows = (weights[first : first + step].double() for first in range(0, weights.shape[0], step))
    return torch.cat([each @ each.transpose(1, 2) for each in rows])


def _by_head(layer):
    """The weight of q, ``(n_q_heads, d_head, d_model)``."""
    weight, d = layer.q.detach(), layer.d_head
    if layer.heads is None:
        return weight.unflatten(0, (layer.n_q_heads, d))
    return torch.stack([weight[start : start + d] for start in layer.heads[0]])


def _largest(gram):
    """At least the largest eigenvalue of each positive semidefinite matrix, up to rounding."""
    logarithm, share = torch.zeros(gram.shape[0], dtype=gram.dtype, device=gram.device), 1.0
    squarings = max(1, math.ceil(math.log2(math.log(gram.shape[1]) / 4e-3)))
    for turn in range(squarings + 1):
        norm = torch.linalg.matrix_norm(gram)
        logarithm = logarithm + share * norm.log()
        if turn < squarings:
            # A head of zeros stays one.
            gram = gram / torch.where(norm > 0, norm, 1.0)[:, None, None]
            gram, share = gram @ gram, share / 2
    return logarithm.exp()
