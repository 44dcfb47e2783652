"""Write pages from docstrings: `docs/config/`, and the table of losses in `docs/algorithms.md`.

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
from trinity_lightning.config import run
from trinity_lightning.config.critic import CriticConfig
from trinity_lightning.config.loss_arguments import loss_arguments, signature_of
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
        "`conf/train.yaml` composes these. A recipe overrides it, and the command line overrides both.",
        "",
    ]
    lines += ["| group or section | what it is |", "|---|---|"]
    typed = {field.name: field for field in dataclasses.fields(run.TrainConfig)}
    for name in names:
        cls = _schema_of(typed[name]) if name in typed else None
        lines.append(f"| [{name}]({name}.md) | {_summary(cls) if cls else FREE.get(name, '')} |")
    lines.append("| [reward](reward.md) | The function that judges a response, by name or path. |")
    return "\n".join([*lines, "", "## The run itself", "", *_knobs(run.TrainConfig, "", skip=set(names)), ""])


FREE = {
    "add_strategy": "How rewards become advantages, in order: {name: {args}}.",
    "callbacks": "Lightning callbacks, as `_target_` nodes.",
    "logger": "Lightning loggers, as `_target_` nodes.",
    "operators": "Filters and edits before advantages are computed, in order: {name: {args, on_error: stop or skip}}.",
    "trainer": "Arguments of `lightning.Trainer`.",
}


REWARD_PAGE = """# reward

A reward is a plain function of the response and the task, sync or async. It returns a number, or a dict of parts that
are added up. `reward=math` chooses one of the names below, and `reward=my_module.my_function` a function of your own.
`reward='{accuracy: 1.0, format: 0.2}'` is the weighted sum of several, each with its own metric. A penalty for length
is an operator, because operators know tokens: [`operators=overlong_penalty`](operators.md).

`reward=null`, the default, leaves the choice to the workflow. `math`, `tool_use` and `evaluation` then judge as
`reward=math` does, `judge` asks its model, and in `multi_turn` the environment gives the rewards. `simple` has no
reward of its own.

Evaluations are judged by the same reward. The held-out sums are evaluated only in runs that train on sums. Give your
own held-out tasks as `eval_tasksets`. If your reward does not fit an evaluation of the recipe that you build on, leave
the evaluation out (`eval_tasksets.NAME=null`).

    python -m trinity_lightning.train +recipe=grpo taskset=dataset taskset.path=games.jsonl reward=countdown \\
        '+eval_tasksets={games: {source: dataset, path: heldout.jsonl}}'

If a function raises, or returns anything but a finite number, its rollout fails and is tried again. If it fails for
every answer of the first tasks to end (at least 16, and more if an engine ends many at once), the run gives up the
other tasks. It ends with a sentence that names the function and the error.

## What is judged

Rewards, environments and tool parsers get the text that the policy wrote. It contains the policy's markers (of
thoughts, tool calls and channels) and the stop string that ended it, but no end tokens.
`sampling.skip_special_tokens=true` leaves out the markers, and `sampling.include_stop_str_in_output=false` the stop
string.

Thoughts are no answer. The rewards below judge the text behind the last closed thought. A response that was cut off in
its thoughts is worth 0, even if the chat template opened them. There are two exceptions: `format` looks at the
thoughts, and `contains_digits` at the whole text. Tool calls, the environments of this package and judges follow the
same rule. The markers of common models are known (`common/thoughts.py` lists them), and so are pairs of tokens, or of
tags in the chat template, that are named after thoughts. Give other markers as `model.thoughts='["[T]", "[/T]"]'`.

A function of your own gets the whole text. `answer_part` returns the part of it that counts as the answer:

    from trinity_lightning.common.thoughts import answer_part

    def polite(response, task):
        answer = answer_part(response)  # None: cut off in its thoughts
        return float(answer is not None and "please" in answer)

The response is a `str` that also knows whether its prompt had opened the thoughts. Pass `answer_part` the response
itself, not a part of it, because a part is plain text. The same holds for the rewards below, if yours calls one.

## The task's answer

Rewards that compare with the task's answer take a text, a number, or a list of accepted texts and numbers. An answer
of several parts, such as the point (1, 2), is one text. The answer may be nested in a field, as in verl's data:
`taskset.answer_field=reward_model.ground_truth`. Answers that such a reward cannot read (a mapping, NaN, an empty list,
blank text) are refused before the run begins, with their rows. Your own reward can check the rows too: give the
function an attribute `check_task`, a function that raises a `ConfigError` for a bad row.

## Slow rewards

A plain function runs in a thread of the run's process, and an async function on its event loop. This suits functions
that are quick, and functions that wait (for a request or a subprocess). A function that computes in Python for more
than some milliseconds per response slows down rollouts and training, because they share the interpreter with it. A
function that hangs cannot be ended. Give such functions their own processes:

    python -m trinity_lightning.train +recipe=grpo reward=my_module.my_function explorer.reward_workers=4

Each process imports `my_module` and gets the response and the task (without its `workflow` and `reward_fn`). Results,
metrics and errors are the same. A call may take `explorer.reward_timeout` seconds (60, including the import before the
first call). If it takes longer, its rollout fails and is tried again, and the process is ended and replaced. A process
that dies is replaced too. Functions that another process cannot import are refused: lambdas, and functions within a
function or a notebook. A script of your own needs `if __name__ == "__main__":` around the call that starts the run.
These processes are for local runners; Ray's runners are processes already. They take CPU time: on a machine without a
GPU leave the trainer a core (`benchmarks/reward_workers.py` measures both).

Async functions stay on the event loop with these settings too, because there many of them can wait at once. Write
a function that computes as a plain function.

`math` and `accuracy` compare with math-verify in processes of their own, with or without these settings.

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


