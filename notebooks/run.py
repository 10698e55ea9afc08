"""Run a notebook headless and print what its cells show, as it grows: `python -m notebooks.run PATH`."""

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

__all__ = ["main"]


class Printer:
    """Prints the messages of a kernel: an output that grows is continued, one that changes is printed at its end."""

    def __init__(self) -> None:
        self._display_id: str | None = None
        self._printed = ""
        self._latest = ""

    def cell(self, number: int, source: str) -> None:
        self.end()
        print(f"\n\033[1mIn [{number}]:\033[0m " + source.strip().replace("\n", "\n    "))

    def message(self, message: dict[str, Any]) -> None:
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                self.end()
                print(content["text"], end="", flush=True)
            case "display_data" | "update_display_data" | "execute_result":
                self._display(content.get("transient", {}).get("display_id"), content["data"].get("text/plain", ""))
            case "error":
                self.end()
                print(f"{content['ename']}: {content['evalue']}")

    def end(self) -> None:
        """The output that grew so far grows no more."""
        if self._latest != self._printed:
            print(("\n" if self._printed else "") + self._latest, end="")
        if self._latest:
            print(flush=True)
        self._display_id, self._printed, self._latest = None, "", ""

    def _display(self, display_id: str | None, text: str) -> None:
        if display_id is None or display_id != self._display_id:
            self.end()
        self._display_id, self._latest = display_id, text
        if text.startswith(self._printed):
            print(text[len(self._printed) :], end="", flush=True)
            self._printed = text
        elif "\n" not in text:
            print(f"\n{text}", end="", flush=True)
            self._printed = text


class StreamingClient(NotebookClient):
    """nbclient that shows every output when it comes."""

    def __init__(self, *args: Any, printer: Printer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._printer = printer

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        """Print, then store as nbclient does."""
        self._printer.message(msg)
        return super().process_message(msg, cell, cell_index)


async def run(path: Path) -> None:
    """Execute the notebook at `path` in a kernel of this Python; a cell that raises ends it."""
    notebook = nbformat.read(path, as_version=4)
    printer = Printer()
    client = StreamingClient(
        notebook, kernel_name="python3", printer=printer, resources={"metadata": {"path": str(path.parent)}}
    )
    client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable  # whatever a kernel spec of the user says
    async with client.async_setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "code" and cell.source.strip():
                printer.cell(index, cell.source)
                await client.async_execute_cell(cell, index)
        printer.end()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as ipython:
        os.environ["IPYTHONDIR"] = ipython  # nothing of the user's configuration
        asyncio.run(run(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
