"""The snippets of docs/sharded.md run, in the order of the page."""

import pathlib
import re

from models import Plain, llama, mesh_of, shard, torch
from ranks import distributed

import sigmascale.torch as fp8

GUIDE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "sharded.md"


@distributed(2)
def test_snippets_of_the_guide_run():
    codes = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    # Their own tests make the same calls.
    codes = [code for code in codes if "megatron" not in code and "deepspeed" not in code]
    first, described, observed, merged, ring = codes
    model = shard(llama(), mesh_of(2))
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(first, names)
    model(torch.zeros(1, 8, dtype=torch.int64))
    descales = names["runtime"].descales
    assert torch.isfinite(descales).all() and (descales > 0).all()
    exec(observed.replace('"cuda", (4, 2)', '"cpu", (2, 1)'), names)
    exec(merged, names)
    assert isinstance(names["state"], dict)

    names = {"model": shard(Plain(), mesh_of(2))}
    exec(described, names)
    names["model"](torch.ones(1, 8, 96))
    assert len(names["runtime"].layers) == 2

    heads = {"q": 6, "k": 3, "v": 3}
    generator = torch.Generator().manual_seed(0)
    names |= {name: torch.randn(1, 16, n, 16, generator=generator) for name, n in heads.items()}
    names |= {"group": torch.distributed.group.WORLD, "fp8": fp8}
    exec(ring, names)
    assert names["out"].shape == (1, 8, 6, 16)
