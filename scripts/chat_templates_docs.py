"""Write docs/chat_templates.md: what is trained with the chat templates of the field.

python scripts/chat_templates_docs.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.chat_templates import page  # noqa: E402

if __name__ == "__main__":
    (ROOT / "docs" / "chat_templates.md").write_text(page())
