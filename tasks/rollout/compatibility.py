"""Why a run and a rollout server do not fit together."""


def unfit(sent: int, taken: int) -> str | None:
    """Why what a run would send is not what a server takes: the ranks of adapters, 0 for whole weights."""
    if sent and not taken:
        return (
            "it takes whole weights, and not adapters alone. Start it by vLLM with --vllm_enable_lora true "
            f"--vllm_max_lora_rank {sent}, or leave --vllm_enable_lora out of the training"
        )
    if taken and not sent:
        return (
            "it was started with --vllm_enable_lora true, and takes adapters alone: give that to the training too "
            "(with --tuner_type lora), or start the server without it"
        )
    if sent > taken:
        return f"it has room for adapters of rank {taken}, not {sent}: start it with --vllm_max_lora_rank {sent}"
    return None


def foreign(trained: int | None, served: int | None) -> str | None:
    """Why a server's model is another than the one that is trained: their sizes of vocabulary, None where unknown."""
    if trained is None or served is None or trained == served:
        return None
    return (
        f"its model has a vocabulary of {served} tokens, and the one that is trained has {trained}. Give `swift "
        "rollout` and the run the same --model"
    )
