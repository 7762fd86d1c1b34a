"""Weights in FP8 without Transformer Engine: a stand-in for its tensors is read, trained and written in two processes.

torchrun --nproc-per-node 2 -m tests.bridge.mapping.fp8_worker FOLDER RESULTS

FOLDER has a model in bf16. What is found is written to RESULTS, as JSON.
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import MethodType, SimpleNamespace

import torch
import torch.distributed as dist
from megaswift.bridge.checkpoint.distributed import load_distributed, save_distributed
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.save import save_weights
from megaswift.bridge.mapping.fp8 import fp8_params, load_as_bf16, masters_as_bf16
from megaswift.bridge.model.build import build_model
from megaswift.bridge.model.model import Model
from megaswift.bridge.parallel import initialize
from megaswift.tasks.train.step import sft_loss, train_step
from megatron.core import fp8_utils
from megatron.core.distributed import param_and_grad_buffer as buffers
from safetensors.torch import load_file
from torch import Tensor

from tests.layouts.worker import batches_of, open_training, options_of

RATE = 2**-5
E4M3 = torch.float8_e4m3fn
MATRICES = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")


class InFp8(torch.Tensor):
    """A parameter with bytes in e4m3 and a scale; as its own values, for multiplication, what they mean."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, parameter: torch.nn.Parameter) -> "InFp8":
        self = torch.Tensor._make_subclass(cls, parameter.detach().clone(), True)
        self._is_param = True
        self.raw = torch.zeros(parameter.shape, dtype=torch.uint8)
        self._quantizer = SimpleNamespace(scale=torch.ones(()), amax=torch.full((), 1e9))
        self.exact = torch.full_like(parameter, torch.nan, requires_grad=False)
        self.get_high_precision_init_val = MethodType(lambda self: self.exact, self)
        self.clear_high_precision_init_val = MethodType(lambda self: delattr(self, "exact"), self)
        return self

    def quantize_(self, values: Tensor) -> None:
        self.raw.copy_((values.float() * self._quantizer.scale).to(E4M3).view(torch.uint8))
        self.take_raw()

    def take_raw(self) -> None:
        self.data.copy_(self.raw.view(E4M3).float() / self._quantizer.scale)


def stand_in() -> None:
    """megatron-core takes InFp8 for Transformer Engine's."""

    def put_into_buffer(parameter: InFp8, buffer: Tensor) -> None:
        parameter.raw = buffer.copy_(parameter.raw)

    def quantize_shards(parameters, masters, starts, group, *_) -> None:
        for parameter, master, start in zip(parameters, masters, starts, strict=True):
            if master is not None:
                values = (master.bfloat16().float() * parameter._quantizer.scale).to(E4M3).view(torch.uint8)
                parameter.raw.view(-1)[start : start + len(values)] = values

    def after_gathering(parameters) -> None:
        for parameter in parameters:
            parameter.take_raw()

    @contextmanager
    def one_by_one(*_, **__):
        yield SimpleNamespace(wait=lambda: None)

    # gloo does not gather tensors of several dtypes together.
    buffers._coalescing_manager = one_by_one
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        real = getattr(buffers, name)
        setattr(buffers, name, lambda *args, real=real, async_op=False, **kwargs: real(*args, **kwargs))
    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS, fp8_utils.FP8_TENSOR_CLASS = True, InFp8
    fp8_utils._modify_underlying_storage_impl = put_into_buffer
    fp8_utils._quantize_param_shard_impl = quantize_shards
    fp8_utils.te_post_all_gather_processing = torch.no_grad()(after_gathering)


def open_model(folder: Path, options, read=load_weights) -> Model:
    config = read_config(folder)
    model = build_model(config, options.build, torch.bfloat16)
    for chunk in model.chunks:
        for name, module in list(chunk.decoder.named_modules()):
            if f"{name.rpartition('.')[2]}.weight" in MATRICES:
                module.weight = InFp8.of(module.weight)
    model.config.fp8_param, model.config.fp8_recipe = True, "tensorwise"
    with load_as_bf16(model.chunks):
        read(model.chunks, config, folder)
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def trained(source: Path, destination: Path, lr: float, read=load_weights, **flags) -> Model:
    """One step at this rate, written to `destination` in Hugging Face's format and to `destination`-mcore."""
    job = {"options": {"packing": True, "lr": lr, "weight_decay": 0.0, "use_distributed_optimizer": True} | flags}
    options = options_of(job)
    model = open_model(source, options, read)
    training = open_training(model, options, None)
    train_step(training, batches_of(0, options), sft_loss, 1)
    config, other = read_config(source), destination.with_name(f"{destination.name}-mcore")
    if dist.get_rank() == 0:
        destination.mkdir()
        other.mkdir()
    dist.barrier()
    with training.parameters_gathered(), masters_as_bf16(training.optimizer, training.chunks):
        save_weights(model.chunks, config, source, destination, dtype=torch.bfloat16, max_shard_bytes=200_000)
        save_distributed(model.chunks, config, source, other, dtype=torch.bfloat16)
    return model


def few_values(model: Model) -> bool:
    """Whether what is multiplied has no more values than e4m3 has."""
    return all(p.detach().unique().numel() < 256 for p in fp8_params(model.chunks))


def main() -> None:
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    initialize(options_of({"options": {}}).build, seed=7)
    stand_in()
    source, found = tensors_of(folder), {}
    model = trained(folder, folder / "still", 0.0)
    found["held"] = len(list(fp8_params(model.chunks)))
    found["filled"] = all(float(p._quantizer.amax) < 1e9 and bool(p.isfinite().all()) for p in fp8_params(model.chunks))
    found["few values"] = few_values(model)
    found["still"] = all(torch.equal(tensor, source[name]) for name, tensor in tensors_of(folder / "still").items())
    trained(folder, folder / "moved", RATE, overlap_grad_reduce=True, overlap_param_gather=True)
    moves = [tensor.float() - source[name].float() for name, tensor in tensors_of(folder / "moved").items()]
    steps = torch.cat([move.abs().flatten() for move in moves]) / RATE
    found["largest step"], found["mean step"] = float(steps.max()), float(steps.mean())
    trained(folder / "still-mcore", folder / "again", 0.0, read=load_distributed)
    again = tensors_of(folder / "again")
    found["again"] = again.keys() == source.keys() and all(torch.equal(again[name], source[name]) for name in source)
    if dist.get_rank() == 0:
        results.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
