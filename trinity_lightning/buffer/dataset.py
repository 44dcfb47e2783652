"""Examples of a dataset as experiences, without rollouts: preference pairs, and texts and conversations to imitate.

The formats are TRL's, with the same prompts and the same trained tokens. Some examples may be held out: a run measures
the loss on them.
"""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch

from trinity_lightning.buffer.reader import Cursor, CursorReader, Item
from trinity_lightning.common.experience import EID, Experience, ExperienceError
from trinity_lightning.common.messages import (
    check_asks,
    check_media,
    check_roles,
    read_messages,
    read_template_variables,
    read_tools,
    warn_of_unread,
)
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.common.rows import check_rows
from trinity_lightning.config.models import load_generation_config, load_tokenizer
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.errors import ConfigError, configured_at
from trinity_lightning.explorer.models.imitation import Imitation
from trinity_lightning.explorer.models.turns import common_length, encode_text
from trinity_lightning.explorer.tasks.dataset import dataset_entries, names_of
from trinity_lightning.explorer.tasks.order import Order
from trinity_lightning.explorer.tasks.sources import place_of
from trinity_lightning.monitor.csv_logger import last_row, log_row, step_of

logger = logging.getLogger(__name__)

Entry = Mapping[str, Any]
RENDERING = 2  # version of the rendering of conversations as tokens, for checkpoints of earlier versions
JOINED_WORDS = (
    "the prompt's last token goes on in the response, so that rollouts have another prompt: begin responses with the "
    "space, instead of ending prompts with it"
)

# -- one entry ---------------------------------------------------------------------------------------------------------

_LISTS = ("prompt", "completion", "chosen", "rejected", "messages", "conversations")  # some of them may be text
_FORMS = (
    ("prompt", "completion"),
    ("messages",),
    ("conversations",),
    ("text",),
)  # columns of a response; the first form counts


