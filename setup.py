"""The wheel carries csrc/ beside the module that compiles it, for `kdakit build-cuda`; all else is in pyproject.toml."""

from pathlib import Path
from shutil import copytree

from setuptools import setup
from setuptools.command.build_py import build_py


class WithSources(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            copytree(Path(__file__).parent / "csrc", Path(self.build_lib) / "kdakit/backends/cuda/csrc", dirs_exist_ok=True)


setup(cmdclass={"build_py": WithSources})
