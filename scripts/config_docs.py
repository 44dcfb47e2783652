"""Write what docstrings say into pages: `docs/config/`, and the table of losses in `docs/algorithms.md`.

`docs/config/` has a page for each group of the configuration, from the schema's docstrings and from conf/.

python scripts/config_docs.py
"""

import dataclasses
import inspect
import re
from enum import Enum
from pathlib import Path
from typing import Any

from trinity_lightning.algorithm.policy_loss import POLICY_LOSS_FN, PolicyLossFn
from trinity_lightning.algorithm.policy_loss.arguments import loss_arguments
from trinity_lightning.config import run
from trinity_lightning.config.algorithm import CriticConfig
from trinity_lightning.config.registry import config_dir
from trinity_lightning.explorer.rewards import REWARDS, equality

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "config"
ALGORITHMS = ROOT / "docs" / "algorithms.md"


def pages() -> dict[str, str]:
    """File name to text of every page."""
    groups = {path.name for path in config_dir("conf").iterdir() if path.is_dir()}
    typed = {field.name: field for field in dataclasses.fields(run.TrainConfig) if _schema_of(field)}
    names = sorted(groups | set(typed))
    written = {f"{name}.md": _page(name, typed.get(name)) for name in names}
    return written | {"reward.md": _rewards(), "README.md": _index(names)}


def _index(names: list[str]) -> str:
    lines = [
        "# Configuration",
        "",
        "`conf/train.yaml` puts these together; a recipe overrides it, the command line both.",
        "",
    ]
    lines += ["| group or section | what it is |", "|---|---|"]
    typed = {field.name: field for field in dataclasses.fields(run.TrainConfig)}
    for name in names:
        cls = _schema_of(typed[name]) if name in typed else None
        lines.append(f"| [{name}]({name}.md) | {_summary(cls) if cls else FREE.get(name, '')} |")
    lines.append("| [reward](reward.md) | What a response is worth: the registered names. |")
    return "\n".join([*lines, "", "## The run itself", "", *_knobs(run.TrainConfig, "", skip=set(names)), ""])


FREE = {
    "add_strategy": "How rewards become advantages, in order: {name: {args}}.",
    "callbacks": "Lightning callbacks, as `_target_` nodes.",
    "logger": "Lightning loggers, as `_target_` nodes.",
    "operators": "What tidies experiences before they are weighed, in order: {name: {args, on_error: stop or skip}}.",
    "trainer": "Arguments of `lightning.Trainer`.",
}


