"""Scheduler of vLLM that hands over a completion when it ends, instead of token by token.

vLLM's scheduler has an output for each token of each request. Encoding, sending and processing them delays the process
that launches the model's kernels, which decodes a small model no faster than it can launch them.
"""

from dataclasses import dataclass, field
from itertools import chain

from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]

from .vllm_adapter import VllmObject
from .vllm_errors import quiet_vllm
from .vllm_requests import LOG_PROBS

quiet_vllm()  # here, since vLLM warns of a scheduler that is not its own in the process that has unpickled its name


class CompletionScheduler:
    """Class for EngineArgs.scheduler_cls, whose objects are the scheduler that fits the engine."""

    def __new__(cls, vllm_config: VllmObject, **arguments: object) -> "CompletionScheduler":
        scheduler = _AsyncScheduler if vllm_config.scheduler_config.async_scheduling else _Scheduler
        return scheduler(vllm_config=vllm_config, **arguments)  # pyright: ignore[reportReturnType]


@dataclass
class _Completion:
    """Outputs of a request so far."""

    prefill_stats: VllmObject
    tokens: list[list[int]] = field(default_factory=list)  # of each output
    log_probs: list[list[float]] = field(default_factory=list)

    def add(self, output: VllmObject) -> None:
        self.tokens.append(output.new_token_ids)
        if output.new_logprobs is not None:
            self.log_probs.append(output.new_logprobs.logprobs[:, 0].tolist())

    def complete(self, output: VllmObject) -> None:
        """Make the last output that of all tokens."""
        self.add(output)
        output.new_token_ids = list(chain.from_iterable(self.tokens))
        # These parameters reach the caller as they are; vLLM would process the log-probabilities one by one.
        output.kv_transfer_params = {LOG_PROBS: list(chain.from_iterable(self.log_probs))}
        output.new_logprobs = None
        output.prefill_stats = self.prefill_stats


class _WholeCompletions:
    """Mixin of a scheduler. Outputs that are more than tokens, or that the caller wants at once, are not held back."""

    requests: dict[str, VllmObject]

    def __init__(self, **arguments: object):
        super().__init__(**arguments)
        self._completions: dict[str, _Completion] = {}  # of unfinished requests

    def update_from_output(self, *arguments: object) -> dict[int, VllmObject]:
        by_client = super().update_from_output(*arguments)  # pyright: ignore[reportAttributeAccessIssue]
        for outputs in by_client.values():
            outputs.outputs = [output for output in outputs.outputs if not self._holds_back(output)]
        return {
            client: outputs
            for client, outputs in by_client.items()
            if outputs.outputs or outputs.finished_requests or outputs.scheduler_stats is not None
        }

    def _holds_back(self, output: VllmObject) -> bool:
        if output.finished:
            if completion := self._completions.pop(output.request_id, None):
                completion.complete(output)
            return False
        completion = self._completions.get(output.request_id)
        if completion is None:
            if not _wants_whole(self.requests[output.request_id].sampling_params):
                return False
            completion = self._completions[output.request_id] = _Completion(output.prefill_stats)
        completion.add(output)
        return True

    def finish_requests(self, *arguments: object) -> VllmObject:
        """Finish requests from outside, as when a client has gone."""
        finished = super().finish_requests(*arguments)  # pyright: ignore[reportAttributeAccessIssue]
        for request in finished:
            self._completions.pop(request.request_id, None)
        return finished


class _Scheduler(_WholeCompletions, Scheduler):
    pass


class _AsyncScheduler(_WholeCompletions, AsyncScheduler):
    pass


def _wants_whole(params: SamplingParams | None) -> bool:
    """Return whether a request asks for tokens and their log-probabilities alone, when it has ended."""
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.detokenize
        and params.logprobs == 0
        and params.prompt_logprobs is None
    )
