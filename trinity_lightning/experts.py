"""Expert data from the configuration: prompts and answers as experiences, or experiences that were stored."""

from collections.abc import Mapping
from typing import Any

from trinity_lightning.buffer.datamodule import ExpertData
from trinity_lightning.buffer.reader import BufferReader, create_reader
from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.config.schema import BufferConfig, TrainConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.chat import render_chat
from trinity_lightning.explorer.tasks.task import Task, messages_of, prompt_text_of
from trinity_lightning.explorer.tasks.taskset import Taskset


def expert_data(config: TrainConfig) -> ExpertData | None:
    """What joins the rollouts of every explore step; None where nothing does.

    Raises:
        ConfigError: a dataset, field or file is missing; or as the dataset's source says.
        StorageError: the stored experiences cannot be opened.
    """
    expert = config.buffer.expert
    if expert.per_step == 0:
        return None
    if expert.storage == "dataset":
        taskset = Taskset.from_config(expert.dataset)
        reader: BufferReader = AnswerReader(taskset, load_tokenizer(config.model.name), config.workflow.args)
    else:
        reader = create_reader(BufferConfig(storage=expert.storage, path=expert.path, url=expert.url))
    return ExpertData(reader, expert.per_step)


class AnswerReader(BufferReader):
    """A dataset's answers as the responses of an expert, in the taskset's order, without end.

    The prompt is rendered as single-turn workflows render it. The response is the entry's answer, or, where a
    conversation ends with the assistant, that message; then the tokenizer's end token, for the policy to learn where to
    stop.

    Args:
        taskset: the entries and their order.
        tokenizer: the policy's.
        workflow_args: of the run's workflow, for its system prompt.

    Raises:
        ConfigError: an entry has no answer.
    """

    def __init__(self, taskset: Taskset, tokenizer: Any, workflow_args: Mapping[str, Any] | None = None) -> None:
        self._taskset, self._tokenizer = taskset, tokenizer
        self._workflow_args = dict(workflow_args or {})
        for i in range(len(taskset)):  # a field that is empty shows now, not in the middle of a run
            self._conversation(taskset[i])

    def _try_read(self, count: int | None, whole_groups: bool, last: bool) -> list[Experience] | None:
        return [self._experience(raw) for raw in self._taskset.next_batch(count or 1)]

    def _conversation(self, raw: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        """The prompt's messages, and the answer."""
        messages = messages_of(Task("simple", raw, workflow_args=self._workflow_args))
        answer = raw.get("answer")
        if answer is None and messages[-1]["role"] == "assistant":
            *messages, last = messages
            answer = last.get("content")
        if answer is None or not str(answer).strip() or not messages:
            raise ConfigError(
                f"expert data '{self._taskset.name}', entry {raw['task_index']['index']}: no answer. Set "
                "buffer.expert.dataset.answer_field to the field with the response, or end `messages` with it."
            )
        return messages, str(answer)

    def _experience(self, raw: dict[str, Any]) -> Experience:
        messages, answer = self._conversation(raw)
        prompt = render_chat(self._tokenizer, messages)
        response = self._tokenizer.encode(answer, add_special_tokens=False)
        if self._tokenizer.eos_token_id is not None:
            response = [*response, self._tokenizer.eos_token_id]
        return Experience(
            eid=EID(suffix=f"{self._taskset.name}-{raw['task_index']['index']}"),
            tokens=[*prompt, *response],
            prompt_length=len(prompt),
            info={"task_index": raw["task_index"]},
            prompt_text=prompt_text_of(messages),
            response_text=answer,
        )

    def state_dict(self) -> dict[str, Any]:
        """The taskset's cursor."""
        return self._taskset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; a ConfigError where that was of other data."""
        self._taskset.load_state_dict(state)
