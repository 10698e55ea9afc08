"""%%chat and %llm chat in a real kernel: turns, cells that are run again, an interrupt, words of the line."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.notebook.kernel import Cell, Kernel, running_kernel


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("chat")
    with running_kernel(folder, "%load_ext llmkernel", "%llm load fake:step_ms=4,fail_token=33 --name fake") as kernel:
        yield kernel


@pytest.fixture(autouse=True)
def nothing_said(kernel: Kernel) -> None:
    kernel.run("Session = __import__('llmkernel').Session\nSession.current.chats.conversations.clear()")


def run_cell(kernel: Kernel, cell_id: str, code: str) -> Cell:
    """Run a cell as JupyterLab does: with its id in the message's metadata."""
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    message = kernel.client.session.msg("execute_request", content, metadata={"cellId": cell_id})
    kernel.client.shell_channel.send(message)
    return kernel.finish(message["header"]["msg_id"])


def test_turns_follow_one_another(kernel: Kernel) -> None:
    first = kernel.run("%%chat --system Brief --max-tokens 8 -o first\nHi\nthere")
    assert len(first.displays) == 1 and first.answers[0]["metadata"]["llmkernel"]["params"]["system"] == "Brief"
    kernel.run("x = %chat --max-tokens 4 And then?")
    assert kernel.value("x.prompt.split('<|im_start|>')[1:]") == [
        "system\nBrief<|im_end|>\n",
        "user\nHi\nthere<|im_end|>\n",
        f"assistant\n{kernel.value('first.text')}<|im_end|>\n",
        "user\nAnd then?<|im_end|>\n",
        "assistant\n",
    ]
    assert kernel.value("x.metrics.cached_tokens") >= 16
    shown = kernel.run("%llm chat").displays[0]["data"]
    assert shown["text/markdown"].startswith("**system**\n\nBrief\n\n**user**\n\nHi\nthere")
    assert shown["text/plain"].startswith("system: Brief\n\nuser: Hi\nthere\n\nassistant: ")
    assert kernel.run("%llm chat undo").stdout == "1 turn of the chat with fake taken back, 1 left.\n"
    assert kernel.run("%llm chat undo -n 5").stdout == "1 turn of the chat with fake taken back, 0 left.\n"
    assert kernel.run("%llm chat reset --model fake").stdout == "0 turns of the chat with fake taken back.\n"


def test_a_cell_that_is_run_again_replaces_its_turn(kernel: Kernel) -> None:
    run_cell(kernel, "a", "%%chat --max-tokens 6\none")
    run_cell(kernel, "b", "%%chat --max-tokens 6\ntwo")
    run_cell(kernel, "c", "%%chat --max-tokens 6\nthree")
    again = run_cell(kernel, "b", "%%chat --max-tokens 6 -o b\ntwo, edited")
    assert again.stdout.startswith("This is turn 2 again; it replaces the earlier one and the 1 after it.\n")
    said = kernel.value("[one['content'] for one in Session.current.chats.conversation().turns()][::2]")
    assert said == ["one", "two, edited"]
    assert kernel.value("b.metrics.cached_tokens") >= 16
    loop = run_cell(kernel, "d", "for word in 'xyz':\n    %chat --max-tokens 2 --quiet {word}")
    assert loop.status == "ok" and kernel.value("len(Session.current.chats.conversation())") == 5


def test_an_interrupted_answer_stays_as_far_as_it_came(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%chat --max-tokens 1500\nhello",
        interrupt_when=lambda message: message["msg_type"] in ("display_data", "update_display_data"),
    )
    assert cell.ename == "KeyboardInterrupt"
    partial = kernel.value("_.text")
    assert partial
    kernel.run("%chat --max-tokens 1 -o after go on")
    assert f"assistant\n{partial}<|im_end|>" in kernel.value("after.prompt")
    failed = kernel.run("%chat bad!")
    assert failed.ename == "RequestFailedError"
    assert kernel.value("len(Session.current.chats.conversation())") == 2


