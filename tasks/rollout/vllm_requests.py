"""Requests and completions of rollout engines as vLLM's objects."""

from collections.abc import Collection

from .engine import Completion, Request, Sampling
from .vllm_adapter import VllmObject

LOG_PROBS = "log_probs"  # key of all tokens' log-probabilities in a request's output by vllm_scheduler.py


def sampling_params(request: Request, sampling: Sampling, eos: Collection[int]) -> VllmObject:
    """Return vLLM's SamplingParams for a request. Its logits are already divided by the temperature.

    `eos`: eos token ids of the checkpoint.
    """
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

    limit = min(sampling.max_new_tokens, request.max_new_tokens or sampling.max_new_tokens)
    return SamplingParams(
        temperature=1.0 if sampling.temperature else 0.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=max(1, limit),
        seed=request.seed,
        stop=list(sampling.stop),
        stop_token_ids=sorted(eos if sampling.ends is None else sampling.ends),
        ignore_eos=True,  # stop_token_ids has the eos tokens
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        detokenize=bool(sampling.stop),
        logprobs=0,  # the sampled token's alone
        output_kind=RequestOutputKind.FINAL_ONLY,  # no output for each token of each completion
    )


def to_completion(output: VllmObject, sampling: Sampling) -> Completion:
    """Convert vLLM's RequestOutput of one completion."""
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    if (log_probs := (output.kv_transfer_params or {}).get(LOG_PROBS)) is None:
        log_probs = [step[token].logprob for token, step in zip(tokens, completion.logprobs, strict=True)]
    if len(log_probs) != len(tokens):
        raise RuntimeError(
            f"vLLM returned {len(log_probs)} log-probabilities of {len(tokens)} tokens. Install the release of "
            "constraints.txt"
        )
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion by {completion.finish_reason!r}: see its log")
    finish = "stop" if completion.finish_reason == "stop" else "length"
    return Completion(tokens, log_probs, finish, completion.routed_experts if sampling.experts else None)
