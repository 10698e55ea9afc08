"""%%time and %%capture around a body that awaits: asynchronous twins, called by the text that awaiting.py writes."""

import ast
import inspect
import sys
import time
from types import CodeType
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.magic_arguments import parse_argstring
from IPython.utils.capture import capture_output

from llmkernel.notebook.generation import Generation

__all__ = ["run_nested"]


async def run_nested(magic: str, line: str, body: str | None = None) -> Any:
    """Run `%time line`, or `%%time line` or `%%capture line` over `body`; the value is what the magic gives."""
    shell = get_ipython()
    if magic == "capture":
        return await _captured(shell, line, body or "")
    return await _timed(shell, line, body)


async def _timed(shell: Any, line: str, body: str | None) -> Any:
    args, rest = parse_argstring(shell.find_line_magic("time"), line, partial=True)
    statement = " ".join(rest)
    if statement and body:
        raise UsageError("Can't use statement directly after '%%time'!")
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        return await _run(shell, body or statement, "<timed>")
    except Exception as error:
        if not getattr(args, "no_raise_error", False):
            raise
        shell.showtraceback((type(error), error, error.__traceback__))
        return None
    finally:
        print(f"CPU times: total: {_seconds(time.process_time() - cpu)}")  # noqa: T201 - as %%time prints
        print(f"Wall time: {_seconds(time.perf_counter() - wall)}")  # noqa: T201


async def _captured(shell: Any, line: str, body: str) -> None:
    args = parse_argstring(shell.find_cell_magic("capture"), line)
    silenced = DisplayHook.semicolon_at_end_of_expression(body)
    with capture_output(not args.no_stdout, not args.no_stderr, not args.no_display) as captured:
        try:
            value = await _run(shell, body, "<captured>")
            if value is not None and not silenced and not (isinstance(value, Generation) and value.shown_here):
                sys.displayhook(value)
        finally:
            if args.output and not silenced:
                shell.user_ns[args.output] = captured


async def _run(shell: Any, body: str, name: str) -> Any:
    """Run a cell's text in the user's namespace; the value is that of a last expression."""
    transformed = shell.transform_cell(body)
    filename = shell.compile.cache(transformed, shell.execution_count, raw_code=body) if body else name
    statements = shell.transform_ast(ast.parse(transformed)).body
    last = statements.pop() if statements and isinstance(statements[-1], ast.Expr) else None
    with shell.compile.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT):
        parts = [shell.compile(ast.Module(statements, []), filename, "exec")]
        if last is not None:
            parts.append(shell.compile(ast.Expression(last.value), filename, "eval"))
    value = None
    for part in parts:
        value = await _evaluate(shell, part)
    return value if last is not None else None


async def _evaluate(shell: Any, code: CodeType) -> Any:
    value = eval(code, shell.user_global_ns, shell.user_ns)
    return await value if code.co_flags & inspect.CO_COROUTINE else value


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
