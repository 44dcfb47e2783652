"""Examples of a dataset as experiences, without rollouts: preference pairs, and texts and conversations to imitate.

The formats are TRL's, with the same prompts and the same trained tokens.
"""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trinity_lightning.buffer.example_pictures import ExamplePictures, index_of
from trinity_lightning.buffer.reader import Cursor, CursorReader, Item
from trinity_lightning.common.experience import EID, Experience, ExperienceError
from trinity_lightning.common.messages import (
    FILM_AND_SOUND,
    PICTURE_COLUMNS,
    check_asks,
    check_media,
    check_roles,
    picture_columns,
    read_messages,
    read_pictures_of,
    read_template_variables,
    read_tools,
    warn_of_unread,
)
from trinity_lightning.common.pictures.families import check_family
from trinity_lightning.common.pictures.parts import count_places, has_places, is_place, pictures_in, placed
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.pictures.processor import PictureProcessor, load_processor
from trinity_lightning.common.pictures.prompt import PLACES, WrittenPictures
from trinity_lightning.common.rows import check_rows
from trinity_lightning.config.models import load_config, load_generation_config, load_tokenizer, reads_pictures
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.imitation import Imitation
from trinity_lightning.explorer.models.turns import common_length
from trinity_lightning.explorer.tasks.dataset import dataset_entries, folder_of, undecoded
from trinity_lightning.explorer.tasks.order import Order
from trinity_lightning.explorer.tasks.sources import place_of

logger = logging.getLogger(__name__)