# The lines around the generated table in docs/algorithms.md; the rest of that page is written by hand.
BEGIN, END = "<!-- written by scripts/config_docs.py -->\n", "<!-- until here -->\n"
LOSSES = """
The table shows the loss of one token. lp, old and ref are the log-probabilities of the policy, of
`algorithm.old_logprobs` and of the reference, A is the advantage, and r = exp(lp - old) is the ratio. The last column
says how the tokens' losses are averaged, unless `algorithm.loss_agg_mode` is set. Set an argument with
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
| `dpo` | `prompt`, `chosen`, `rejected` | the first response is better than the second |
| `dpo` | `chosen`, `rejected` | the same; the prompt is the common beginning, without an answer that both have |

If an entry has several of these, `prompt` and `completion` come first, then `messages`, then `text`, as in TRL. A
warning names the columns that have no effect. Values of JSON and CSV files keep the type that they have in the file,
also on the hub. All cells of a CSV file are text.

The conversations of tasks, expert data and examples are read alike:

- Roles are system, developer, user, assistant, tool and function, and others that the chat template names.
- A content is text, or a list of parts of type `text`.
- `from` and `value` may stand for role and content, with ShareGPT's human and gpt for user and assistant.
- A conversation may be JSON text, as in CSV and parquet files.
- Pictures, sound and film are not supported, and refused (columns `image`, `images`, `video`, `videos`, `audio`,
  `audios`, and such parts of a content).

The chat template renders the messages. It is shown the column `tools`, and the variables of the column
`chat_template_kwargs`, such as {"enable_thinking": false}, in addition to `model.chat_template_kwargs`. The learned
part follows the same prompt as in rollouts, and its last token ends the turn. Unlike in TRL, a newline that the
template writes behind the turn is not learned. [The page of chat templates](../chat_templates.md) shows what is
learned with each template, and what is refused or warned of.

Plain text stays as it is, and the end token is added to the learned part. The learned part must not be empty. An empty
text as `rejected` is the end token alone.

Examples can be held out from training: a second file, another split, or a share of the examples:

    python -m trinity_lightning.train +recipe=sft buffer.path=examples.jsonl buffer.dataset.held_out.share=0.05

Every `buffer.dataset.held_out.interval` steps, and after the last one, `eval/loss` is the loss of all held-out
examples. For pairs, `eval/accuracy` and `eval/margin` are the same as `actor/rewards/accuracies` and `margins` on the
trained pairs. They are in metrics.csv, in the loggers, in the report and in the step's line. With several devices, each
measures a share of the examples.

"""


LOGGERS = """## Weights & Biases

`logger=wandb_offline`, the default, needs no account. `logger=wandb` uploads during the run: a machine without a login
(`wandb login`, or `WANDB_API_KEY`) is refused before anything is loaded, and so is a logger whose package is not
installed. TensorBoard is the extra `tensorboard`.

The name of a run consists of its recipe, and of the parts and values that the command chose
(`grpo sort lr=1e-4 seed=1`). Its tags are recipe, model, rewards and tasksets. The jobs of a sweep share a group. Set
`logger.wandb.name`, `tags` and `group` to choose your own, and `entity`, `project` and `notes`. The history has one row
per optimizer step, as metrics.csv has. `explore_step` is the axis of all charts. [Dashboard, table of runs and
alerts](../wandb.md) have a page of their own.

**A resumed run** continues the same W&B run. Its id is in `wandb_run_id.txt` in the run's folder, and in the
checkpoint. A run that is resumed in another folder, from a checkpoint in the folder of its run, branches off and gets
its own W&B run. `logger.wandb.id=ID` sets the id. Offline, each part of a run is a separate file with the same id,
`wandb/offline-run-*`. `wandb sync` with all of these files uploads them in order, as one run (W&B 0.31).

Steps that were logged after the checkpoint are computed again. W&B deletes nothing, so these explore steps have two
rows, and the later one counts. (Rewinding a run, `resume_from`, is a preview that W&B opens to some accounts only, and
does not work offline.) metrics.csv and the report have each step once.

"""


LAYOUTS = """## Layouts

The rollouts of a group begin with the same prompt, and rows differ in length. The layout of a micro-batch in memory
decides how many tokens are computed. Loss and gradient stay the same, except for rounding:

| `algorithm.layout` | computed tokens of a micro-batch |
|---|---|
| `padded` | rows x longest row; rows are sorted by length |
| `shared_prefix` | each prefix once, and the rest of every row, unpadded; larger groups are cut up |
| `auto` | chosen for each optimizer batch: `shared_prefix` if it saves a fifth, else `padded` |

Rows share the common beginning of their prompts, even across tasks: the prompt of a group, a system prompt, or the
earlier turns of a conversation. An expert's row shares a prompt if it has the same. `perf/shared_prefix` says which
layout a step used, `perf/computed_tokens` how many tokens it computed, and `perf/padding_ratio` that number divided by
the number of real tokens. `algorithm.max_tokens_per_micro_batch` limits the computed tokens in either layout, and so
the memory.

Sharing needs a model in which every layer attends to all earlier tokens. It does not work with sliding windows,
recurrent layers, or `layer_types` other than `full_attention`. It also needs `model.attn_implementation=sdpa`, no
dropout, and a CPU or an NVIDIA GPU. Before the first rollouts, a run computes log-probabilities and a gradient in both
layouts. If they differ, `auto` pads, and `shared_prefix` is refused with the reason.

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
    defaults = {name: _default(parameter.default) for name, parameter in loss_arguments(signature_of(loss)).items()}
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
    documented = re.findall(r"^    (\w[\w, ]*): (.*(?:\n        .*)*)", section, re.MULTILINE)
    return {name.strip(): " ".join(text.split()) for names, text in documented for name in names.split(",")}


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
