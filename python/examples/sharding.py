"""What `train_gpt.py` needs under torchrun: which ranks do what, and checkpoints from which any number of them goes on.

Ranks form a mesh of data, context and tensor parallelism. Weights are sharded over data and context parallel ranks
(`fully_shard`), and their heads and inner channels over tensor parallel ones.
"""

import io
import os
import pathlib
import shutil
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sigmascale.torch as fp8


class Ranks:
    """The processes of a run; one, without torchrun."""

    def __init__(self, device, tp, cp):
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.device, self.tp, self.cp = torch.device(device), tp, cp
        self.dp, rest = divmod(self.size, tp * cp)
        if rest or not self.dp:
            sys.exit(
                f"{self.size} processes do not form a mesh of --tp {tp} x --cp {cp}: start a multiple of {tp * cp} by torchrun"
            )
        self.mesh, self.first = None, True
        if "RANK" in os.environ:
            if self.device.type == "cuda":
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(self.device)
            self.mesh = init_device_mesh(self.device.type, (self.dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
            # Ranks with the same heads: they share the weights' rows, and see other tokens.
            self.weights = self.mesh["dp", "cp"]._flatten("weights") if cp > 1 else self.mesh["dp"]
            self.first = dist.get_rank() == 0

    def shard(self, model, checkpoint=None):
        """Shards the weights, and gives each rank its part of the positions. Tensor parallelism shares out projections that are
        separate, which are those of every run under torchrun, so that any mesh can go on from its checkpoint."""
        separate = self.mesh is not None
        if checkpoint:
            names = dcp.FileSystemReader(present(checkpoint)).read_metadata().state_dict_metadata
            separate = any(".attention.q." in name for name in names)
            if self.tp > 1 and not separate:
                sys.exit(
                    f"--load {checkpoint}: its run was not under torchrun, so its projections are fused: leave --tp out"
                )
        if separate:
            for block in model.blocks:
                block.separate()
        if self.cp > 1:
            self.context = self.mesh["cp"].get_group()
            for name in ("cosine", "sine"):
                setattr(model, name, fp8.shard_sequence(getattr(model, name), self.context, zigzag=True))
            for block in model.blocks:
                block.attention.context = self.context
        if self.tp > 1:
            plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
            plan |= {"attention.out": RowwiseParallel(), "down": RowwiseParallel()}
            plan |= {name: ColwiseParallel() for name in ("up", "gate")}
            for block in model.blocks:
                own = {name: style for name, style in plan.items() if _has(block, name)}
                parallelize_module(block, self.mesh["tp"], own)
        if self.mesh is not None:
            for part in (*model.blocks, model):
                fully_shard(part, mesh=self.weights)
        return model

    def split(self, window):
        """This rank's inputs and targets of a batch of windows that are the same on all ranks."""
        if window.shape[0] % self.dp:
            sys.exit(f"--batch {window.shape[0]} is not a multiple of {self.dp} data parallel ranks")
        if self.mesh is not None:
            window = window.chunk(self.dp)[self.mesh.get_local_rank("dp")]
        parts = window[:, :-1], window[:, 1:]
        return tuple(fp8.shard_sequence(x, self.context, zigzag=True) for x in parts) if self.cp > 1 else parts

    def mean(self, loss):
        """The mean of all ranks, which have as many tokens."""
        loss = loss.detach().clone()
        if self.mesh is not None:
            dist.all_reduce(loss)
            loss /= self.size
        return loss

    def maxima(self):
        """The group over which policies that observe reduce their maxima."""
        return self.weights.get_group() if self.mesh is not None and self.weights.size() > 1 else None

    def end(self):
        """Leaves when all ranks have come here: a connection that closes early ends the others."""
        if self.mesh is not None:
            dist.barrier()
            dist.destroy_process_group()

    def save(self, folder, step, model, optimizer, runtime):
        """Writes a checkpoint of everything. Whenever a process ends in between, `load` finds the one before or this one, whole."""
        folder, draft, before = _places(folder)
        if self.first:
            if before.exists() and not folder.exists():
                before.rename(folder)
            shutil.rmtree(draft, ignore_errors=True)
        dcp.save(self._state(step, model, optimizer, runtime), checkpoint_id=draft, no_dist=self.mesh is None)
        if self.first:
            if folder.exists():
                shutil.rmtree(before, ignore_errors=True)
                folder.rename(before)
            draft.rename(folder)
            shutil.rmtree(before, ignore_errors=True)
        if self.mesh is not None:
            dist.barrier()

    def load(self, folder, model, optimizer, runtime):
        """Goes on from a checkpoint of any number of ranks; returns its step."""
        state = self._state(0, model, optimizer, runtime)
        dcp.load(state, checkpoint_id=present(folder), no_dist=self.mesh is None)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if runtime:
            runtime.refresh()
            # Last: a refresh in which no call reported would be a step of zeros in the histories.
            runtime.load_state_dict(torch.load(io.BytesIO(state["scales"])))
        return state["step"]

    def _state(self, step, model, optimizer, runtime):
        weights, moments = get_state_dict(model, optimizer)
        state = {"step": step, "model": weights, "optimizer": moments}
        if runtime:
            states = [runtime.state_dict()]
            if self.mesh is not None:
                states = [None] * self.size
                dist.all_gather_object(states, runtime.state_dict())
            # In bytes: its shapes are those of the mesh that wrote it.
            packed = io.BytesIO()
            torch.save(fp8.merge_states(states), packed)
            state["scales"] = packed.getvalue()
        return state


def _places(folder):
    """Where a checkpoint is, where the next one is written, and where it lies while that takes its place."""
    folder = pathlib.Path(folder)
    return folder, folder.with_name(folder.name + ".part"), folder.with_name(folder.name + ".old")


def present(folder):
    """The folder of a checkpoint, or of the one before if a run ended just as that made room."""
    folder, _, before = _places(folder)
    return before if before.exists() and not folder.exists() else folder


def _has(module, path):
    for name in path.split("."):
        module = getattr(module, name, None)
    return module is not None


def clip(parameters, most):
    """`clip_grad_norm_` of parameters on several meshes; the norm before."""
    groups = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group]) for group in groups.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.stack(norms).norm()
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, most, total)
    return total