REWARD_PAGE = """# reward

What a response is worth: a plain function of the response and the task, sync or async, that returns a number or a dict
of parts that are added up. `reward=math` is one of the names below, `reward=my_module.my_function` one of your own, and
`reward='{accuracy: 1.0, format: 0.2}'` the weighted sum of several, each with a metric of its own. A penalty for length
is an operator, which knows tokens: [`operators=overlong_penalty`](operators.md).

`reward=null`, the default, leaves it to the workflow: `math`, `tool_use` and `evaluation` then judge as `reward=math`
does, `judge` asks its model, and in `multi_turn` the environment gives the rewards. `simple` has no reward of its own.

Evaluations are judged by the same reward. The held-out sums are evaluated only in runs that train on sums; give
held-out tasks of your own as `eval_tasksets`. If a reward does not fit an evaluation of the recipe that you build on,
leave that out (`eval_tasksets.NAME=null`).

    python -m trinity_lightning.train +recipe=grpo taskset=dataset taskset.path=games.jsonl reward=countdown \\
        '+eval_tasksets={games: {source: dataset, path: heldout.jsonl}}'

A function that raises, or returns something that is no finite number, fails its rollout, which is tried again. If that
happens to every answer of the tasks that end first, at least 16 of them (an engine may end many at once), the run gives
the others up, and ends with a sentence that names the function and the error.

## What is judged

Rewards, environments and tool parsers get what the policy wrote: its own markers (of thoughts, tool calls, channels)
are in the text, and the stop string that ended it; end tokens are not. `sampling.skip_special_tokens=true` leaves the
markers out, `sampling.include_stop_str_in_output=false` the stop string.

Thoughts are no answer. The rewards below judge what stands behind the last thought that was closed, and a response that
was cut off in its thoughts is worth 0, also where the chat template opened them (`format` looks at the thoughts, and
`contains_digits` at all of the text). So do tool calls, the environments of this package and the scores of judges. The
markers of the field's models are known (`common/thoughts.py` lists them), and so are pairs of tokens, or of tags in the
chat template, that are named after thoughts; give others by `model.thoughts='["[T]", "[/T]"]'`.

A function of your own gets all of the text. What counts in it as the answer is

    from trinity_lightning.common.thoughts import answer_part

    def polite(response, task):
        answer = answer_part(response)  # None: cut off in its thoughts
        return float(answer is not None and "please" in answer)

The response is a `str` that also knows whether its prompt had opened the thoughts: give `answer_part`, and the rewards
below if yours calls one, the response itself, as a part of it is plain text.

## The task's answer

Rewards that compare with the task's answer take a text or a number, or a list of these, of which any is right. The
parts of one answer, such as the point (1, 2), are one text. The answer may stand within a field, as in verl's data:
`taskset.answer_field=reward_model.ground_truth`. What such a reward cannot read (a mapping, NaN, an empty list, blank
text) is refused before a run begins, by its row. A reward of your own can look at the rows as well: give the function
an attribute `check_task`, a function that raises a `ConfigError` for a bad row.

## Slow rewards

A plain function runs in a thread of the run's process, an async one on its event loop. That is right for what is quick,
and for what waits (a request, a subprocess). One that computes in Python for more than some milliseconds a response
shares the interpreter with rollouts and training, which then wait for it at every operation, and one that hangs cannot
be ended: give those processes of their own,

    python -m trinity_lightning.train +recipe=grpo reward=my_module.my_function explorer.reward_workers=4

Each of them imports `my_module` and gets the response and the task (without its `workflow` and `reward_fn`); results,
metrics and errors are the same. A call that takes longer than `explorer.reward_timeout` (60 s, the import of its first
call included) fails its rollout, which is tried again as after any error, and its process is ended and replaced; so is
one that dies. Functions that no other process can import (a lambda, one within a function or a notebook) are refused,
and a script of your own needs `if __name__ == "__main__":` around what starts the run. Processes are for local runners:
Ray's are processes of their own already. They take CPU time all the same: on a machine without a GPU leave the trainer
a core (`benchmarks/reward_workers.py` measures both).

Async functions stay on the event loop with these settings too: they wait for answers, many at a time, and a process
would wait for one after the other. What computes belongs in a plain function.

`math` and `accuracy` compare by math-verify in processes of their own, with these settings or without.

## Rewards by name

| name | worth |
|---|---|
"""


def _rewards() -> str:
    lines = []
    for name in sorted(REWARDS):
        text = re.split(r"\n\s*(?:Raises|Args):", inspect.getdoc(REWARDS.resolve(name)) or "")[0]
        lines.append(f"| `{name}` | {' '.join(text.split())} |\n")
    rules = (inspect.getdoc(equality) or "").split("\n\n", 1)[1]
    return f"{REWARD_PAGE}{''.join(lines)}\n## Which answers are equal\n\n{rules}\n"


# Around the table in the page of algorithms, the rest of which is written by hand.
BEGIN, END = "<!-- written by scripts/config_docs.py -->\n", "<!-- until here -->\n"
LOSSES = """
The table shows the loss of one token. lp, old and ref are the log-probabilities of the policy, of
`algorithm.old_logprobs` and of the reference, A is the advantage, and r = exp(lp - old) is the ratio. The last column
is how the tokens' losses are averaged unless `algorithm.loss_agg_mode` says otherwise. Set an argument with
`algorithm.policy_loss.args.NAME=VALUE`, in the same command as `algorithm=NAME` or, for your own loss,
`algorithm.policy_loss.name=my_loss.tempered`.

| `algorithm.policy_loss` | loss | arguments | average |
|---|---|---|---|
"""