Entry = Mapping[str, Any]
RENDERING = 2  # version of the rendering of conversations as tokens, for checkpoints of earlier versions
IN_PROMPT = "show pictures in the prompt, in messages of the user"
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
        processor: the processor of a policy that reads pictures; None: it reads text alone.
        images_field: the column with pictures, see `read_pictures_of`.
        folder: the folder in which relative paths of pictures begin.

    Attributes:
        template_variables: the variables of the chat template that count.
        pictures: the pictures of the experience, in the order of their places; the experience itself has the places.

    Raises:
        ConfigError: a picture, the conversations, tools or `chat_template_kwargs` of the entry cannot be read; or it
            has pictures, and the policy reads text alone.
    """

    def __init__(
        self,
        tokenizer: Any,
        entry: Entry,
        *,
        template_variables: Mapping[str, Any] | None = None,
        generation_config: Any = None,
        report: Callable[[str], object] = logger.warning,
        processor: PictureProcessor | None = None,
        images_field: str = PICTURE_COLUMNS[0],
        folder: Path = Path(),
    ) -> None:
        sees = processor is not None
        check_media(entry, FILM_AND_SOUND if sees else (*PICTURE_COLUMNS, images_field, *FILM_AND_SOUND))
        if images_field not in (*PICTURE_COLUMNS, *entry):
            raise ConfigError(unknown_name("column", images_field, entry), key=".images_field")
        self._processor, self._folder = processor, folder
        self._fields = {name: value for name, value in entry.items() if value is not None}
        self._absent = sorted(entry.keys() - self._fields.keys())
        for name in (name for name in _LISTS if name in self._fields):
            messages = self._fields[name] = read_messages(name, self._fields[name], pictures=sees)
            if isinstance(messages, list):
                check_roles(f" of {name}", messages, tokenizer.chat_template)
        tools = read_tools(self._fields) or None
        self.template_variables = {**(template_variables or {}), **read_template_variables(self._fields)}
        self._report = report
        self._imitate = partial(Imitation, tokenizer, tools, self.template_variables, generation_config, report)
        self._imitation = self._imitate()
        self._waiting = read_pictures_of(self._fields, images_field, folder) if sees else []
        self.pictures: list[Picture] = []

    def pair(self) -> Experience:
        """The preference pair of prompt, chosen and rejected. Pictures are part of the prompt.

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
            chosen, rejected = self._shown_alike(chosen, rejected)
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
        else:
            prompt = self._shown(prompt)
        self._check_learned("chosen", chosen)
        (begin, good), (begin_of_bad, bad) = (self._rendered(prompt, answer) for answer in (chosen, rejected))
        begin = min(begin, begin_of_bad)
        if good == bad:
            raise ConfigError("chosen and rejected are the same", fix="leave the entry out")
        if begin == min(len(good), len(bad)):
            raise ConfigError(f"{'chosen' if begin == len(good) else 'rejected'} is empty", fix="leave the entry out")
        inputs = self._places(good)
        if inputs and inputs[PLACES][-1] >= begin:
            raise ConfigError("a picture lies behind the prompt that chosen and rejected share", fix=IN_PROMPT)
        return Experience(tokens=good[:begin], chosen=good[begin:], rejected=bad[begin:], multi_modal_inputs=inputs)

    def response(self) -> Experience:
        """The response to imitate: a prompt's completion, the assistant's turns of a conversation, or a whole text.

        Raises:
            ConfigError: there is none of these, or nothing to learn in it; or the rendered conversation does not show
                which tokens are the assistant's.
        """
        fields = self._fields
        if {"prompt", "completion"} <= fields.keys():
            self._check_learned("completion", fields["completion"])
            begin, tokens = self._rendered(self._shown(fields["prompt"]), fields["completion"])
            return Experience(tokens=tokens, prompt_length=begin, multi_modal_inputs=self._places(tokens))
        if column := next((name for name in ("messages", "conversations") if name in fields), None):
            messages = self._shown(self._column(column, list))
            self._check_learned(column, messages)
            tokens, mask = self._imitation.marked(messages) or self._imitation.conversation(messages)
            if True not in mask:
                roles = ", ".join(sorted({str(message["role"]) for message in messages})) or "none"
                raise ConfigError(f"the conversation has no turn of the assistant to learn from; roles: {roles}.")
            begin = max(mask.index(True), 1)
            inputs = self._places(tokens)
            return Experience(tokens=tokens, prompt_length=begin, action_mask=mask[begin:], multi_modal_inputs=inputs)
        if "text" in fields:
            self._check_learned("text", text := self._column("text", str))
            if self._waiting:
                raise ConfigError(
                    "there are pictures beside a text that is learned as a whole",
                    fix="give prompt and completion, or messages",
                )
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

    def _shown(self, conversation: Any) -> Any:
        """A conversation, or a text, with the entry's pictures in it: placeholders in texts, parts in messages."""
        is_text, processor = isinstance(conversation, str), self._processor
        messages = [{"role": "user", "content": conversation}] if is_text else conversation
        if processor is None or not isinstance(messages, list) or not (self._waiting or count_places(messages)):
            return conversation
        messages = placed(messages, self._waiting, self._folder)
        self.pictures = pictures_in(messages)
        for picture in self.pictures:
            picture.check()
        if any(has_places(message) for message in messages if message.get("role") == "assistant"):
            raise ConfigError("a turn of the assistant has a picture, and models write none", fix=IN_PROMPT)
        written = WrittenPictures(processor.token, [processor.written(picture.size) for picture in self.pictures])
        self._imitation = self._imitate(written)
        if not is_text:
            return messages
        parts = messages[0]["content"]
        return "".join(processor.token if is_place(part) else part["text"] for part in parts)

    def _shown_alike(self, chosen: Any, rejected: Any) -> tuple[Any, Any]:
        """Two whole conversations with the same pictures."""
        chosen, pictures = self._shown(chosen), self.pictures
        rejected = self._shown(rejected)
        if pictures != self.pictures:
            raise ConfigError("chosen and rejected have different pictures", fix="give them the same prompt")
        return chosen, rejected

    def _places(self, tokens: list[int]) -> dict[str, torch.Tensor] | None:
        """The places of the pictures in the tokens, as multi-modal inputs; None without pictures."""
        if self._processor is None or not self.pictures:
            return None
        token, token_id = self._processor.token, self._processor.token_id
        places = (torch.tensor(tokens) == token_id).nonzero()[:, 0]
        wanted = sum(self._processor.written(picture.size).count(token) for picture in self.pictures)
        if len(places) != wanted:
            raise ConfigError(
                f"the chat template shows {len(places)} tokens of pictures, and there are {wanted}", key="model.name"
            )
        return {PLACES: places}

    def _rendered(self, prompt: Any, response: Any) -> tuple[int, list[int]]:
        """The index of the response's first token, and the tokens of prompt and response up to their end token.

        The response begins at the first token that differs from those of the prompt alone.
        """
        if isinstance(prompt, str) and isinstance(response, str):
            prompt_tokens, tokens = self._imitation.prompt(prompt), self._imitation.text(prompt + response)
            if common_length(prompt_tokens, tokens) < len(prompt_tokens):
                self._report(JOINED_WORDS)
        elif isinstance(prompt, list) and isinstance(response, list):
            if count_places(response):
                raise ConfigError("there is a picture in what is to be learned", fix=IN_PROMPT)
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


