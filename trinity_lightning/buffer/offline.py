"""Training on experiences of a reader: without an explorer (SFT, DPO, offline RL), or beside its rollouts."""

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from trinity_lightning.buffer.datamodule import UnmovedDataModule
from trinity_lightning.buffer.dataset import ExampleReader, examples_of
from trinity_lightning.buffer.held_out import HeldOutLoss, held_out_of_run
from trinity_lightning.buffer.reader import BufferReader, create_reader
from trinity_lightning.common.experience import EID, Experience, ExperienceError
from trinity_lightning.common.messages import Conversation, check_media, check_roles, warn_of_unread
from trinity_lightning.common.optimizer_batch import IS_EXPERT, OptimizerBatch
from trinity_lightning.common.pictures.processor import PictureProcessor, load_processor
from trinity_lightning.config.buffer import BufferConfig
from trinity_lightning.config.checkpoints import resume_command
from trinity_lightning.config.models import load_generation_config, load_tokenizer
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.values import number, whole_number
from trinity_lightning.errors import ConfigError, ModelLoadError, StorageError, configured_at
from trinity_lightning.explorer.interruption import StopCheckpoint
from trinity_lightning.explorer.models.imitation import Imitation
from trinity_lightning.explorer.models.turns import common_length, turn_end
from trinity_lightning.explorer.tasks.task import Task, conversation_of, prompt_text_of
from trinity_lightning.explorer.tasks.taskset import Taskset
from trinity_lightning.resume import check_resumed_data

if TYPE_CHECKING:
    from trinity_lightning.monitor.run_monitor import RunMonitor
    from trinity_lightning.trainer.policy import PolicyModule

logger = logging.getLogger(__name__)


# -- the data module of a run without an explorer ----------------------------------------------------------------------


@dataclass(eq=False)
class OfflineLoader:
    """Yields `steps_per_epoch` optimizer batches an epoch, each one read.

    Its state is the position in the epoch. The reader's state is in that of the data module.

    Attributes:
        reader: gives the experiences.
        batch_size: most experiences a batch; more only if one whole group alone is larger.
        steps_per_epoch: batches an epoch.
        whole_groups: never part the experiences of a task.
        wait: seconds to wait for a batch that another process has yet to write.
        max_response_length: longest response that the data allow, in tokens; None: unknown, see `OptimizerBatch`.
        check: raises a StorageError for experiences that cannot be trained on.
        everywhere: calls the read on rank 0, and gives the experiences to all ranks.
        pause: see `BufferReader.read`; for a run that may end during the wait.

    Raises:
        ConfigError: a number below 1, or a wait below 0.
    """

    reader: BufferReader
    batch_size: int
    steps_per_epoch: int
    _: KW_ONLY
    whole_groups: bool = True
    wait: float = 0.0
    max_response_length: int | None = None
    check: Callable[[Sequence[Experience]], None] | None = None
    everywhere: Callable[[Callable[[], list[Experience]]], list[Experience]] = lambda read: read()
    pause: Callable[[float], None] = time.sleep
    _epoch: int = field(default=1, init=False)
    _position: int = field(default=0, init=False)
    _before: dict[str, Any] = field(default_factory=dict, init=False)  # the reader's state before the last batch

    def __post_init__(self) -> None:
        whole_number("batch_size", self.batch_size, least=1)
        whole_number("steps_per_epoch", self.steps_per_epoch, least=1)
        number("wait", self.wait, least=0)

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[OptimizerBatch]:
        if self._position >= len(self):
            self._epoch, self._position = self._epoch + 1, 0
        for index in range(self._position, len(self)):
            self._before = self.reader.state_dict()
            experiences = self.everywhere(self._read)
            if not experiences:
                fixes = ["more data", "fewer steps", *filter(None, [self.reader.endless_with])]
                raise StorageError(
                    f"nothing left to read for step {index + 1} of {len(self)} in epoch {self._epoch} (waited "
                    f"{self.wait:g} s). Give {' or '.join(fixes)}."
                )
            # Counted before the yield: a checkpoint after its training step then resumes with the next one.
            self._position = index + 1
            yield OptimizerBatch.of(experiences, self._epoch, self.max_response_length)

    def _read(self) -> list[Experience]:
        read = self.reader.read(self.batch_size, whole_groups=self.whole_groups, wait=self.wait, pause=self.pause)
        try:
            if self.check is not None:
                self.check(read)
        except StorageError:
            self.reader.load_state_dict(self._before)  # a checkpoint of the run that ends now has not read them
            raise
        return read

    def rewind(self, position: int) -> None:
        """Go back to batch `position`. The batch after it was handed out but not trained on, and is read again."""
        if self._position > position:
            self.reader.load_state_dict(self._before)
            self._position = position

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._position = state["epoch"], state["position"]


