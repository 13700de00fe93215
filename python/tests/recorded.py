"""A small model with attention of the package, and a loop that trains it, for the monitor and the guard; a count of launches."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sigmascale.torch as fp8


def model(seed=0, layers=2):
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    made = transformers.LlamaForCausalLM(config)
    made.set_attn_implementation(fp8.register())
    return made


def batch(step, length=24):
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(step))


def loss_of(made, step):
    tokens = batch(step)
    return made(tokens, labels=tokens).loss


def values(optimizer, made, runtime):
    """Every tensor and number that later steps depend on."""
    state = [x for p in made.parameters() for x in optimizer.state.get(p, {}).values()]
    own = [runtime.descales, runtime.words] + ([] if runtime.logits is None else [runtime.logits])
    return [torch.as_tensor(x).clone() for x in (*made.parameters(), *state, *own)], runtime.state_dict()["state"]


def equal(one, other):
    tensors = len(one[0]) == len(other[0]) and all(torch.equal(a, b) for a, b in zip(one[0], other[0]))
    return tensors and one[1] == other[1]


class Launches(TorchDispatchMode):
    """Counts operators that are a kernel on a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not (func.is_view or func.name() == "aten::_unsafe_view" or "empty" in func.name())
        return func(*args, **(kwargs or {}))