class Examples(list[Experience]):
    """Examples of a dataset.

    Attributes:
        pictures: reads the pictures of examples that have some; None: no example has any.
    """

    def __init__(self, examples: Iterable[Experience], pictures: ExamplePictures | None = None) -> None:
        super().__init__(examples)
        self.pictures = pictures

    def content(self, example: Experience) -> bytes:
        """The tokens and the mask of an example, as bytes, by which equal examples are recognised.

        With pictures also what is known of them before they are read.
        """
        parts = (example.tokens, example.action_mask, example.chosen, example.rejected)
        content = [b"%d" % example.prompt_length, *(b"" if p is None else p.numpy().tobytes() for p in parts)]
        if self.pictures is not None and (outline := self.pictures.outline(index_of(example))):
            content.append(outline.encode())
        return b"|".join(content)

    def checksum(self, example: Experience) -> int:
        """Checksum of the content of an example's pictures; 0 without any."""
        return 0 if self.pictures is None else self.pictures.checksum(example)

    def complete(self, example: Experience) -> Experience:
        """The example with the tensors of its pictures. StorageError: they have changed since the start."""
        return example if self.pictures is None else self.pictures.complete(example)


def read_examples(
    entries: Sequence[Entry], example: Callable[[int], Experience], where: str, most: int, overlong: str
) -> list[Experience]:
    """The examples of all entries, none longer than `most` tokens.

    Args:
        entries, where: the dataset, and its name in messages.
        example: makes an example of the entry with an index.
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
            experience = example(index)
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
    if example.multi_modal_inputs and example.multi_modal_inputs[PLACES][-1] >= most:
        return False  # pictures are never cut
    room = max(most - example.prompt_length, 0)
    mask = None if example.action_mask is None else example.action_mask[:room]
    example.tokens, example.action_mask = example.tokens[:most], mask
    return mask is not None and bool(mask.any())


class ExampleReader(CursorReader):
    """Reads examples, in another order in each pass.

    Args:
        examples: at least one; those with pictures get the tensors of these when they are read.
        where: the dataset in words, for messages.
        seed: of the order; None: the given order.
        repeat: begin again at the end.
    """

    def __init__(
        self, examples: Sequence[Experience], where: str, seed: int | None = None, repeat: bool = True
    ) -> None:
        digest = hashlib.sha256(str(seed).encode())
        self._examples = examples if isinstance(examples, Examples) else Examples(examples)
        for example in examples:
            digest.update(self._examples.content(example))
        super().__init__(f"{RENDERING}-{digest.hexdigest()[:16]}", where)
        self._repeat, self._order = repeat, Order(len(examples), seed)
        self._seen: dict[int, int] = {}  # checksums of the pictures of examples that were read, by the entries' indices

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

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and checksums of the pictures that were read."""
        seen = {"pictures": [list(self._seen), list(self._seen.values())]} if self._examples.pictures else {}
        return super().state_dict() | seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, with a warning if an earlier version made other tokens of the entries.

        Raises:
            ForeignPositionError: the state is of other examples.
            ConfigError: pictures that were read have changed.
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
        if self._examples.pictures is not None:
            seen = dict(zip(*state["pictures"], strict=True))
            self._examples.pictures.check_seen({i: known for i, known in seen.items() if self._seen.get(i) != known})
            self._seen = seen

    def _try_read(self, count: int, whole_groups: bool, last: bool) -> list[Experience] | None:
        examples = super()._try_read(count, whole_groups, last)
        if examples is None or self._examples.pictures is None:
            return examples
        completed = []
        for example in examples:
            if example.multi_modal_inputs:
                self._seen[index_of(example)] = self._examples.checksum(example)
            completed.append(self._examples.complete(example))  # at once, while its pictures are at hand
        return completed

    def _fetch(self, cursor: Cursor, count: int) -> list[Item]:
        (start,) = cursor
        end = start + count if self._repeat else min(start + count, len(self._examples))
        places = enumerate(self._order.indices(start, end), start=start + 1)
        return [Item(self._examples[index], (place,)) for place, index in places]


