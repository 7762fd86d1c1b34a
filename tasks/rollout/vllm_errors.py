"""vLLM's refusals of requests. In vLLM 0.32 they are no ValueErrors."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def refusals_as_value_errors() -> Iterator[None]:
    """Raise ValueError where vLLM refuses a request."""
    from vllm import exceptions  # pyright: ignore[reportMissingImports]

    refusal: type[Exception] = getattr(exceptions, "VLLMClientError", ValueError)
    try:
        yield
    except refusal as error:
        raise ValueError(str(error)) from error