class Example:
    """An entry, rendered by a tokenizer.

    Args:
        tokenizer: the policy's.
        entry: its columns; one that is None counts as absent, as in a dataset with entries of several kinds.
        template_variables: of the chat template; the entry's own (`chat_template_kwargs`) override them.
        generation_config: the policy's, for its end tokens.
        report: called with a sentence if the trained tokens differ from the text, or from those of rollouts.

    Raises:
        ConfigError: the entry has pictures, or its conversations, tools or `chat_template_kwargs` cannot be read.
    """

    def __init__(
        self,
        tokenizer: Any,
        entry: Entry,
        *,
        template_variables: Mapping[str, Any] | None = None,
        generation_config: Any = None,
        report: Callable[[str], object] = logger.warning,
    ) -> None:
        check_media(entry)
        self._tokenizer = tokenizer
        self._fields = {name: value for name, value in entry.items() if value is not None}
        self._absent = sorted(entry.keys() - self._fields.keys())
        for name in (name for name in _LISTS if name in self._fields):
            messages = self._fields[name] = read_messages(name, self._fields[name])
            if isinstance(messages, list):
                check_roles(f" of {name}", messages, tokenizer.chat_template)
        tools = read_tools(self._fields) or None
        variables = {**(template_variables or {}), **read_template_variables(self._fields)}
        self._report = report
        self._imitation = Imitation(tokenizer, tools, variables, generation_config, report)

    def pair(self) -> Experience:
        """The preference pair of prompt, chosen and rejected.

        If there is no prompt, the common beginning of chosen and rejected is the prompt. It is also the prompt if the
        column `prompt` is text and the others are conversations, which repeat it. If one is a prefix of the other, its
        last turn (or character) counts as its answer, as in TRL.

        Raises:
            ConfigError: there is no prompt, chosen and rejected are the same, or one of them is empty.
        """
        if not {"chosen", "rejected"} <= self._fields.keys():
            raise ConfigError(
                f"algorithm.policy_loss=dpo learns from prompt, chosen and rejected, or from whole conversations "
                f"in the latter two; it has {self._columns()}.",
                key="algorithm.policy_loss",
            )
        chosen, rejected = (self._column(name, str, list) for name in ("chosen", "rejected"))
        prompt = self._fields.get("prompt")
        if prompt is None or (isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list)):
            shorter, length = min(chosen, rejected, key=len), common_length(chosen, rejected)
            if shorter and length == len(shorter):  # the other one begins with it
                length -= isinstance(shorter, str) or shorter[-1].get("role") == "assistant"
            elif isinstance(chosen, str) and chosen[length - 1 : length] == " ":
                length -= 1  # the space before a word is part of it
            if length == 0:
                raise ConfigError(
                    "there is no prompt, and nothing before their answers that both chosen and rejected begin with",
                    fix="give the prompt, or leave the entry out",
                )
            prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
        self._check_learned("chosen", chosen)
        (begin, good), (begin_of_bad, bad) = (self._rendered(prompt, answer) for answer in (chosen, rejected))
        begin = min(begin, begin_of_bad)
        if good == bad:
            raise ConfigError("chosen and rejected are the same", fix="leave the entry out")
        if begin == min(len(good), len(bad)):
            raise ConfigError(f"{'chosen' if begin == len(good) else 'rejected'} is empty", fix="leave the entry out")
        return Experience(tokens=good[:begin], chosen=good[begin:], rejected=bad[begin:])

    def response(self) -> Experience:
        """The response to imitate: a prompt's completion, the assistant's turns of a conversation, or a whole text.

        Raises:
            ConfigError: there is none of these, or nothing to learn in it; or the rendered conversation does not show
                which tokens are the assistant's.
        """
        fields = self._fields
        if {"prompt", "completion"} <= fields.keys():
            self._check_learned("completion", fields["completion"])
            begin, tokens = self._rendered(fields["prompt"], fields["completion"])
            return Experience(tokens=tokens, prompt_length=begin)
        if column := next((name for name in ("messages", "conversations") if name in fields), None):
            self._check_learned(column, messages := self._column(column, list))
            tokens, mask = self._imitation.marked(messages) or self._imitation.conversation(messages)
            if True not in mask:
                roles = ", ".join(sorted({str(message["role"]) for message in messages})) or "none"
                raise ConfigError(f"the conversation has no turn of the assistant to learn from; roles: {roles}.")
            begin = max(mask.index(True), 1)
            return Experience(tokens=tokens, prompt_length=begin, action_mask=mask[begin:])
        if "text" in fields:
            self._check_learned("text", text := self._column("text", str))
            return Experience(tokens=self._imitation.text(text), prompt_length=1)
        raise ConfigError(
            "algorithm.policy_loss=sft learns from prompt and completion, from messages, or from text; it has "
            f"{self._columns()}.",
            key="algorithm.policy_loss",
        )

    def _check_learned(self, name: str, value: Any) -> None:
        """Refuse a column that is empty, or has an empty turn of the assistant; an empty `rejected` may be meant."""
        if isinstance(value, str | list) and not value:
            raise ConfigError(f"{name} is empty: there is nothing to learn", fix="leave the entry out")
        messages: list[dict[str, Any]] = value if isinstance(value, list) else []
        for turn, message in enumerate(messages):
            contents = [content for key, content in message.items() if key not in ("role", "name")]
            if message.get("role") == "assistant" and not any(contents):
                raise ConfigError(
                    f"turn {turn} of {name} is empty: there is nothing to learn", fix="leave the entry out"
                )

    def _column(self, name: str, *kinds: type) -> Any:
        value = self._fields[name]
        if not isinstance(value, kinds):
            names = " or ".join({str: "text", list: "a list of messages"}[kind] for kind in kinds)
            raise ConfigError(f"column '{name}' is {value!r}", fix=f"give {names}")
        return value

    def _columns(self) -> str:
        absent = [f"no {name} (missing or null)" for name in self._absent]
        return ", ".join([*sorted(self._fields), *absent]) or "nothing"

    def _rendered(self, prompt: Any, response: Any) -> tuple[int, list[int]]:
        """The index of the response's first token, and the tokens of prompt and response up to their end token.

        The response begins at the first token that differs from those of the prompt alone.
        """
        if isinstance(prompt, str) and isinstance(response, str):
            prompt_tokens, tokens = encode_text(self._tokenizer, prompt), self._imitation.text(prompt + response)
            if common_length(prompt_tokens, tokens) < len(prompt_tokens):
                self._report(JOINED_WORDS)
        elif isinstance(prompt, list) and isinstance(response, list):
            if response and response[0].get("role") == "assistant":
                check_asks("prompt", prompt)
            prompt_tokens, tokens = self._imitation.completion(prompt, response)
        else:
            raise ConfigError(
                "a prompt and what follows it are both text, or both lists of messages, not "
                f"{prompt!r:.40} and {response!r:.40}."
            )
        begin = common_length(prompt_tokens, tokens)
        if begin == 0:
            raise ConfigError("there is no prompt: nothing that the response could follow.")
        return begin, tokens


