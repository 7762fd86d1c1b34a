"""Report of a machine: packages, with commands to install missing ones, the host, its disks and GPUs.

    megatron doctor                           # takes a few seconds: disks, and links between GPUs, are measured
    python scripts/check_megatron_env.py      # with any Python, also if nothing is installed

It therefore imports nothing of the project. The exit code is 1 if a required package is missing, else 0.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
INSTALL = f"{sys.executable} -m pip install -c {ROOT / 'constraints.txt'}"
if importlib.util.find_spec("pip") is None:
    INSTALL = f"uv pip install --python {sys.executable} -c {ROOT / 'constraints.txt'}"


def torch_cuda_major() -> str:
    """Return the major CUDA version of the installed PyTorch, without importing it; 13 without one."""
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else Path("none")
    match = re.search(r"^cuda.*= '(\d+)", version.read_text(), re.MULTILINE) if version.is_file() else None
    return match[1] if match else "13"


def build_environment() -> str:
    """Return environment variables for Transformer Engine's build to find pip's headers of cuDNN and NCCL."""
    nvidia = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or (Path(nvcc).resolve().parent.parent if nvcc else "/usr/local/cuda")
    cudnn, nccl = nvidia / "cudnn", nvidia / "nccl"
    return (
        f"CUDA_HOME={home} CUDNN_HOME={cudnn} CUDNN_PATH={cudnn} "
        f"CPLUS_INCLUDE_PATH={cudnn}/include:{nccl}/include LIBRARY_PATH={cudnn}/lib:{nccl}/lib"
    )


REQUIRED = ["torch", "megatron-core", "transformers", "datasets", "safetensors", "peft", "typer", "pyyaml", "numpy",
            "pyarrow", "tqdm", "tensorboard", "matplotlib"]  # fmt: skip
OPTIONAL = {  # package: (purpose, how to install)
    "transformer-engine": (
        "the fastest layers on NVIDIA GPUs (without it: PyTorch and Triton)",
        f"{INSTALL} pybind11 ninja && {build_environment()} {INSTALL} --no-build-isolation "
        f"'transformer-engine[core_cu{torch_cuda_major()},pytorch]'",
    ),
    "flash-linear-attention": (
        "gated delta nets, Kimi delta attention, Mamba-2 on GPUs (without it: plain PyTorch, much slower)",
        f"{INSTALL} flash-linear-attention",
    ),
    "mamba-ssm": (
        "Mamba-2 layers of Nemotron-H and others on GPUs (without it: flash-linear-attention)",
        f"{INSTALL} --no-build-isolation mamba-ssm",
    ),
    "flash-attn-4": (
        "attention on H100 and H200 (without it: cuDNN's, or this package's)",
        f"{INSTALL} 'flash-attn-4[cu13]'",
    ),
    "flash-attn": (
        "--attention_backend flash (without it: cuDNN's or torch's flash attention)",
        f"MAX_JOBS=8 {INSTALL} --no-build-isolation flash-attn",
    ),
    "emerging-optimizers": ("--optimizer muon", f"{INSTALL} emerging-optimizers"),
    "apex": (
        "nothing beyond Transformer Engine and PyTorch",
        "git clone https://github.com/NVIDIA/apex && cd apex && pip install --no-build-isolation -v . "
        "--config-settings '--build-option=--cpp_ext' --config-settings '--build-option=--cuda_ext'",
    ),
    "vllm": ("swift infer --infer_backend vllm", f"{INSTALL} vllm"),
    "modelscope": ("models and datasets of ModelScope (without it: --use_hf true)", f"{INSTALL} modelscope"),
    "wandb": ("--report_to wandb", f"{INSTALL} wandb"),
    "swanlab": ("--report_to swanlab", f"{INSTALL} swanlab"),
    "mlflow": ("--report_to mlflow", f"{INSTALL} mlflow"),
    "trackio": ("--report_to trackio", f"{INSTALL} trackio"),
}


GIB = 2**30
MIN_SHARED_MEMORY = 1 * GIB  # bytes of /dev/shm: containers have 64 MiB by default, which data loaders and NCCL exceed
BLOCK, BLOCKS = 2**20, 512  # bytes of a write, and their number in the file that measures a disk
DISK_SECONDS = 2.0  # longest measurement of writing


def main(words: Sequence[str] = ()) -> int:
    if words:
        print((__doc__ or "").strip() if {*words} & {"-h", "--help"} else "error: doctor takes no flags. Remove them.")
        return 0 if {*words} & {"-h", "--help"} else 2
    missing = 0
    print("Required")
    missing += _report_python()
    bounds = requirements()
    for name in REQUIRED:
        missing += _report_package(name, bounds.get(name, ""), f"{INSTALL} -e {ROOT}")
    missing += _report_package("megaswift", "", f"{INSTALL} -e {ROOT}")
    print("\nOptional")
    for name, (use, install) in OPTIONAL.items():
        _report_package(name, bounds.get(name, ""), install, use)
    print("\nHost")
    _host()
    print("\nGPUs")
    _gpus()
    print(f"\n{f'{missing} required parts are missing.' if missing else 'All required parts are installed.'}")
    return 1 if missing else 0


def requirements() -> dict[str, str]:
    """Return version bounds by package from pyproject.toml: {"torch": ">=2.11"}."""
    text = _pyproject()
    return dict(re.findall(r'"([\w-]+)(?:\[\w+\])?([<>=~!][^"]*)"', text))


def _pyproject() -> str:
    """Return the text of pyproject.toml, "" outside of a checkout."""
    file = ROOT / "pyproject.toml"
    return file.read_text() if file.is_file() else ""


def fits(version: str, bounds: str) -> bool:
    """Return whether a version satisfies bounds such as '>=0.19,<0.20'.

    Ignores letters and local parts (2.11.0+cpu).
    """
    installed = _numbers(version)
    for operator, bound in re.findall(r"(>=|<=|==|>|<)\s*([\w.]+)", bounds):
        required = _numbers(bound)
        length = max(len(installed), len(required))
        left, right = (numbers + (0,) * (length - len(numbers)) for numbers in (installed, required))
        if not {">=": left >= right, "<=": left <= right, "==": left == right, ">": left > right, "<": left < right}[
            operator
        ]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version)[0]))


def _report_python() -> int:
    version = platform.python_version()
    bounds = re.search(r'requires-python = "(.*)"', _pyproject())
    required = bounds[1] if bounds else ""
    return _print_line("python", version, fits(version, required), required, "uv venv --python 3.12 .venv")


def _report_package(name: str, bounds: str, install: str, use: str = "") -> int:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _print_line(name, "not installed", False, bounds, install, use)
    if name == "transformer-engine" and not _has_torch_extension():
        return _print_line(name, f"{version}, without its PyTorch extension", False, "", install, use)
    return _print_line(name, version, fits(version, bounds), bounds, install, use)


def _has_torch_extension() -> bool:
    """Return whether Transformer Engine's extension is on the path, or in a folder that its import adds to it."""
    if importlib.util.find_spec("transformer_engine_torch"):
        return True
    package = importlib.util.find_spec("transformer_engine")
    folders = (package and package.submodule_search_locations) or []
    return any(next(Path(folder).glob("wheel_lib/transformer_engine_torch*"), None) for folder in folders)