def examples_of(config: TrainConfig, path: str, split: str, pairs: bool) -> Examples:
    """The examples of a dataset for a run's model, preference `pairs` or responses; errors as `read_examples`."""
    buffer, model = config.buffer, config.model
    settings, tokenizer = buffer.dataset, load_tokenizer(model.name)
    kind = Example.pair if pairs else Example.response
    columns = picture_columns(settings.images_field)
    entries: Any = undecoded(dataset_entries(path, split, settings.subset, as_text=True), columns)
    where = f"dataset '{path}'"
    if not pairs:
        _warn_of_unused(entries, where)
    sees = reads_pictures(model.name) is not False
    processor = load_processor(model.name, model.processor_args) if sees else None
    habits: Counter[str] = Counter()
    variables = set(model.chat_template_kwargs)
    fixed: dict[str, Any] = {
        "template_variables": model.chat_template_kwargs,
        "generation_config": load_generation_config(model.name),
        "processor": processor,
        "images_field": settings.images_field,
    }
    folder_of_all = folder_of(path)

    def read(index: int, report: Callable[[str], object]) -> Example:
        folder = entries.folder(index) if hasattr(entries, "folder") else folder_of_all
        return Example(tokenizer, entries[index], **fixed, folder=folder, report=report)

    def pictures_of(index: int) -> list[Picture]:
        kind(example := read(index, lambda habit: None))  # whose places decide their order
        return example.pictures

    pictures = ExamplePictures(pictures_of, processor, partial(place_of, entries)) if processor else None

    def made(index: int) -> Experience:
        reported: set[str] = set()
        example = read(index, reported.add)
        experience = kind(example)
        if pictures is not None and example.pictures:
            pictures.note(index, example.pictures)
        habits.update(reported)
        variables.update(example.template_variables)
        return experience

    most = settings.max_length or tokenizer.model_max_length
    examples = read_examples(entries, made, where, most, settings.overlong)
    warn_of_unread(variables, tokenizer.chat_template)
    for habit, count in habits.items():
        logger.warning("%s, %d of %d examples: %s.", where, count, len(entries), habit)
    return _with_pictures(examples, pictures, model.name, where)


def _with_pictures(
    examples: Sequence[Experience], pictures: ExamplePictures | None, model: str, where: str
) -> Examples:
    """The examples, with their pictures if they have any and the model reads them."""
    if pictures is None:
        return Examples(examples, None)
    if not pictures.noted:
        logger.warning("%s has no pictures, which the model reads: is buffer.dataset.images_field right?", where)
        return Examples(examples, None)
    check_family(load_config(model))
    return Examples(examples, pictures)


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
