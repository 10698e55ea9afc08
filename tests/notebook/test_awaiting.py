"""Where `await` is put before our magics, and where it is not."""

import ast

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from llmkernel.notebook.awaiting import add_awaits

NESTED = "run_nested("


def transform(cell: str) -> str:
    return add_awaits(TransformerManager().transform_cell(cell), transform)


def awaits(cell: str) -> int:
    tree = ast.parse(transform(cell))
    return sum(isinstance(node, ast.Await) for node in ast.walk(tree))


@pytest.mark.parametrize(
    "cell",
    [
        "%%generate -n 2\nhi é 日本\n\nmore",
        "x = %generate hi",
        "for i in range(3):\n    r = %generate hi {i}\n    print(r)",
        "é = 'ü'; y = get_ipython().run_line_magic('generate', 'x')",
        "%llm load smollm2",
        "  \n%llm unload",
        "async def f():\n    r = %generate hi\n    return r",
        "if True:\n    with open('f') as g:\n        %generate hi",
        "try:\n    %generate hi\nexcept KeyboardInterrupt:\n    pass",
    ],
)
def test_our_magics_are_awaited(cell: str) -> None:
    assert awaits(cell) == 1
    compile(transform(cell), "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize(
    "cell",
    [
        "%generate -b hi",
        "%%generate --background -n 2\nhi",
        "%llm status",
        "%llm",
        "def f():\n    r = %generate hi\n    return r",
        "class A:\n    x = %generate hi",
        "[get_ipython().run_line_magic('generate', 'x') for _ in range(3)]",
        "f = lambda: get_ipython().run_line_magic('generate', 'x')",
        "s = \"get_ipython().run_line_magic('generate', 'x')\"",
        "%timeit 1",
        "%%time\n1 + 1",
        "%%time\n# %generate hi",
        "%%capture c\nprint(1)",
        "%%writefile f\n%generate hi",
        "x = )\n%generate hi",
    ],
)
def test_everything_else_stays_as_it_is(cell: str) -> None:
    assert transform(cell) == TransformerManager().transform_cell(cell)


def test_what_is_awaited_is_not_awaited_twice() -> None:
    cell = "x = await get_ipython().run_line_magic('generate', 'x')"
    assert awaits(cell) == 1 and transform(transform(cell)) == transform(cell)


def test_await_binds_to_the_call_alone() -> None:
    tree = ast.parse(transform("y = get_ipython().run_line_magic('generate', 'x').text"))
    assignment = tree.body[0]
    assert isinstance(assignment, ast.Assign)
    assert isinstance(assignment.value, ast.Attribute) and isinstance(assignment.value.value, ast.Await)


@pytest.mark.parametrize(
    "cell",
    [
        "%%time\n%%generate -n 2\nhi",
        "%%time\nx = %generate hi\ny = 2",
        "%time %generate hi",
        "%%capture out --no-stderr\n%%generate\nhi",
        "%%capture\n%%time\n%%generate\nhi",
        "if x:\n    %time %generate hi",
    ],
)
def test_time_and_capture_run_their_asynchronous_twins(cell: str) -> None:
    transformed = transform(cell)
    assert NESTED in transformed and awaits(cell) == 1
    compile(transformed, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_an_async_function_inside_a_sync_one_is_reached() -> None:
    cell = "def outer():\n    async def inner():\n        return await_me\n    r = %generate not here\n    return inner"
    assert awaits(cell) == 0
    cell = "def outer():\n    async def inner():\n        r = %generate here\n    return inner"
    assert awaits(cell) == 1


def test_lines_are_counted_as_python_counts_them() -> None:
    text = "s = 'a\u2028b\x0c'\nget_ipython().run_line_magic('generate', 'hi')\n"
    assert add_awaits(text, transform) == text.replace("get_ipython", "(await get_ipython").replace("'hi')", "'hi'))")