def _print_line(name: str, version: str, is_ok: bool, bounds: str, install: str, use: str = "") -> int:
    print(f"  {'ok' if is_ok else '--':<3}{name:<19} {version}" + ("" if is_ok or not bounds else f" (needs {bounds})"))
    if not is_ok:
        if use:
            print(f"     for: {use}")
        print(f"     fix: {install}")
    return 0 if is_ok else 1


def _host() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    print(f"  ok {cores} cores, {memory:.0f} GiB of memory, {platform.platform()}")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        is_ok = size >= MIN_SHARED_MEMORY
        print(f"  {'ok' if is_ok else '--'} {shared}: {size / GIB:.2f} GiB")
        if not is_ok:
            print("     fix: docker run --ipc=host, or a memory-backed volume in Kubernetes (docs/many-nodes.md)")
    cache = os.environ.get("MODELSCOPE_CACHE") or os.environ.get("HF_HOME") or "~/.cache"
    folders = {use: _existing(Path(path).expanduser()) for use, path in (("runs", "."), ("cache", cache))}
    for use, folder in folders.items():
        print(_disk(use, folder))


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def _disk(use: str, folder: Path) -> str:
    """Return a line about the disk of a folder, measured with a temporary file of at most 512 MiB."""
    free = shutil.disk_usage(folder).free
    if free < 2 * BLOCK * BLOCKS:
        return f"  -- disk of {use} ({folder}): {free / GIB:.2f} GiB free"
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            writes, reads = _speeds(file.fileno())
    except OSError as error:
        return f"  -- disk of {use} ({folder}): cannot be written ({error.strerror})"
    return f"  ok disk of {use} ({folder}): {free / GIB:.0f} GiB free, writes {writes:.2f} GB/s, reads {reads:.2f} GB/s"


def _speeds(file: int) -> tuple[float, float]:
    """Return the GB/s of writing to an empty file and of reading it again, by its descriptor."""
    block, start, written = os.urandom(BLOCK), time.perf_counter(), 0
    while written < BLOCKS * BLOCK and time.perf_counter() - start < DISK_SECONDS:
        written += os.write(file, block)
    os.fsync(file)
    writes = written / (time.perf_counter() - start) / 1e9
    if hasattr(os, "posix_fadvise"):  # so that it is not read from memory
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(file, 0, os.SEEK_SET)
    start, length = time.perf_counter(), 0
    while count := len(os.read(file, BLOCK)):
        length += count
    return writes, length / (time.perf_counter() - start) / 1e9


def _gpus() -> None:
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        listed = subprocess.run(query, capture_output=True, text=True, check=False)
        for number, gpu in enumerate(listed.stdout.splitlines() if listed.returncode == 0 else []):
            print(f"  ok {number}: {gpu}")
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = "this PyTorch is built for CPUs" if built is None else f"PyTorch (CUDA {built}) finds none"
        print(f"  -- no GPU: {reason}. Training runs on the CPU, with gloo.")
        if built is None and shutil.which("nvidia-smi"):
            print(f"     fix: {INSTALL} --force-reinstall torch   # not a +cpu build")
        return
    print(f"  ok CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "not built into this PyTorch"  # type: ignore[attr-defined]
    print(f"  {'ok' if nccl else '--'} NCCL {version}")
    if nccl and torch.cuda.device_count() > 1:
        _report_bandwidth(torch)


def _report_bandwidth(torch: ModuleType) -> None:
    """Print the bus bandwidth of an all-reduce over the visible GPUs, as nccl-tests counts it: the best of several."""
    count, best = torch.cuda.device_count(), 0.0
    try:
        tensors = [torch.ones(2**26, device=f"cuda:{gpu}") for gpu in range(count)]
        for _ in range(6):  # the first one also connects
            start = time.perf_counter()
            torch.cuda.nccl.all_reduce(tensors)
            for gpu in range(count):
                torch.cuda.synchronize(gpu)
            best = max(best, tensors[0].nbytes * 2 * (count - 1) / count / (time.perf_counter() - start) / 1e9)
    except RuntimeError as error:
        print(f"  -- NCCL between {count} GPUs: {str(error).splitlines()[0]}")
        return
    print(f"  ok NCCL between {count} GPUs: {best:.0f} GB/s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
