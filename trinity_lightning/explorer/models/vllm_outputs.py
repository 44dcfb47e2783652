"""Completions of what vLLM has written: of ended requests, and of those under way in this process."""

from collections.abc import Collection, Sequence
from typing import Any

from trinity_lightning.common.inference import Completion


def completion_of(prompt: Sequence[int], sample: Any, end_tokens: Collection[int]) -> Completion:
    """A `Completion` of one of vLLM's CompletionOutputs that has ended; its text is not made here.

    Args:
        prompt: token ids of the prompt.
        sample: the CompletionOutput. Its request asked for flat log-probabilities.
        end_tokens: tokens that end every response, and thus are no stop tokens that a request asked for.
    """
    return Completion(
        prompt_token_ids=prompt,
        token_ids=list(sample.token_ids),
        logprobs=token_logprobs(sample.logprobs),
        text="",
        finish_reason=sample.finish_reason,
        stop_reason=None if sample.stop_reason in end_tokens else sample.stop_reason,
        versions=tuple((span.start, int(span.version)) for span in sample.weight_versions or ()),
    )


def written_so_far(processor: Any, request_id: str, end_tokens: Collection[int]) -> list[Completion]:
    """The samples of a request under way, in their order; those that go on have no finish_reason. [] if unknown.

    Args:
        processor: the OutputProcessor of vLLM's engine.
        request_id: the request, by the name that it was added with.
        end_tokens: as in `completion_of`.
    """
    # A request of several samples has a state for each one that goes on, and keeps the ended ones with their parent.
    states = [processor.request_states[name] for name in processor.external_req_ids.get(request_id, ())]
    samples = {
        state.request_index: Completion(
            prompt_token_ids=state.prompt_token_ids,
            token_ids=list(state.detokenizer.output_token_ids),
            logprobs=token_logprobs(state.logprobs_processor.logprobs),
            text="",
            finish_reason=None,
            versions=tuple((start, int(version)) for version, start in state.weight_version_starts),
        )
        for state in states
    }
    if states and (parent := states[0].parent_req) is not None:
        ended = [sample for sample in parent.output_aggregator if sample is not None]
        prompt = states[0].prompt_token_ids
        samples |= {sample.index: completion_of(prompt, sample, end_tokens) for sample in ended}
    return [samples[index] for index in sorted(samples)]


def token_logprobs(flat: Any) -> list[float]:
    """The log-probability of each token: the first entry at each position of vLLM's flat container."""
    return [flat.logprobs[start] for start in flat.start_indices]
