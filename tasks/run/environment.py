"""Machine and installed versions of a run, for args.json."""

import platform
import socket
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = (
    "megaswift", "torch", "megatron-core", "transformer-engine", "transformers", "peft", "datasets", "vllm",
    "flash-attn", "flash-attn-4", "flash-linear-attention", "mamba-ssm", "emerging-optimizers",
)  # fmt: skip


def environment() -> dict[str, object]:
    """Return {"host", "device", "versions"} of this process; packages that are not installed are left out."""
    is_gpu = torch.cuda.is_available()
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    if is_gpu and torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return {
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name() if is_gpu else "CPU",
        "versions": versions,
    }
