"""Middleware of vLLM's server for requests that go on under new weights: their tokens so far, and whose they are.

vLLM's server says neither in the answers of its OpenAI API, so it is started with `--middleware` and the class
`KeptRequests`. vLLM itself notes which weights sampled a token: it is told their version while it is paused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trinity_lightning.explorer.models.server_path import ServerPath, generated

PATH = "/kept_requests"
KNOWN = "known"  # key of a request for progress: the number of known tokens of each request


class KeptRequests(ServerPath):
    """Middleware of vLLM's server: answers prompts with the versions of tokens' weights, and tells tokens so far."""

    path = PATH

    async def _answered(self, engine: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        if not request:
            return {}
        if KNOWN in request:
            return _progress(engine.output_processor.request_states.values(), request[KNOWN])
        prompt = {"type": "token", "prompt_token_ids": request["token_ids"]}
        return await generated(engine, prompt, request["sampling"], request["id"])


KEEPING = f"{KeptRequests.__module__}.{KeptRequests.__name__}"


def _progress(states: Iterable[Any], known: Mapping[str, int]) -> dict[str, Any]:
    """The new tokens of requests by their names: token ids, log-probabilities, and the starts of all versions.

    Args:
        states: vLLM's states of the unfinished requests.
        known: number of known tokens of each request that is asked for.
    """
    progress = {}
    for state in states:
        start = known.get(state.external_req_id)
        token_ids = state.detokenizer.output_token_ids
        if start is None or len(token_ids) == start:
            continue
        flat = state.logprobs_processor.logprobs
        progress[state.external_req_id] = {
            "token_ids": list(token_ids[start:]),
            "logprobs": [flat.logprobs[place] for place in flat.start_indices[start:]],
            "versions": [[place, version] for version, place in state.weight_version_starts],
        }
    return progress