def test_a_question_mark_at_the_end_is_no_request_for_help(kernel: Kernel) -> None:
    kernel.run("word = 'life'\nshort = dict(max_tokens=1)")
    for code in (
        "%generate --max-tokens 1 -o g what is {word}?",
        "g = %generate --params short what is $word?",
        "if 1:\n    g = %generate --max-tokens 1 what is life?",
    ):
        cell = kernel.run(code)
        assert cell.status == "ok" and kernel.value("g.rows[0].prompt.text") == "what is life?", code
    kernel.run(
        "def ask(word):\n    return get_ipython().run_line_magic('generate', '--max-tokens 1 who is {word}?')\n"
        "g = ask('she')"
    )
    assert kernel.value("g.rows[0].prompt.text") == "who is she?"
    kernel.run('text = """\n%chat is it?\n"""')
    assert kernel.value("text") == "\n%chat is it?\n"
    for code in ("%generate?", "%chat??", "len?"):
        reply = kernel.client.execute_interactive(code, output_hook=lambda _: None, timeout=20)
        assert reply["content"]["payload"], code


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        ("%%chat -n 2\nhi", "UsageError", "Unknown option -n"),
        ("%%chat --raw\nhi", "UsageError", "Unknown option --raw"),
        ("%%chat\n \n", "UsageError", "The prompt is empty; write it into the lines below %%chat."),
        ("%%chat --model a --model b\nhi", "InvalidRequestError", "one model; name one"),
        ("%llm chat", "InvalidRequestError", "There was no chat with fake yet; %%chat begins one."),
        ("%llm chat forget", "UsageError", "'forget' is none of show, undo and reset."),
        ("%llm chat undo -n x", "UsageError", "'x' is not a whole number"),
    ],
)
def test_a_mistake_is_one_line(kernel: Kernel, code: str, name: str, words: str) -> None:
    cell = kernel.run(code)
    assert (cell.status, cell.ename) == ("error", name) and words in cell.evalue and "\n" not in cell.evalue


def test_help_and_completion(kernel: Kernel) -> None:
    kernel.run("%config Completer.use_jedi = False")
    reply = kernel.client.execute_interactive("%%chat?", output_hook=lambda _: None, timeout=20)
    page = reply["content"]["payload"][0]["data"]["text/plain"]
    assert "--system" in page and "--raw" not in page and "run again" in page
    assert "chat" in kernel.run("%llm help").stdout

    def complete(code: str) -> Any:
        return kernel.client.complete(code, reply=True, timeout=20)["content"]["matches"]

    assert complete("%%chat --te") == ["--temperature", "--template"]
    assert complete("%llm chat un") == ["undo"]


def test_words_of_the_line_may_be_variables_and_files(kernel: Kernel, tmp_path: Any) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("({{ messages[-1].content }})", "utf-8")
    kernel.run("own = '[{{ messages[0].content }}]'\nclass forms: colour = {'enum': ['red', 'green']}")
    kernel.run("%generate --template own --max-tokens 1 -o g hi")
    assert kernel.value("g.prompt") == "[hi]"
    kernel.run(f"%generate --template {file} --max-tokens 1 -o g hi")
    assert kernel.value("g.prompt") == "(hi)"
    kernel.run("%generate --json-schema forms.colour -o g hi")
    assert kernel.value("g.parsed in ('red', 'green')") is True
    kernel.run("%generate --choice 'deep blue' --choice red -o g hi")
    assert kernel.value("g.parsed in ('deep blue', 'red')") is True
    kernel.run("%generate --regex '[ab]{4}' -o g hi")
    assert kernel.value("set(g.parsed) <= {'a', 'b'} and len(g.parsed)") == 4
    kernel.run('%generate --json-schema "{\\"const\\": 7}" -o g hi')
    assert kernel.value("g.parsed") == 7
    for code, words in (
        ("%generate --template nothing hi", "--template: there is neither a variable nor a file 'nothing'."),
        ("%generate --json-schema nothing hi", "--json-schema: there is neither a variable nor a file 'nothing'."),
        ("%generate --params nothing hi", "--params: there is no variable 'nothing'."),
        ("%generate --prompts nothing hi", "--prompts: there is no variable 'nothing'."),
        ("%generate --regex a --choice b hi", "--regex and --choice exclude each other; give one."),
        ("%generate --regex '(' hi", "regex"),
    ):
        cell = kernel.run(code)
        assert cell.status == "error" and words in cell.evalue and "\n" not in cell.evalue, (code, cell.evalue)