# -- all entries -------------------------------------------------------------------------------------------------------


def read_examples(
    entries: Sequence[Entry], example: Callable[[Entry], Experience], where: str, most: int, overlong: str
) -> list[Experience]:
    """The examples of all entries, none longer than `most` tokens.

    Args:
        entries, where: the dataset, and its name in messages.
        example: makes an example of an entry.
        most: longest example, in tokens.
        overlong: `refuse`, `drop` or `truncate` a longer one; their number is logged.

    Raises:
        ConfigError: entries are no examples, or too long (the message names the first five, and counts them); or no
            example is left.
    """
    examples: list[Experience] = []
    longer = 0

    def read(index: int) -> None:
        nonlocal longer
        try:
            experience = example(entries[index])
        except ExperienceError as error:
            raise ConfigError(str(error)) from error
        experience.eid = EID(suffix=f"{index}")
        if (length := _length(experience)) > most:
            if overlong == "refuse":
                raise ConfigError(
                    f"{length} tokens, more than {most} (buffer.dataset.max_length)",
                    key="buffer.dataset.max_length",
                    fix="give more, or set buffer.dataset.overlong=drop or truncate",
                )
            longer += 1
            if overlong == "drop" or not _cut(experience, most):
                return
        examples.append(experience)

    check_rows(where, len(entries), read, partial(place_of, entries))
    if longer:
        cut = longer - (len(entries) - len(examples))
        logger.warning("%s: %d of %d examples have more than %d tokens; %d of them are cut off, the others left out.",
                       where, longer, len(entries), most, cut)  # fmt: skip
    if not examples:
        raise ConfigError(f"{where} has no examples of at most {most} tokens.", key="buffer.dataset.max_length")
    return examples


def _length(example: Experience) -> int:
    responses = [response for response in (example.chosen, example.rejected) if response is not None]
    return len(example.tokens) + max(map(len, responses), default=0)


def _cut(example: Experience, most: int) -> bool:
    """Cut an example to `most` tokens; False if nothing is left to train on, or a pair's answers are the same then."""
    if example.chosen is not None and example.rejected is not None:
        room = max(most - len(example.tokens), 0)
        example.chosen, example.rejected = example.chosen[:room], example.rejected[:room]
        return not torch.equal(example.chosen, example.rejected)
    room = max(most - example.prompt_length, 0)
    mask = None if example.action_mask is None else example.action_mask[:room]
    example.tokens, example.action_mask = example.tokens[:most], mask
    return mask is not None and bool(mask.any())


