"""Calls made through OpenAI's client, as experiences."""

from collections.abc import Mapping, Sequence
from typing import Any

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.inference import Completion
from trinity_lightning.explorer.tasks.task import prompt_text_of


class History:
    """An Experience a response, in the order in which the calls ended, with the engine's own tokens.

    Call i has `eid.step` i; its n responses are runs `run`, `run + 1`, ..., as they would be had each been asked for
    alone.

    Args:
        run: of the first response of a call.
    """

    def __init__(self, run: int) -> None:
        self._run = run
        self._calls = 0
        self._experiences: list[Experience] = []

    def record(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        temperature: float,
        completions: Sequence[Completion],
    ) -> None:
        """Keep what came of a call."""
        for i, completion in enumerate(completions):
            self._experiences.append(
                Experience(
                    eid=EID(run=self._run + i, step=self._calls),
                    tokens=[*completion.prompt_token_ids, *completion.token_ids],
                    prompt_length=len(completion.prompt_token_ids),
                    logprobs=list(completion.logprobs),
                    truncate_status="response_truncated" if completion.finish_reason == "length" else None,
                    info={"finish_reason": completion.finish_reason, "temperature": temperature},
                    prompt_text=prompt_text_of(messages),
                    response_text=completion.text,
                    messages=messages,
                    tools=tools,
                )
            )
        self._calls += 1

    def set_reward(self, reward: float, metrics: Mapping[str, float] | None = None) -> None:
        """What the run was worth: the reward of every call kept that has none yet, and metrics of the last of them."""
        unrewarded = [experience for experience in self._experiences if experience.reward is None]
        for experience in unrewarded:
            experience.reward = float(reward)
        if unrewarded and metrics:
            unrewarded[-1].metrics |= metrics

    def extract(self, clear: bool = True) -> list[Experience]:
        """The experiences kept; they are forgotten unless `clear` is false."""
        kept = list(self._experiences)
        if clear:
            self._experiences.clear()
        return kept
