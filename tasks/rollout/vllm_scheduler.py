"""Scheduler of vLLM that hands over a completion when it ends, instead of token by token.

vLLM's scheduler has an output for each token of each request. Encoding, sending and processing them delays the process
that launches the model's kernels, which decodes a small model no faster than it can launch them.
"""

from dataclasses import dataclass, field

from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]

from .vllm_adapter import VllmObject
from .vllm_errors import quiet_vllm
from .vllm_requests import LOG_PROBS

quiet_vllm()  # in the process that makes the scheduler, which imports this module first


class CompletionScheduler:
    """Factory of an engine's scheduler (EngineArgs.scheduler_cls): asynchronous where the engine is."""

    def __new__(cls, vllm_config: VllmObject, **arguments: object) -> "CompletionScheduler":
        scheduler = _AsyncScheduler if vllm_config.scheduler_config.async_scheduling else _Scheduler
        return scheduler(vllm_config=vllm_config, **arguments)  # pyright: ignore[reportReturnType]


@dataclass
class _HeldOutputs:
    """Outputs of a request so far. Flat lists, since the garbage collector would walk a list of each token."""

    prefill_stats: VllmObject
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def add(self, output: VllmObject) -> None:
        """Add the tokens of an output."""
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            self.log_probs += output.new_logprobs.logprobs[:, 0].tolist()

    def complete(self, output: VllmObject) -> None:
        """Make the last output that of all tokens."""
        self.add(output)
        output.new_token_ids = self.tokens
        # These parameters reach the caller as they are; vLLM would process the log-probabilities one by one.
        output.kv_transfer_params = (output.kv_transfer_params or {}) | {LOG_PROBS: self.log_probs}
        output.new_logprobs = None
        output.prefill_stats = self.prefill_stats


class _HoldsOutputs:
    """Mixin of a scheduler. Outputs that are more than tokens, or that the caller wants at once, are not held back."""

    requests: dict[str, VllmObject]

    def __init__(self, **arguments: object):
        super().__init__(**arguments)
        self._held_outputs: dict[str, _HeldOutputs] = {}  # key: id of a request that goes on

    def update_from_output(self, *arguments: object) -> dict[int, VllmObject]:
        by_client = super().update_from_output(*arguments)  # pyright: ignore[reportAttributeAccessIssue]
        for outputs in by_client.values():
            outputs.outputs = [output for output in outputs.outputs if not self._hold(output)]
        return {
            client: outputs
            for client, outputs in by_client.items()
            if outputs.outputs or outputs.finished_requests or outputs.scheduler_stats is not None
        }

    def _hold(self, output: VllmObject) -> bool:
        """Hold an output back, or complete the last one of a request. Return whether it is held back."""
        if output.finished:
            if earlier_outputs := self._held_outputs.pop(output.request_id, None):
                earlier_outputs.complete(output)
            return False
        earlier_outputs = self._held_outputs.get(output.request_id)
        if earlier_outputs is None:
            if not _waits_for_end(self.requests[output.request_id].sampling_params):
                return False
            earlier_outputs = self._held_outputs[output.request_id] = _HeldOutputs(output.prefill_stats)
        earlier_outputs.add(output)
        return True

    def finish_requests(self, *arguments: object) -> VllmObject:
        """Finish requests from outside, as when a client has gone."""
        requests = super().finish_requests(*arguments)  # pyright: ignore[reportAttributeAccessIssue]
        for request in requests:
            self._held_outputs.pop(request.request_id, None)
        return requests


class _Scheduler(_HoldsOutputs, Scheduler):
    pass


class _AsyncScheduler(_HoldsOutputs, AsyncScheduler):
    pass


def _waits_for_end(params: SamplingParams | None) -> bool:
    """Return whether a request asks for tokens and their log-probabilities alone, when it has ended."""
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.detokenize
        and params.logprobs == 0
        and params.prompt_logprobs is None
    )
