"""A source distribution and a wheel whose README works outside the repository: links and pictures by address, project.urls filled in.

    python .ci/release.py https://github.com/OWNER/kdakit [FOLDER]

Builds from a copy of the tracked files, so that the checkout stays as it is. Needs `pip install build`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = (".png", ".svg")


def with_addresses(text: str, repository: str, version: str) -> str:
    """Relative targets of Markdown links and images, by their place in the repository at the version's tag."""
    raw = repository.replace("https://github.com/", "https://raw.githubusercontent.com/")

    def address(found: re.Match[str]) -> str:
        target = found.group(1)
        if target.startswith(("http://", "https://", "#", "mailto:")):
            return found.group(0)
        base = f"{raw}/v{version}" if target.partition("#")[0].endswith(PICTURES) else f"{repository}/blob/v{version}"
        return f"]({base}/{target})"

    return re.sub(r"\]\(([^)\s]+)\)", address, text)


def urls(repository: str, version: str) -> str:
    return "\n".join([
        f'Homepage = "{repository}"',
        f'Documentation = "{repository}/blob/v{version}/docs/index.md"',
        f'Changelog = "{repository}/blob/v{version}/CHANGELOG.md"',
        f'Issues = "{repository}/issues"',
    ])  # fmt: skip


def version_of(root: Path) -> str:
    found = re.search(r'__version__ = "(.+?)"', (root / "src/kdakit/__init__.py").read_text())
    if found is None:
        raise SystemExit("src/kdakit/__init__.py names no version")
    return found.group(1)


def main(repository: str, folder: str = "dist") -> None:
    repository, version = repository.rstrip("/"), version_of(ROOT)
    with tempfile.TemporaryDirectory() as place:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", place], input=archive, check=True)
        copy = Path(place)
        readme, project = copy / "README.md", copy / "pyproject.toml"
        readme.write_text(with_addresses(readme.read_text(encoding="utf-8"), repository, version), encoding="utf-8")
        project.write_text(project.read_text().replace("[project.urls]\n", f"[project.urls]\n{urls(repository, version)}\n"))
        subprocess.run([sys.executable, "-m", "build", "--outdir", str(Path(folder).resolve()), place], check=True)


if __name__ == "__main__":
    if not sys.argv[1:] or not sys.argv[1].startswith("https://"):
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
