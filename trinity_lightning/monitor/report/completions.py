"""What the model wrote before and after training, side by side."""

from collections.abc import Mapping
from html import escape
from typing import Any

from trinity_lightning.monitor.report.record import Completion, RunRecord
from trinity_lightning.monitor.report.svg import short

_EXAMPLES = 8
_MOST_CHARACTERS = 1500


def completions_section(run: RunRecord) -> str:
    """Of each taskset evaluated more than once the same tasks before and after; without any the first and last step.

    The first tasks are shown, as they come: nobody has chosen them.
    """
    evaluated = {name: steps for name, steps in run.completions.items() if name and len(steps) > 1}
    if evaluated:
        return "\n".join(_paired(name, steps) for name, steps in evaluated.items())
    steps = run.completions.get("") or next(iter(run.completions.values()), {})
    return _apart(steps) if any(steps.values()) else ""


def _paired(name: str, steps: Mapping[int, list[Completion]]) -> str:
    first, last = min(steps), max(steps)
    after = {_key(completion): completion for completion in reversed(steps[last])}
    before = {_key(completion): completion for completion in reversed(steps[first])}
    both = [key for key in reversed(before) if key in after][:_EXAMPLES]
    pairs = "".join(
        f'{_prompt(before[key])}<div class="pair">'
        f"<div>{_shown(before[key], first)}</div><div>{_shown(after[key], last)}</div></div>"
        for key in both
    )
    told = f"The first {len(both)} tasks of {escape(name)}, at explore steps {first} and {last}."
    return f'<h2>Before and after</h2>\n<p class="quiet">{told}</p>\n{pairs}' if both else ""


def _apart(steps: Mapping[int, list[Completion]]) -> str:
    """The first and the last step, whose tasks are not the same: the first response to each of some tasks."""
    columns = []
    for step, completions in sorted(steps.items()):
        firsts = list({_key(completion): completion for completion in reversed(completions)}.values())[::-1]
        shown = "<hr>".join(f"{_prompt(each)}{_shown(each, step)}" for each in firsts[:_EXAMPLES])
        columns.append(f"<div>{shown}</div>")
    told = "The first response to each of the first tasks; the tasks of the two steps differ."
    return f'<h2>Completions</h2>\n<p class="quiet">{told}</p>\n<div class="pair">{"".join(columns)}</div>'


def _key(completion: Completion) -> str:
    """What makes two completions answers to the same task."""
    return repr((completion.get("task"), completion.get("prompt")))


def _prompt(completion: Completion) -> str:
    return f"<pre>{_text(completion.get('prompt'))}</pre>"


def _shown(completion: Completion, step: int) -> str:
    reward = completion.get("reward")
    told = f", reward {short(reward)}" if isinstance(reward, int | float) else ""
    cut = ", cut off" if completion.get("truncated") is True else ""
    cut += f", not trained: {escape(str(completion.get('reason')))}" if completion.get("trained") is False else ""
    text = _text(completion.get("completion"))
    return f'<span class="quiet">step {step}{told}{cut}</span><pre>{text}</pre>'


def _text(value: Any) -> str:
    """Anybody's text, as text: markup in it is shown, not obeyed."""
    text = value if isinstance(value, str) else "" if value is None else repr(value)
    left = len(text) - _MOST_CHARACTERS
    return escape(text[:_MOST_CHARACTERS]) + (f" … ({left} more characters)" if left > 0 else "")
