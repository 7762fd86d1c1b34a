"""vLLM's refusals of requests, and its warnings."""

import contextlib
import logging
from collections.abc import Iterator

# vLLM's loggers that warn about intended behaviour: tensors of a layer that arrive one by one, experts that its loader
# does not count, compilation of the trainer's Triton kernels, and the scheduler.
NOISY = (
    "model_executor.model_loader.reload.layerwise",
    "v1.worker.gpu_model_runner",
    "utils.jit_monitor",
    "config.scheduler",
)


@contextlib.contextmanager
def refusals_as_value_errors() -> Iterator[None]:
    """Raise ValueError where vLLM refuses a request. In vLLM 0.32 its error is no ValueError."""
    from vllm import exceptions  # pyright: ignore[reportMissingImports]

    refusal: type[Exception] = getattr(exceptions, "VLLMClientError", ValueError)
    try:
        yield
    except refusal as error:
        raise ValueError(str(error)) from error


def quiet_vllm() -> None:
    """Silence the warnings of NOISY. Call it after importing vLLM, which sets its loggers' levels."""
    for name in NOISY:
        logging.getLogger(f"vllm.{name}").setLevel(logging.ERROR)