EXAMPLES = """## Examples of a dataset

`buffer=dataset` reads TRL's formats: a line, or a row, of plain text or of messages ({"role": ..., "content": ...}).

| `algorithm` | columns | what is trained on |
|---|---|---|
| `sft` | `prompt`, `completion` | the completion |
| `sft` | `messages` (or `conversations`) | every turn of the assistant, as by `assistant_only_loss` of TRL |
| `sft` | `text` | all of it but the first token |
| `dpo` | `prompt`, `chosen`, `rejected` | that the first response is better than the second |
| `dpo` | `chosen`, `rejected` | the same: the prompt is what both begin with, less an answer that is in both |

Of an entry with several of these, `prompt` and `completion` come first, then `messages`, then `text`, as in TRL; a
warning names what has no effect. Values of JSON and CSV files, also on the hub, are those of the file, and all cells of
CSV are text.

Conversations are read as those of tasks and of expert data are: roles are system, developer, user, assistant, tool and
function, and others that the chat template names; a content is text, or parts of type `text`; `from` and `value` stand
for role and content, with ShareGPT's human and gpt for user and assistant; a conversation may be JSON text, as in CSV
and parquet files. Pictures, sound and film (columns `image`, `images`, `video`, `videos`, `audio`, `audios`, and such
parts of a content) are refused until they are trained on.

Messages are rendered by the chat template, to which a column `tools` is shown, and `chat_template_kwargs`, such as
{"enable_thinking": false}, on top of `model.chat_template_kwargs`. What is learned follows the prompt that rollouts
have, and its last token ends the turn: a newline that the template writes behind it is not learned, unlike in TRL.
[What is learned with the chat templates of the field](../chat_templates.md) shows it, and what is refused or warned of.

Plain text stays as it is, with the end token behind what is learned. What is learned must not be empty; a
`rejected` that is empty text is the end token alone.

Examples that are not trained on are a second file, another split, or a share of the examples:

    python -m trinity_lightning.train +recipe=sft buffer.path=examples.jsonl buffer.dataset.held_out.share=0.05

Every `buffer.dataset.held_out.interval` steps, and after the last one, `eval/loss` is the loss of all of them; of pairs
`eval/accuracy` and `eval/margin` are what `actor/rewards/accuracies` and `margins` are of those trained on. They are in
metrics.csv, in the loggers, in the report and in the step's line. Of several devices each measures a share.

"""


LOGGERS = """## Weights & Biases

`logger=wandb_offline`, the default, needs no account. `logger=wandb` uploads during the run: a machine without a login
(`wandb login`, or `WANDB_API_KEY`) is refused before anything is loaded, and so is a logger whose package is not
installed. TensorBoard is the extra `tensorboard`.

A run is named by its recipe, the parts that the command chose and the values that it set (`grpo sort lr=1e-4 seed=1`);
its tags are recipe, model, rewards and tasksets; the jobs of a sweep share a group. `logger.wandb.name`, `tags` and
`group` are yours to set. The history has a row for each explore step, and if a step has several optimizer steps a row
for each of them, as metrics.csv has. `explore_step` is the axis of all charts.

**A resumed run** goes on in the same run of W&B: its id is in `wandb_run_id.txt` in the run's folder, and in the
checkpoint. Resumed in another folder, from a checkpoint that lies in the folder of its run, it branches off, and gets
a run of its own; `logger.wandb.id=ID` sets the id. Offline each part is a file of its own, `wandb/offline-run-*`, with
the same id: `wandb sync` given all of them uploads them in order, as one run (W&B 0.31).

Steps that had been logged after the checkpoint are computed again. W&B takes nothing back: these explore steps have
two rows then, and the later one counts. (Rewinding a run, `resume_from`, is a preview that W&B opens to some accounts,
and does not work offline.) metrics.csv and the report have each step once.

"""


LAYOUTS = """## Layouts

A group's rollouts begin with the same prompt, and rows differ in length. How the rows of a micro-batch lie in memory
changes neither loss nor gradient (they differ by rounding only), but how many tokens are computed:

| `algorithm.layout` | computed tokens of a micro-batch |
|---|---|
| `padded` | rows x longest row; rows are sorted by length |
| `shared_prefix` | each prefix once, and what every row has behind it, unpadded; larger groups are cut up |
| `auto` | for each optimizer batch those of `shared_prefix` if that saves a fifth, else of `padded` |

What is shared is what prompts begin with, whichever task they are of: the prompt of a group, a system prompt of single
rows, the earlier turns of a later one. An expert's row shares it if its prompt is the same. `perf/shared_prefix` says
which layout a step ran in, `perf/computed_tokens` how much it computed, `perf/padding_ratio` that over the tokens there
are. `algorithm.max_tokens_per_micro_batch` bounds computed tokens in either, and with them memory.

Prefixes can be shared by models all of whose layers attend to every token before (`layer_types` other than
`full_attention`, sliding windows and recurrent layers cannot), loaded with `model.attn_implementation=sdpa`, without
dropout, on a CPU or an NVIDIA GPU. Before a run's first rollouts log-probabilities and a gradient are computed both
ways: where they differ, `auto` pads, and `shared_prefix` is refused with the reason.

"""


