"""Write the picture of `trinity-lightning watch` for the documentation: docs/images/watch.svg and watch.txt.

    python scripts/terminal_view.py outputs/grpo/TIME

The picture in the repository is of a run that went on, of random weights that learn to write digits:

    trinity-lightning +recipe=grpo model=tiny engine=transformers reward=contains_digits logger=csv steps=60
        optimizer.lr=1e-3 explorer.eval_interval=4
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from trinity_lightning.monitor.live import RunFolder, View
from trinity_lightning.monitor.terminal import frame

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH = 100


def terminal_view(view: View, width: int = WIDTH) -> tuple[str, str]:
    """The picture of a run as SVG and as plain text. The SVG asks for no font of another server."""
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(frame(view, width))
    svg = console.export_svg(title="trinity-lightning watch", clear=False, unique_id="watch")
    text = console.export_text()
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), "\n".join(map(str.rstrip, text.splitlines()))


def write_terminal_view(run: Path, folder: Path = IMAGES) -> None:
    """Write the picture of a run to a folder, as watch.svg and watch.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    svg, text = terminal_view(RunFolder(run).look())
    (folder / "watch.svg").write_text(svg, encoding="utf-8")
    (folder / "watch.txt").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write_terminal_view(Path(sys.argv[1]))