class OfflineExperienceDataModule(UnmovedDataModule):
    """Experiences of a reader, without an explorer: SFT, DPO, offline RL.

    An epoch is `steps_per_epoch` reads, each of which becomes one optimizer batch. The positions of reader and loader
    are in the checkpoint.

    Args:
        reader: gives the experiences.
        batch_size, steps_per_epoch, whole_groups, wait, max_response_length, check: see `OfflineLoader`.
        held_out: examples to measure the loss on.

    Attributes:
        older_weights: True, for PolicyModule: other weights than the present ones sampled the experiences.

    Raises:
        ConfigError: a number below 1.
    """

    older_weights = True

    def __init__(
        self,
        reader: BufferReader,
        *,
        batch_size: int,
        steps_per_epoch: int,
        whole_groups: bool = True,
        wait: float = 0.0,
        max_response_length: int | None = None,
        check: Callable[[Sequence[Experience]], None] | None = None,
        held_out: Sequence[Experience] = (),
    ) -> None:
        super().__init__()
        self.held_out = held_out
        self.reader = reader
        self._loader = OfflineLoader(
            reader,
            batch_size,
            steps_per_epoch,
            whole_groups=whole_groups,
            wait=wait,
            max_response_length=max_response_length,
            check=check,
            everywhere=self.everywhere,
            pause=self._pause,
        )

    def _pause(self, seconds: float) -> None:
        """Sleep until there may be something to read. No item is under way: a `StopCheckpoint` may end the run."""
        trainer: Any = self.trainer
        for callback in getattr(trainer, "callbacks", ()):
            wanted = isinstance(callback, StopCheckpoint) and callback.wanted
            if wanted and (reason := callback.reason(trainer)) is not None:
                raise reason
        time.sleep(seconds)

    def train_dataloader(self) -> OfflineLoader:
        """A sized, lazy, stateful loader for the whole run."""
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        return {"reader": self.reader.state_dict(), "loader": self._loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was taken. ForeignPositionError: the checkpoint belongs to another buffer."""
        self.reader.load_state_dict(state_dict["reader"])
        if "loader" in state_dict:  # which earlier versions lacked; Lightning restores it only within an epoch
            self._loader.load_state_dict(state_dict["loader"])


class UnreadReader(BufferReader):
    """Stands in for the reader on the ranks that get their experiences from rank 0."""

    def _try_read(self, count: int, whole_groups: bool, last: bool) -> list[Experience] | None:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: rank 0 goes on reading."""


# -- a run without rollouts, from its configuration --------------------------------------------------------------------


@dataclass(eq=False)
class PlacesCheck:
    """Refuses experiences whose pictures have not as many places as the run's model has states for them.

    The model's processor is loaded when the first pictures come. Training needs no more than their tensors: without a
    processor nothing is refused here.

    Args:
        model, args: name of the model, and arguments of its processor's calls.
    """

    model: str
    args: Mapping[str, Any]

    def __call__(self, experiences: Sequence[Experience]) -> None:
        """Check experiences before they are trained on. StorageError: they are refused; the message names the first."""
        for experience in experiences:
            if not experience.multi_modal_inputs or self._processor is None:
                continue
            try:
                self._processor.check(experience.multi_modal_inputs)
            except ExperienceError as error:
                raise StorageError(f"experience {experience.eid}, which is to be trained on: {error}") from error

    @cached_property
    def _processor(self) -> PictureProcessor | None:
        try:
            return load_processor(self.model, self.args)
        except ModelLoadError:
            return None


def offline_data_module(
    config: TrainConfig, pairs: bool, follower: bool, max_response_length: int
) -> OfflineExperienceDataModule:
    """The data module of a run without rollouts: over the experiences of another run, or the examples of a dataset.

    Args:
        config: of the run.
        pairs: True if the loss is of preference pairs.
        follower: True if rank 0 reads for this rank.
        max_response_length: longest response that the other run allowed, in tokens.

    Raises:
        ConfigError, StorageError: as the readers.
    """
    dataset = config.buffer.storage == "dataset"
    reader: BufferReader
    held_out: Sequence[Experience] = ()
    check: PlacesCheck | None = None
    if follower:
        reader = UnreadReader()
    elif dataset:
        settings = config.buffer.dataset
        with configured_at("buffer.path", section="buffer.dataset"):
            examples = examples_of(config, str(config.buffer.path), settings.split, pairs)
        if settings.held_out.given:
            examples, measured = held_out_of_run(config, examples, pairs)
            held_out = list(map(measured.complete, measured))
        reader = ExampleReader.of_run(config, examples)
    else:
        with configured_at("buffer.storage", section="buffer"):
            reader = create_reader(config.buffer, config.seed)
        check = PlacesCheck(config.model.name, config.model.processor_args)
        if config.buffer.order == "fifo":  # other orders log each read
            _check_first(reader, pairs, check)
    return OfflineExperienceDataModule(
        reader,
        batch_size=config.buffer.batch_size,
        steps_per_epoch=1,
        max_response_length=config.buffer.dataset.max_length if dataset else max_response_length,
        check=check,
        held_out=held_out,
    )


def offline_parts(
    config: TrainConfig,
    folder: Path,
    policy: "PolicyModule",
    monitor: "RunMonitor",
    checkpoint: str | None,
    max_response_length: int,
    follower: bool,
) -> tuple[OfflineExperienceDataModule, list[L.Callback]]:
    """The data module and the callbacks of a run without rollouts.

    The callbacks are the loss on held-out examples, if there are some, and on rank 0 the monitor and the saving of a
    run that is stopped.

    Raises:
        ConfigError: the checkpoint to resume from belongs to other data; or as `offline_data_module`.
    """
    data = offline_data_module(config, policy.objective.pairs, follower, max_response_length)
    if checkpoint is not None:
        check_resumed_data(data, checkpoint, config.buffer, folder)
    callbacks: list[L.Callback] = []
    dataset = config.buffer.dataset
    if config.buffer.storage == "dataset" and dataset.held_out.given:
        interval, longest = dataset.held_out.interval, dataset.max_length
        callbacks.append(HeldOutLoss(data.held_out, interval, config.steps, monitor.keep_metrics, longest))
    if not follower:
        callbacks += [monitor, StopCheckpoint(folder / "checkpoints", partial(resume_command, folder))]
    return data, callbacks


def summary(config: TrainConfig) -> list[tuple[str, str]]:
    """Rows about a run without rollouts, for the table at its start."""
    return [
        ("experiences", f"{config.buffer.storage} {config.buffer.path or config.buffer.url}, no rollouts"),
        ("training", f"{config.steps} optimizer steps x {config.buffer.batch_size} experiences"),
        ("objective", config.algorithm.policy_loss.name),
    ]


def _check_first(reader: BufferReader, pairs: bool, check: PlacesCheck) -> None:
    """Refuse stored data whose first experience does not fit the loss (only `dpo` learns from pairs) or the model."""
    start = reader.state_dict()
    first = reader.read(1)
    reader.load_state_dict(start)
    if first and (first[0].experience_type == "dpo") != pairs:
        misfit = "is a preference pair: choose algorithm.policy_loss=dpo."
        if pairs:
            misfit = "is not a preference pair, and algorithm.policy_loss=dpo needs pairs: choose another loss."
        raise ConfigError(
            f"experience {first[0].eid}, which is to be trained on, {misfit}", key="algorithm.policy_loss"
        )
    check(first)


# -- expert data, which join the rollouts of every explore step --------------------------------------------------------


class ExpertData:
    """Expert experiences for every explore step, from a reader that does not end.

    Experiences count as read after `commit`, when the explore step has taken them. A step that is cut short reads the
    same ones again: the state is always that after the last whole step.

    Args:
        reader: gives the experiences; for data that end a `RepeatingReader`.
        per_step: expert experiences an explore step.

    Raises:
        ConfigError: a number below 1.
    """

    def __init__(self, reader: BufferReader, per_step: int) -> None:
        whole_number("per_step", per_step, least=1)
        self._reader, self._per_step = reader, per_step
        self._taken = reader.state_dict()
        self._ahead = False  # True if the reader has passed experiences that no step has taken

    def read(self, step: int) -> list[Experience]:
        """The expert experiences of explore step `step`, marked as such, with an advantage of 0 and ids of the step.

        Raises:
            StorageError: the reader has nothing more to give.
        """
        if self._ahead:
            self._reader.load_state_dict(self._taken)
        self._ahead = True
        experiences: list[Experience] = []
        while (missing := self._per_step - len(experiences)) > 0:
            more = self._reader.read(missing)
            if not more:
                raise StorageError("the expert data have ended, or there are none: give more, or let them repeat.")
            experiences += more
        return [_joining(experience, step, number) for number, experience in enumerate(experiences)]

    def commit(self) -> None:
        """Note that the explore step has taken the experiences that were read last."""
        self._taken, self._ahead = self._reader.state_dict(), False

    def state_dict(self) -> dict[str, Any]:
        """The reader's state after the last step that has taken its share."""
        return self._taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ConfigError: the state belongs to another storage; or as the reader.
        """
        if ("reader" in state) != ("reader" in self._taken):
            raise ConfigError(
                "buffer.expert.storage: the checkpoint's expert data are of another storage",
                key="buffer.expert.storage",
                fix="give the one it was saved with, or begin a new run",
            )
        self._reader.load_state_dict(state)
        self._taken, self._ahead = state, False


def _joining(experience: Experience, step: int, number: int) -> Experience:
    """A copy that can stand among rollouts.

    It has no log-probabilities: they would be another policy's, and raise the alarm that watches this run's engine.
    """
    joining = marked(experience, expert=True)
    joining.eid = EID(batch=step, task=f"expert-{number}", suffix=experience.eid.suffix)
    joining.logprobs = None
    joining.advantages = torch.zeros(experience.response_length)
    joining.returns = None
    return joining


def expert_data(config: TrainConfig) -> ExpertData:
    """The expert data that join the rollouts of every explore step.

    Raises:
        ConfigError: a dataset, field or file is missing; or as the task source.
        StorageError: the stored experiences cannot be opened.
    """
    expert = config.buffer.expert
    if expert.storage == "dataset":
        taskset = Taskset.from_config(expert.dataset, answered=True, key="buffer.expert.dataset")
        reader: BufferReader = AnswerReader(
            taskset,
            load_tokenizer(config.model.name),
            config.workflow.args,
            load_generation_config(config.model.name),
            config.model.chat_template_kwargs,
        )
    else:
        with configured_at("buffer.expert.storage", section="buffer.expert"):
            reader = create_reader(BufferConfig(storage=expert.storage, path=expert.path, url=expert.url))
    return ExpertData(reader, expert.per_step)


class AnswerReader(BufferReader):
    """Reads the answers of a taskset as the responses of an expert, in the taskset's order, again and again.

    The prompt is rendered as in single-turn workflows. The response is the last message of a conversation that ends
    with the assistant, or else the entry's answer, as the chat template shows it. It ends with the end token, so that
    the policy learns where to stop.

    Args:
        taskset: the entries and their order.
        tokenizer: the policy's.
        workflow_args: of the run's workflow, for its system prompt.
        generation_config: the policy's, for its end tokens.
        template_variables: of the chat template; an entry's own override them.

    Raises:
        ConfigError: entries have no answer; the message names the first five.
    """

    def __init__(
        self,
        taskset: Taskset,
        tokenizer: Any,
        workflow_args: Mapping[str, Any] | None = None,
        generation_config: Any = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._taskset, self._tokenizer, self._generation_config = taskset, tokenizer, generation_config
        self._reported: set[str] = set()
        self._workflow_args = dict(workflow_args or {})
        self._template_variables = dict(template_variables or {})
        self._variables: set[str] = set()
        taskset.check_entries(self._check)  # a bad entry is refused now, not in the middle of a run
        warn_of_unread(self._variables, tokenizer.chat_template)

    def _check(self, raw: dict[str, Any]) -> None:
        check_media(raw)
        conversation, answer = self._conversation(raw)
        check_roles(" of the conversation", conversation, self._tokenizer.chat_template)
        self._variables.update(conversation.template_variables)
        if not conversation or not answer["content"].strip():
            raise ConfigError(
                "no answer",
                key="buffer.expert.dataset.answer_field",
                fix=(
                    "set buffer.expert.dataset.answer_field to the field with the response, end `messages` with "
                    "it, or leave such entries out"
                ),
            )

    def _try_read(self, count: int, whole_groups: bool, last: bool) -> list[Experience] | None:
        return [self._experience(raw) for raw in self._taskset.next_batch(count)]

    def _conversation(self, raw: dict[str, Any]) -> tuple[Conversation, dict[str, Any]]:
        """The prompt, and the assistant's message with empty content if there is none."""
        arguments, variables = self._workflow_args, self._template_variables
        conversation = conversation_of(Task("simple", raw, workflow_args=arguments, chat_template_kwargs=variables))
        if conversation[-1]["role"] == "assistant":
            return conversation.without_last(), {"content": "", **conversation[-1]}
        answer = raw.get("answer")
        return conversation, {"role": "assistant", "content": "" if answer is None else str(answer)}

    def _experience(self, raw: dict[str, Any]) -> Experience:
        conversation, answer = self._conversation(raw)
        rendering = conversation.tools, conversation.template_variables, self._generation_config
        prompt, tokens = Imitation(self._tokenizer, *rendering, self._report).completion(conversation, [answer])
        return Experience(
            eid=EID(suffix=f"{self._taskset.name}-{raw['task_index']['index']}"),
            tokens=tokens,
            prompt_length=common_length(prompt, tokens),
            info={"task_index": raw["task_index"]},
            prompt_text=prompt_text_of(conversation),
            response_text=answer["content"],
        )

    def _report(self, habit: str) -> None:
        """Warn of a habit of the chat template, once."""
        if habit not in self._reported:
            self._reported.add(habit)
            logger.warning("expert data '%s': %s (said once).", self._taskset.name, habit)

    def state_dict(self) -> dict[str, Any]:
        """The taskset's cursor."""
        return self._taskset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. ConfigError: the state belongs to other data."""
        cursor = {name: value for name, value in state.items() if name != "source"}  # which earlier versions had
        closing = turn_end(self._tokenizer, self._generation_config).closing
        if cursor != state and closing != (self._tokenizer.eos_token_id,):
            logger.warning(
                "expert data '%s': the checkpoint is of an earlier version, whose responses ended with %s; they end "
                "with %s now, as the chat template's turns do.",
                *(self._taskset.name, self._tokenizer.eos_token, self._tokenizer.decode(closing)),
            )
        try:
            self._taskset.load_state_dict(cursor)
        except ConfigError as error:
            raise ConfigError(f"buffer.expert.dataset: {error}", key="buffer.expert.dataset") from error


def marked(experience: Experience, expert: bool) -> Experience:
    """A copy with the mark of an expert's experience, or without it."""
    copied = copy.copy(experience)
    copied.info = {**experience.info, IS_EXPERT.source_field: expert}
    others = [f for f in experience.custom_fields if f.destination_field != IS_EXPERT.destination_field]
    copied.custom_fields = [*others, IS_EXPERT]
    return copied
