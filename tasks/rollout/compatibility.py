"""Compatibility of a run and a rollout server."""


def adapter_mismatch(sent: int, taken: int) -> str | None:
    """Return why the run's updates do not suit the server; `sent`, `taken`: ranks of adapters, 0 for full weights."""
    if sent and not taken:
        return (
            "it takes full weights, not adapters. Start it with vLLM and --vllm_enable_lora true --vllm_max_lora_rank "
            f"{sent}, or remove --vllm_enable_lora from the training"
        )
    if taken and not sent:
        return (
            "it was started with --vllm_enable_lora true and takes only adapters. Set it for the training too (with "
            "--tuner_type lora), or start the server without it"
        )
    if sent > taken:
        return f"its adapters have at most rank {taken}, not {sent}. Start it with --vllm_max_lora_rank {sent}"
    return None


def vocab_mismatch(trained: int | None, served: int | None) -> str | None:
    """Return why the models differ by their vocabulary sizes, None if equal or unknown."""
    if trained is None or served is None or trained == served:
        return None
    return (
        f"its model has a vocabulary of {served} tokens, and the trained one has {trained}. Set the same --model for "
        "`swift rollout` and the run"
    )
