"""Hooks of mkdocs: files of the repository that the pages link to become pages of the site.

Pages link to other files of the repository by relative paths (../recipes/grpo.yaml), as GitHub shows them. The site
has no such paths, and mkdocs refuses them. A linked file becomes a page with its text, under repository/, and the link
leads there. README.md, CONTRIBUTING.md and CHANGELOG.md become pages too. Nothing is copied by hand.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# Pages of the site that are files of the repository's root.
ROOT_PAGES = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are files of the repository: those of its root, and those that a page links to."""
    texts = {page: (DOCS / page).read_text() for page in (file.src_uri for file in files.documentation_pages())}
    for name, page in ROOT_PAGES.items():
        texts[page] = (ROOT / name).read_text()
        files.append(File.generated(config, page, content=texts[page]))
    linked = {
        target for page, text in texts.items() for link, _ in LINK.findall(text) if (target := _outside(page, link))
    }
    for target in sorted(linked - ROOT_PAGES.keys()):
        files.append(File.generated(config, _page_of(target), content=_source_page(target)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to files of the repository to their pages."""
    here = page.file.src_uri
    if here.startswith("repository/"):
        return markdown

    def led(match: re.Match[str]) -> str:
        target = _target(here, match[1])
        if target.startswith("docs/"):
            wanted = target.removeprefix("docs/")
        else:
            wanted = ROOT_PAGES.get(target) or _page_of(target)
        return relpath(wanted, str(PurePosixPath(here).parent)) + (match[2] or "")

    return LINK.sub(led, markdown)


def _target(page: str, link: str) -> str:
    """Path in the repository of what a page of the site links to."""
    here = "." if page in ROOT_PAGES.values() else f"docs/{PurePosixPath(page).parent}"
    return normpath(f"{here}/{link}")


def _outside(page: str, link: str) -> str | None:
    target = _target(page, link)
    return None if target == "docs" or target.startswith("docs/") else target


def _page_of(target: str) -> str:
    return f"repository/{target}.md"


def _source_page(target: str) -> str:
    path = ROOT / target
    search = "---\nsearch:\n  exclude: true\n---\n"
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(("_", ".")))
        return f"{search}# {target}/\n\n" + "".join(f"- `{name}`\n" for name in names)
    return f"{search}# {target}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n````\n"
