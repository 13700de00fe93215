"""Whether weights are still those that scales were computed from, without waiting for the device.

Of each tensor a diagonal is compared: its elements see every band of rows and of columns, so a step of an optimizer, a head
that was rescaled and a channel that was folded change some of them. The comparison is of bits. It does not depend on how the
weights were written, which PyTorch's version counters do.
"""

import torch

# Elements of a tensor that are compared.
_COUNT = 1024
# Comparisons in a row from the first call on, and how many calls lie between two later ones.
_FIRST, _BETWEEN = 32, 8
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Weights:
    """A sample of tensors as they were at the last :meth:`mark`.

    ``named``: layers' names, each with a tensor. ``moved``: whether such a tensor lies elsewhere now.
    """

    @torch.inference_mode(False)
    def __init__(self, named, moved, device):
        self._device, self._groups, self._are_moved = device, [], moved
        by_size = {}
        for name, tensor in named:
            if tensor.device == device and tensor.numel():
                by_size.setdefault(tensor.element_size(), []).append((name, _diagonal(tensor)))
        for found in by_size.values():
            names, views = zip(*found)
            self._groups.append((names, views, torch.cat(views)))
        # Whether a comparison met other weights, until that is told.
        self._differs, self._calls = torch.zeros((), dtype=torch.bool, device=device), 0
        # The answer of the last comparison, and whether it is on its way to the host.
        self._answer, self._arrived, self._sent = None, None, False
        if device.type == "cuda":
            self._answer = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=True)
            self._arrived = torch.cuda.Event()

    def mark(self):
        """The weights are now those that scales are computed from."""
        for _, views, kept in self._groups:
            torch.cat(views, out=kept)

    def due(self):
        """Counts a call, and whether it is one that compares."""
        self._calls += 1
        return self._calls <= _FIRST or self._calls % _BETWEEN == 0

    def look(self):
        """Compares. Whether an earlier comparison, or on a CPU this one, met other weights: an answer that is not here yet
        comes at a later call."""
        capturing = self._answer is not None and torch.cuda.is_current_stream_capturing()
        if not capturing and self._are_moved():
            return True
        if self._sent and not capturing:
            if not self._arrived.query():
                return False
            self._sent = False
            if self._answer.item():
                self._differs.zero_()
                return True
        for _, views, kept in self._groups:
            self._differs.logical_or_((torch.cat(views) != kept).any())
        if self._answer is None:
            differs = self._differs.item()
            self._differs.zero_()
            return differs
        # Replays of a graph compare too, and a later call outside of it tells.
        if not capturing:
            self._answer.copy_(self._differs, non_blocking=True)
            self._arrived.record()
            self._sent = True
        return False

    def differ(self):
        """Whether weights are others now; waits for the device."""
        return self._are_moved() or not all(torch.equal(torch.cat(views), kept) for _, views, kept in self._groups)

    def names(self):
        """Names of layers with tensors that differ now, or of all where these were moved or put back; waits for the
        device."""
        found = []
        for names, views, kept in self._groups:
            parts = kept.split([view.numel() for view in views])
            found += [name for name, view, part in zip(names, views, parts) if not torch.equal(view, part)]
        return list(dict.fromkeys(found or [name for names, *_ in self._groups for name in names]))


def _diagonal(tensor):
    """Bits of elements along the diagonal of a tensor, as a view."""
    tensor = tensor.detach()
    bits = tensor.view(_BITS[tensor.element_size()])
    count = min(_COUNT, *bits.shape) if bits.dim() else 1
    step = sum(stride * (length // count) for stride, length in zip(bits.stride(), bits.shape))
    return bits.as_strided((count,), (step,))
