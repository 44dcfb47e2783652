"""Run a program, and write down the files of the package with functions that ran.

python tests/support/functions_run.py FILE PROGRAM ARGUMENTS

FILE gets one path a line, relative to the package. A function that is called by an import does not count: a file that
is only imported is none that the run needs. Each function of the package notes its file when it begins, by a statement
that is put there when the file is imported: a tracer would slow down all that torch and vLLM do, too.
"""

import ast
import builtins
import runpy
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = "trinity_lightning"
IMPORT = "<frozen importlib._bootstrap>"
NOTE = ast.parse("__note_run__(__file__)", mode="eval").body


class NotingLoader(SourceFileLoader):
    """Compiles a file with a first statement in each of its functions that notes the file; it ignores cached code."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                place = 1 if ast.get_docstring(node) is not None else 0
                node.body.insert(place, ast.copy_location(ast.Expr(NOTE), node.body[0]))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class NotingFinder(PathFinder):
    """Finds the modules of the package, for NotingLoader."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target) if fullname.split(".")[0] == PACKAGE else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = NotingLoader(spec.loader.name, spec.loader.path)
        return spec


def watch() -> set[str]:
    """The files with functions that run from now on, in any thread; the set grows with them."""
    files: set[str] = set()

    def note(file: str) -> None:
        if file not in files and not is_importing(sys._getframe(1)):
            files.add(file)

    builtins.__note_run__ = note  # type: ignore[attr-defined]
    sys.meta_path.insert(0, NotingFinder)
    return files


def is_importing(frame: FrameType | None) -> bool:
    """True if a module is being imported further up the stack."""
    while frame is not None and frame.f_code.co_filename != IMPORT:
        frame = frame.f_back
    return frame is not None


if __name__ == "__main__":
    target, program, *arguments = sys.argv[1:]
    ran = watch()
    sys.argv = [program, *arguments]
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        names = sorted(file.rpartition(f"/{PACKAGE}/")[2] for file in ran)
        Path(target).write_text("".join(f"{name}\n" for name in names))
