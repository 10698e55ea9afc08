"""The text transformer that puts `await` before our magics, so that a cell is done when its answer is.

It runs after IPython's own transforms, on text, because IPython decides from the text whether a cell is asynchronous.
Sync functions, lambdas, comprehensions and class bodies cannot await: there the magic gives back a live handle. Where
`%%time` or `%%capture` hold one of our magics they run nested.py's asynchronous twins.
"""

import ast
import re
from collections.abc import Callable, Iterator

from IPython.core.getipython import get_ipython

from llmkernel.notebook.arguments import is_awaited_verb, is_background

__all__ = ["add_awaits", "await_our_magics"]

_AWAITED: dict[str, Callable[[str], bool]] = {
    "generate": lambda line: not is_background(line),
    "chat": lambda line: not is_background(line),
    "llm": is_awaited_verb,
}
"""Our magics, and whether the rest of the line asks for waiting."""

_NESTING = ("time", "capture")
_RUNNERS = ("run_line_magic", "run_cell_magic")
_CANNOT_AWAIT = (
    ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip
_NESTED = "__import__('llmkernel.notebook.nested', fromlist=['run_nested']).run_nested"


def await_our_magics(lines: list[str]) -> list[str]:
    """For `InteractiveShell.input_transformers_post`. `%autoawait off` is respected."""
    shell = get_ipython()
    if shell is None or not shell.autoawait:
        return lines
    return add_awaits("".join(lines), shell.transform_cell).splitlines(keepends=True)


def add_awaits(text: str, transform: Callable[[str], str]) -> str:
    """`text` with our magics awaited; unchanged if it has none, or is no Python.

    transform: what IPython does with a cell; it is applied to the bodies of %%time and %%capture.
    """
    if not any(f"'{name}'" in text for name in (*_AWAITED, *_NESTING)):
        return text
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return text  # IPython shows the error
    lines = [line.encode() for line in re.split(r"(?<=\n)", text)]  # as ast counts lines, not as str.splitlines does
    calls = sorted(_calls(tree), key=lambda call: (call.lineno, call.col_offset), reverse=True)
    for call in calls:  # from the end, so that positions stay right
        if _wants_await(call):
            _insert(lines, call.end_lineno, call.end_col_offset, b")")
            _insert(lines, call.lineno, call.col_offset, b"(await ")
        elif _nests_ours(call, transform):
            start = call.func
            _insert(lines, call.end_lineno, call.end_col_offset, b")")
            _cut(lines, start)
            _insert(lines, call.lineno, call.col_offset, f"(await {_NESTED}".encode())
    return b"".join(lines).decode()


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """Calls of get_ipython().run_*_magic that could be awaited where they stand and are not yet."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _CANNOT_AWAIT):
            yield from _calls_of_async_functions(child)
            continue
        if _magic_name(child) and not isinstance(node, ast.Await):
            yield child  # type: ignore[misc]
        yield from _calls(child)


def _calls_of_async_functions(node: ast.AST) -> Iterator[ast.Call]:
    for child in ast.iter_child_nodes(node):
        yield from _calls(child) if isinstance(child, ast.AsyncFunctionDef) else _calls_of_async_functions(child)


def _magic_name(node: ast.AST) -> str | None:
    """The magic that this call of get_ipython().run_*_magic('name', 'line'...) runs, if it is one."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _RUNNERS):
        return None
    owner = node.func.value
    if not (isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "get_ipython"):
        return None
    texts = _texts(node)
    return texts[0] if texts is not None and len(texts) >= 2 else None


def _texts(call: ast.Call) -> list[str] | None:
    values = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    texts = [value for value in values if isinstance(value, str)]
    return texts if len(texts) == len(call.args) and not call.keywords else None


def _wants_await(call: ast.Call) -> bool:
    name, line, *_ = _texts(call) or ["", ""]
    return name in _AWAITED and _AWAITED[name](line)


def _nests_ours(call: ast.Call, transform: Callable[[str], str]) -> bool:
    name, *bodies = _texts(call) or [""]
    if name not in _NESTING or not any(f"%{ours}" in body for body in bodies for ours in (*_AWAITED, *_NESTING)):
        return False
    body = bodies[-1]
    try:
        return any(isinstance(node, ast.Await) for node in ast.walk(ast.parse(transform(body))))
    except (SyntaxError, ValueError):
        return False


def _insert(lines: list[bytes], lineno: int | None, offset: int | None, text: bytes) -> None:
    assert lineno is not None and offset is not None  # ast.parse fills them in
    line = lines[lineno - 1]
    lines[lineno - 1] = line[:offset] + text + line[offset:]


def _cut(lines: list[bytes], node: ast.expr) -> None:
    """Remove `get_ipython().run_cell_magic`; it stands on one line, IPython wrote it."""
    assert node.end_col_offset is not None
    line = lines[node.lineno - 1]
    lines[node.lineno - 1] = line[: node.col_offset] + line[node.end_col_offset :]