class ExampleReader(CursorReader):
    """Reads examples, in another order in each pass.

    Args:
        examples: at least one.
        where: the dataset in words, for messages.
        seed: of the order; None: the given order.
        repeat: begin again at the end.
    """

    def __init__(
        self, examples: Sequence[Experience], where: str, seed: int | None = None, repeat: bool = True
    ) -> None:
        digest = hashlib.sha256(str(seed).encode())
        for example in examples:
            digest.update(_content_of(example))
        super().__init__(f"{RENDERING}-{digest.hexdigest()[:16]}", where)
        self._examples, self._repeat = examples, repeat
        self._order = Order(len(examples), seed)

    @classmethod
    def of_run(cls, config: TrainConfig, examples: Sequence[Experience]) -> "ExampleReader":
        """A reader of these examples for a run. ConfigError: each is read once, and they end before the run."""
        buffer = config.buffer
        enough_for = math.ceil(len(examples) / buffer.batch_size)
        if not buffer.repeat and config.steps > enough_for:
            raise ConfigError(
                f"steps is {config.steps}, and {len(examples)} examples, each read once (buffer.repeat=false), are "
                f"enough for {enough_for} of {buffer.batch_size} (buffer.batch_size)",
                key="steps",
                fix=f"set buffer.repeat=true, or steps={enough_for}",
            )
        if buffer.repeat and len(examples) < buffer.batch_size:
            logger.warning("buffer.batch_size=%d repeats some of %d examples.", buffer.batch_size, len(examples))
        return cls(examples, f"dataset '{buffer.path}'", config.seed if buffer.dataset.shuffle else None, buffer.repeat)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, with a warning if an earlier version made other tokens of the entries.

        Raises:
            ForeignPositionError: the state is of other examples.
        """
        source = str(state["source"])
        if "-" not in source:  # of an earlier version, which did not number its rendering
            if source != self._source.split("-")[1]:
                logger.warning(
                    "%s: the checkpoint is of an earlier version, whose examples had other tokens (turns end with an "
                    "end token now, without the newline behind it, and follow the prompt of rollouts), or of other "
                    "data, which cannot be told apart: the run goes on with those that there are now.",
                    self._where,
                )
            state = state | {"source": self._source}
        super().load_state_dict(state)

    def _fetch(self, cursor: Cursor, count: int) -> list[Item]:
        (start,) = cursor
        end = start + count if self._repeat else min(start + count, len(self._examples))
        places = enumerate(self._order.indices(start, end), start=start + 1)
        return [Item(self._examples[index], (place,)) for place, index in places]


def examples_of(config: TrainConfig, path: str, split: str, pairs: bool) -> list[Experience]:
    """The examples of a dataset for a run's model, preference `pairs` or responses; errors as `read_examples`."""
    buffer, tokenizer = config.buffer, load_tokenizer(config.model.name)
    kind = Example.pair if pairs else Example.response
    entries: Any = dataset_entries(path, split, buffer.dataset.subset, as_text=True)
    most = buffer.dataset.max_length or tokenizer.model_max_length
    where = f"dataset '{path}'"
    if not pairs:
        _warn_of_unused(entries, where)
    generation_config = load_generation_config(config.model.name)
    habits: Counter[str] = Counter()
    variables = set(config.model.chat_template_kwargs)

    def example(entry: Entry) -> Experience:
        reported: set[str] = set()
        settings = {"template_variables": config.model.chat_template_kwargs, "generation_config": generation_config}
        experience = kind(Example(tokenizer, entry, **settings, report=reported.add))
        habits.update(reported)
        variables.update(read_template_variables(entry))
        return experience

    examples = read_examples(entries, example, where, most, buffer.dataset.overlong)
    warn_of_unread(variables, tokenizer.chat_template)
    for habit, count in habits.items():
        logger.warning("%s, %d of %d examples: %s.", where, count, len(entries), habit)
    return examples


def _warn_of_unused(entries: Sequence[Entry], where: str) -> None:
    """Warn of columns without effect: their entries have other columns too, which are learned from."""
    if len(entries) == 0 or len(_forms(dict.fromkeys(entries[0], ""))) < 2:  # every entry has all columns
        return
    used, *unused = next((forms for forms in map(_forms, entries) if len(forms) > 1), [()])
    if unused:
        logger.warning("%s: learned from is %s; %s beside it has no effect.",
                       where, " and ".join(used), ", ".join(map("/".join, unused)))  # fmt: skip


def _forms(entry: Entry) -> list[tuple[str, ...]]:
    return [form for form in _FORMS if all(entry.get(name) is not None for name in form)]


def _content_of(example: Experience) -> bytes:
    """The tokens of an example and its mask, as bytes, by which equal examples are recognised."""
    parts = (example.tokens, example.action_mask, example.chosen, example.rejected)
    return b"|".join([b"%d" % example.prompt_length, *(b"" if p is None else p.numpy().tobytes() for p in parts)])


