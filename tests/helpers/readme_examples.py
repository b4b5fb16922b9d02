"""Runs every Python example of a Markdown page with the kdakit that is installed: `python readme_examples.py README.md`."""

import re
import sys
from pathlib import Path

import kdakit

blocks = re.findall(r"```python\n(.*?)```", Path(sys.argv[1]).read_text(encoding="utf-8"), re.DOTALL)
for block in blocks:
    exec(compile(block, sys.argv[1], "exec"), {})
print(f"{len(blocks)} examples run with {Path(kdakit.__file__).parent}")