def algorithms_page() -> str:
    """The page of algorithms, with the table of losses as it is now."""
    before, _, rest = ALGORITHMS.read_text().partition(BEGIN)
    return before + BEGIN + _losses() + END + rest.partition(END)[2]


def _losses() -> str:
    names: dict[PolicyLossFn, list[str]] = {}
    for name in sorted(POLICY_LOSS_FN):
        names.setdefault(POLICY_LOSS_FN.get(name), []).append(name)
    return LOSSES + "".join(_loss(loss, known) for loss, known in names.items())


def _loss(loss: PolicyLossFn, names: list[str]) -> str:
    """A row of the table: the docstring's first sentence, and the arguments with their defaults."""
    defaults = {name: _default(each.default) for name, each in loss_arguments(loss).items()}
    average = defaults.pop("loss_agg_mode", "its own")
    summary = re.split(r"\.(?:\s|$)", inspect.getdoc(loss) or "")[0]
    arguments = ", ".join(f"{name} {default}" for name, default in defaults.items()) or "none"
    average = "each term's own" if average == "`null`" else average
    return f"| {', '.join(f'`{name}`' for name in names)} | {summary} | {arguments} | {average} |\n"


def _page(name: str, field: Any) -> str:
    cls = _schema_of(field) if field is not None else None
    lines = [f"# {name}", "", _summary(cls) if cls else FREE.get(name, ""), ""]
    if cls is not None:
        body = inspect.getdoc(cls) or ""
        extra = re.split(r"\n\s*Attributes:", body.partition("\n")[2])[0].strip()
        lines += [extra, ""] if extra else []
        lines += [*_knobs(cls, f"{name}."), ""]
    if name == "algorithm":
        lines += ["## Critic", "", _summary(CriticConfig), "", *_knobs(CriticConfig, "algorithm.critic."), ""]
        lines += [LAYOUTS + "Losses, their formulas and arguments: [algorithms](../algorithms.md#losses).", ""]
    lines += [EXAMPLES] if name == "buffer" else [LOGGERS] if name == "logger" else []
    folder = config_dir("conf") / name
    if folder.is_dir():
        lines += ["## Choices", ""]
        for path in sorted(folder.glob("*.yaml")):
            lines += [f"`{name}={path.stem}`", "", "```yaml", path.read_text().strip(), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _knobs(
    cls: type,
    prefix: str,
    skip: set[str] = frozenset(),  # type: ignore[assignment]
    values: Any = None,
) -> list[str]:
    values = cls() if values is None else values
    lines = ["| knob | default | meaning |", "|---|---|---|"]
    meanings = _meanings(cls)
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        nested = _schema_of(field)
        if nested is not None:
            lines.append(f"| `{prefix}{field.name}` | | {_summary(nested)} |")
            lines += _knobs(nested, f"{prefix}{field.name}.", values=getattr(values, field.name))[2:]
        else:
            lines.append(
                f"| `{prefix}{field.name}` | {_default(getattr(values, field.name))} | {meanings.get(field.name, '')} |"
            )
    return lines


def _meanings(cls: type) -> dict[str, str]:
    """Texts of the `Attributes:` section by name; names that share a line share its text."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w[\w, ]*): (.*(?:\n        .*)*)", section, re.MULTILINE)
    return {name.strip(): " ".join(text.split()) for names, text in found for name in names.split(",")}


def _summary(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


def _schema_of(field: Any) -> type | None:
    return field.type if isinstance(field.type, type) and dataclasses.is_dataclass(field.type) else None


def _default(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    return "required" if value == "???" else f"`{'null' if value is None else value}`"


def main() -> None:
    DOCS.mkdir(parents=True, exist_ok=True)
    for old in DOCS.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    ALGORITHMS.write_text(algorithms_page())
    print(f"written: {DOCS.relative_to(ROOT)}/*.md and {ALGORITHMS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
