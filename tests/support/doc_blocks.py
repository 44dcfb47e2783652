"""Blocks of code in the documentation, and the lines of them that a shell runs.

A fence names its language, and each language has a test that runs the block (LANGUAGES). A block that is indented by
four spaces shows commands, output or a formula; lines that begin with a program are commands.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.runs import ROOT
from trinity_lightning.config.explain import PROGRAMS as OURS

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/**/*.md"))
# Languages of fences: what a block means, and the test that runs it. Any other fence is refused.
LANGUAGES = {
    "python": "a file of the reader's if its first line names it in a comment, else a script; run by test_snippets.py",
    "yaml": "a recipe, composed with the page's files by test_snippets.py; or a choice of conf/, shown on its page",
    "json": "one entry or more of a taskset or a dataset, read by test_snippets.py",
    "sh": "commands and nothing else, checked by test_docs.py",
    "text": "output or a picture, without commands",
}
FENCE = re.compile(r"^(`{3,})([^\n]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^(?: {4,}\S.*)?\n)+", re.MULTILINE)
PROGRAMS = (
    *("make", "pip", "python", "pytest", "pre-commit", "ray", "source", "srun", "torchrun", "wandb"),
    *("trinity-lightning", "trinity-lightning-eval", "trinity-lightning-plan", "trinity-lightning-report"),
)
COMMAND = re.compile(rf"(?:[A-Z_]\w*=\S+ +)*(?:{'|'.join(PROGRAMS)})(?= |$)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `line` is where it begins."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name of the reader's file, if the block is one."""
        name = re.match(r"# (my_\w+\.py)\n", self.text)
        return name[1] if name else None


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, match.start()) + 1, match[2].strip(), match[3])


def joined(text: str) -> list[str]:
    """The lines, with those that a backslash continues in one; without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+", " ", re.split(r"(?:^|\s+)#\s", line)[0]).strip() for line in lines]


def commands_of(page: Path) -> list[str]:
    """The commands that a page shows, each in one line."""
    text = page.read_text()
    fenced = [line for block in blocks_of(page) if block.language == "sh" for line in joined(block.text) if line]
    indented = [
        line for part in INDENTED.findall(FENCE.sub("\n", text)) for line in joined(part) if COMMAND.match(line)
    ]
    return fenced + indented


def composing(command: str) -> str | None:
    """The module and overrides of a command that composes a configuration; None for any other command.

    `trinity-lightning check +recipe=grpo` composes what `python -m trinity_lightning.train +recipe=grpo` does.
    """
    if module_form := re.search(r"-m (trinity_lightning\.(?:train|evaluate|plan) .*)", command):
        return module_form[1]
    program, *words = command.split()
    name = program.removeprefix("trinity-lightning").lstrip("-")
    if program == command or not program.startswith("trinity-lightning"):
        return None
    if not name and words[0] in OURS:
        name, *words = words
    if not any(re.match(r"[+~'\w./]+=", word) for word in words) or name in ("report", "watch", "dashboard"):
        return None
    module = {"eval": "evaluate", "evaluate": "evaluate", "plan": "plan"}.get(name, "train")
    return " ".join([f"trinity_lightning.{module}", *words])
