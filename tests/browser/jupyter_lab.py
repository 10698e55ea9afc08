"""A Jupyter server of its own for browser tests: JupyterLab and Notebook 7, no token, no settings of the user."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

__all__ = ["JupyterServer"]

_APP = {"expose_app_in_browser": True}
_NO_NEWS = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}


@dataclasses.dataclass
class JupyterServer:
    """folder: where its notebooks lie. url: of the server, without a slash at the end. log: its output."""

    folder: Path
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, folder: Path, *, timeout: float = 60) -> "JupyterServer":
        """Start a server over `folder`/notebooks and wait until it answers; `stop` it."""
        notebooks = folder / "notebooks"
        notebooks.mkdir()
        config = folder / "config"
        _write_json(config / "jupyter_lab_config.json", {"LabApp": _APP})
        _write_json(config / "jupyter_notebook_config.json", {"JupyterNotebookApp": _APP})
        _write_json(config / "labconfig" / "page_config.json", _NO_NEWS)
        port = _free_port()
        log = folder / "server.log"
        arguments = [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", f"--notebook-dir={notebooks}"),
            *(f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--allow-root"),
            "--ServerApp.disable_check_xsrf=True",
        ]
        with log.open("wb") as file:
            process = subprocess.Popen(
                arguments, cwd=folder, env=_environment(folder), stdout=file, stderr=subprocess.STDOUT
            )
        server = cls(notebooks, f"http://127.0.0.1:{port}", log, process)
        try:
            server._wait_for_answer(timeout)
        except BaseException:
            server.stop()
            raise
        return server

    def stop(self) -> None:
        """End the server and its kernels."""
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kernels(self) -> list[dict[str, object]]:
        """The kernels that run, as the server's API tells them."""
        with urllib.request.urlopen(f"{self.url}/api/kernels", timeout=10) as answer:
            return list(json.load(answer))

    def end_kernels(self) -> None:
        for kernel in self.kernels():
            request = urllib.request.Request(f"{self.url}/api/kernels/{kernel['id']}", method="DELETE")
            urllib.request.urlopen(request, timeout=20).close()

    def _wait_for_answer(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/api/status", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"The Jupyter server did not start:\n{self.log.read_text()[-3000:]}") from None
            time.sleep(0.1)  # between two questions whether it is there


def _environment(folder: Path) -> dict[str, str]:
    """This process's, with every Jupyter and IPython folder in `folder`, and this Python before any other."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "PYTEST", "JPY"))}
    return own | {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