# -- examples that are not trained on ----------------------------------------------------------------------------------

# Names of metrics of the loss, and their names for examples that are not trained on.
NAMES = {"actor/rewards/accuracies": "eval/accuracy", "actor/rewards/margins": "eval/margin"}


def held_out_of_run(
    config: TrainConfig, examples: list[Experience], pairs: bool
) -> tuple[list[Experience], list[Experience]]:
    """The examples to train on, and the held-out ones (`buffer.dataset.held_out`).

    A warning counts held-out examples that are trained on, too, as from overlapping slices.

    Raises:
        ConfigError: nothing would be left on one of the sides; or as `read_examples`.
    """
    settings = config.buffer.dataset.held_out
    if settings.share is None:
        # Without a split of its own, another dataset is measured whole, in the splits that are trained on.
        split = settings.split or "+".join(names_of(config.buffer.dataset.split))
        path = settings.path or str(config.buffer.path)
        section = "buffer.dataset.held_out"
        with configured_at(f"{section}.{'split' if settings.path is None else 'path'}", section=section):
            trained, held_out = examples, examples_of(config, path, split, pairs)
    else:
        count = round(settings.share * len(examples))
        if not 0 < count < len(examples):
            raise ConfigError(
                f"buffer.dataset.held_out.share is {settings.share}, which is {count} of {len(examples)} examples",
                key="buffer.dataset.held_out.share",
                fix="leave some on both sides",
            )
        chosen = set(np.random.default_rng([config.seed, count]).permutation(len(examples))[:count].tolist())
        trained = [example for index, example in enumerate(examples) if index not in chosen]
        held_out = [examples[index] for index in sorted(chosen)]
    contents = {hash(_content_of(example)) for example in trained}
    if overlapping := sum(hash(_content_of(example)) in contents for example in held_out):
        logger.warning("%d of %d held-out examples (buffer.dataset.held_out) are trained on, too: eval/loss is not of "
                       "unseen examples alone.", overlapping, len(held_out))  # fmt: skip
    return trained, held_out


class HeldOutLoss(L.Callback):
    """Logs `eval/loss`, and for preference pairs `eval/accuracy` and `eval/margin`, at an interval and at the end.

    If there are several ranks, each computes a share; rank 0 has read the examples, and logs.

    Args:
        examples: measured as one optimizer batch; empty on ranks other than 0.
        interval: steps from one measurement to the next.
        total_steps: steps of the run.
        show: called with the measured metrics, perhaps none, before the step's line is printed.
        max_response_length: see `OptimizerBatch`.
    """

    def __init__(
        self,
        examples: Sequence[Experience],
        interval: int,
        total_steps: int,
        show: Callable[[dict[str, float]], None],
        max_response_length: int | None,
    ) -> None:
        self._examples, self._max_response_length = list(examples), max_response_length
        self._interval, self._total_steps, self._show = interval, total_steps, show

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the examples to all ranks."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._batch = OptimizerBatch.of(data.everywhere(lambda: self._examples), 0, self._max_response_length)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure, if a measurement is due."""
        step = step_of(trainer)
        due = step % self._interval == 0 or step == self._total_steps
        measured = loss_of(pl_module, self._batch) if due else {}
        if not trainer.is_global_zero:
            return
        if due:
            log_row(trainer.loggers, measured, step, last_row(trainer))
        self._show(measured)


def loss_of(policy: Any, batch: OptimizerBatch) -> dict[str, float]:
    """The loss and the metrics of a batch, without dropout, by the names of `HeldOutLoss`.

    Args:
        policy: a PolicyModule within a fit.
        batch: gets the column of the reference model the first time.
    """
    policy.policy.eval()
    try:
        with torch.no_grad(), policy.trainer.precision_plugin.forward_context():
            losses, metrics = policy.accumulate(batch, policy.shares(batch, policy.passes().rows(batch)))
    finally:
        policy.policy.train()
    return {"eval/loss": math.fsum(losses.tolist())} | {NAMES[name]: metrics[name] for name in NAMES if name in metrics}
