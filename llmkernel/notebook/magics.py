"""The magics: %%generate, %%chat, their line forms, and %llm."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    line_cell_magic,
    line_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
)

from llmkernel.config import EngineArgs, format_bytes
from llmkernel.errors import LLMKernelError
from llmkernel.notebook.arguments import help_text, parse_line, split_words, unquote
from llmkernel.notebook.brief_errors import brief
from llmkernel.notebook.cells import is_terminal
from llmkernel.notebook.conversation import Cell, Conversation
from llmkernel.notebook.display import answer_view
from llmkernel.notebook.exact_body import exact_body
from llmkernel.notebook.front_end import shows_widgets
from llmkernel.notebook.interpolation import interpolate
from llmkernel.notebook.line_text import expand_line
from llmkernel.notebook.load_view import show_load
from llmkernel.notebook.options import CHAT, GENERATE, LOAD, LOGS, SETTINGS, SHOW, STATUS, STOP, TURNS, UNLOAD, Option
from llmkernel.notebook.plain_text import clean_text
from llmkernel.notebook.prompts import Prompt, prompts_from
from llmkernel.notebook.request_ids import generation_id
from llmkernel.notebook.session import Session
from llmkernel.notebook.status_text import status_text
from llmkernel.notebook.variables import look_up, resolve_words
from llmkernel.notebook.work import Work

if TYPE_CHECKING:
    from llmkernel.notebook.dashboard import Dashboard
    from llmkernel.notebook.generation import AnswerView, Generation
    from llmkernel.notebook.live_views import LiveViews

__all__ = ["VERBS", "LLMMagics"]

VERBS = {
    "load": "MODEL [options]: load a model: a short name, a Hub id, a folder or a .gguf file",
    "unload": "[NAME | --all]: end its engine and give the memory back",
    "restart": "[NAME]: end its engine, dead, stuck or well, and load it anew; handles of the model stay valid",
    "status": "[-v]: the models, what they do, what they take; -v: and how their load went, stage by stage",
    "config": "[NAME=VALUE ...]: defaults for %%generate; NAME= takes one back, no argument shows them",
    "ps": "what runs and what ran, by cell; what waits, and for what",
    "stop": "[ID | --all]: abort a generation",
    "chat": "[show | undo [-n N] | reset] [--model NAME]: the conversation of %%chat",
    "show": "[ID] [--view]: show a generation again, the newest if none is named; --view: with its switches and tokens",
    "trace": "[ID]: the way of its requests from cell to screen, hop by hop, with the times between",
    "dashboard": "[NAME]: what an engine does, live: requests, tokens per second, KV cache, memory",
    "logs": "[NAME] [-n N]: the last lines of an engine's log",
    "help": "this list",
}


_PATIENCE = 0.5
"""Seconds to wait for an engine to say where requests stand; one in a long step says so later."""


@magics_class
class LLMMagics(Magics):
    """A thin skin over a Session: reads lines, shows answers, tells a user's mistakes in one line."""

    def __init__(self, shell: Any, session: Session) -> None:
        super().__init__(shell)
        self.session = session
        session.open_view = self._open_view
        self._views: LiveViews | None = None

    @property
    def views(self) -> "LiveViews":
        """The live views of this kernel."""
        if self._views is None:
            # lazy: ipywidgets and anywidget take half a second that %load_ext need not take
            from llmkernel.notebook.live_views import LiveViews

            self._views = LiveViews(self.session.stop_requests, self.session.cancel_load)
        return self._views

    def _open_view(self, generation: "Generation") -> bool:
        if not shows_widgets(self.shell):
            return False
        self.views.show(self.shell, generation)
        return True

    def close_views(self) -> None:
        if self._views is not None:
            self._views.close()

    @needs_local_scope
    @no_var_expand
    @line_cell_magic
    def generate(
        self, line: str, cell: str | None = None, *, local_ns: Mapping[str, Any] | None = None
    ) -> "Generation":
        """Its help is made from the table of options, below."""
        line = expand_line(line, {**self.shell.user_ns, **(local_ns or {})})
        return self._ask("generate", GENERATE, line, cell, self._submit)

    @needs_local_scope
    @no_var_expand
    @line_cell_magic
    def chat(self, line: str, cell: str | None = None, *, local_ns: Mapping[str, Any] | None = None) -> "Generation":
        """Its help is made from the table of options, below."""
        line = expand_line(line, {**self.shell.user_ns, **(local_ns or {})})
        return self._ask("chat", CHAT, line, cell, self._submit_turn)

    @line_magic
    def llm(self, line: str) -> Any:
        """Its help is made from VERBS, below."""
        verb, _, rest = line.strip().partition(" ")
        if verb and verb not in VERBS:
            raise UsageError(f"Unknown verb {verb!r}; %llm help lists them: {', '.join(VERBS)}.")
        try:
            return getattr(self, f"_{verb or 'help'}")(rest.strip())
        except LLMKernelError as error:
            raise brief(error) from None

    def _ask(
        self,
        name: str,
        known: tuple[Option, ...],
        line: str,
        cell: str | None,
        submit: "Callable[[dict[str, Any], str, str], Generation]",
    ) -> "Generation":
        command = f"%{name}" if cell is None else f"%%{name}"
        options, rest = parse_line(line, known, command=command)
        if cell is not None and rest and not rest.startswith("#"):
            raise UsageError(f"{rest!r} stands after the options; the prompt goes into the lines below {command}.")
        raw = self.session.cells.raw if self.session.cells is not None else ""
        text = rest if cell is None else exact_body(raw, name, cell)
        output = options.pop("output", None)
        try:
            generation = submit(options, text, command)
        except LLMKernelError as error:
            raise brief(error) from None
        if output is not None:
            self.shell.user_ns[output] = generation
        self._say_what_is_not_awaited(generation, output)
        return generation

    def _submit(self, options: dict[str, Any], text: str, command: str) -> "Generation":
        interpolated = options.pop("interpolate", False)
        variable = options.pop("prompts", None)
        merged = self.session.settings.merged(resolve_words(options, self.shell.user_ns))
        rows: list[Prompt]
        if variable is not None:
            items = look_up("--prompts", variable, self.shell.user_ns)
            template = text if text.strip() else None
            names = self.shell.user_ns if interpolated else None
            rows = prompts_from(items, template, name=variable, variables=names)
        else:
            rows = [Prompt(self._prompt(text, command, interpolated))]
        return self._shown(lambda view: self.session.submit(rows, merged, view))

    def _submit_turn(self, options: dict[str, Any], text: str, command: str) -> "Generation":
        question = self._prompt(text, command, options.pop("interpolate", False))
        merged = self.session.settings.merged(resolve_words(options, self.shell.user_ns))
        cells = self.session.cells
        cell = Cell(cells.id, cells.serial) if cells is not None else Cell("", 0)
        return self._shown(lambda view: self.session.chats.ask(question, merged, view, cell))

    def _prompt(self, text: str, command: str, interpolated: bool) -> str:
        if not text.strip():
            where = f"into the lines below {command}" if command.startswith("%%") else f"after {command}"
            raise UsageError(f"The prompt is empty; write it {where}.")
        return interpolate(text, self.shell.user_ns) if interpolated else text

    def _shown(self, submit: "Callable[[Callable[[Generation], AnswerView | None]], Generation]") -> "Generation":
        """What `submit` makes, with a view in this cell; models that it loads are shown, too."""
        loaded = set(self.session.models)
        generation = submit(
            lambda made: answer_view(
                self.shell, made, patient=loaded.issuperset(slot.name for slot in made.slots), live=lambda: self.views
            )
        )
        for slot in generation.slots:
            if slot.name not in loaded:
                show_load(self.shell, slot, lambda: self.views, reason=", the default model")
        return generation

    def _say_what_is_not_awaited(self, generation: "Generation", output: str | None) -> None:
        name = output or "_"
        if not generation.options.get("background"):
            if not self.shell.autoawait:
                self._print(f"%autoawait is off, so the cell does not wait; {name} is the handle of the request.")
        elif is_terminal(self.shell):
            self._print(
                "In a terminal a background request only advances while a cell awaits something, its result say."
            )

    def _load(self, rest: str) -> Work:
        words = rest.split(maxsplit=1)
        if not words or words[0].startswith("-"):
            options, model = parse_line(rest, LOAD, command="%llm load")
        else:
            model, rest = words[0], words[1] if len(words) > 1 else ""
            options, extra = parse_line(rest, LOAD, command="%llm load")
            if extra:
                raise UsageError(f"%llm load takes one model, {extra!r} is one too many; --name NAME names it.")
        if not model:
            raise UsageError("Name a model: %llm load MODEL, for example %llm load smollm2.")
        name = options.pop("name", None)
        if options.pop("no_prefix_caching", False):
            options["enable_prefix_caching"] = False
        (model,) = split_words(model)
        known = self.session.models.get(name or model)
        fresh = known is None or known.state not in ("loading", "ready")
        work = self.session.load(model, name=name, **options)
        slot = self.session.models[name or EngineArgs.from_options(model).model]
        if fresh or slot.loading:
            show_load(self.shell, slot, lambda: self.views)
        else:
            self._print(f"{slot.name} is loaded already.")
        if not self.shell.autoawait:
            self._print("%autoawait is off, so the cell does not wait: the load goes on, %llm status follows it.")
        return work.mapped(lambda _llm: None)

    def _unload(self, rest: str) -> Work:
        options, name = parse_line(rest, UNLOAD, command="%llm unload")
        names = list(self.session.models) if options.get("all") else split_words(name)
        return self.session.unload(*names).mapped(self._tell_given_back)

    def _restart(self, rest: str) -> Work:
        names = split_words(rest)
        if len(names) > 1:
            raise UsageError("%llm restart takes one model.")
        work = self.session.restart(*names)
        show_load(self.shell, self.session.slot(*names, only=True), lambda: self.views, reason=" again")
        return work.mapped(lambda _llm: None)

    def _tell_given_back(self, given_back: dict[str, int]) -> None:
        for name, held in given_back.items():
            self._print(f"Unloaded {name}: {format_bytes(held)} given back.")

    def _status(self, rest: str) -> None:
        options, extra = parse_line(rest, STATUS, command="%llm status")
        if extra:
            raise UsageError(f"%llm status tells of every model; {extra!r} is no option of it.")
        self._print(status_text(self.session, verbose=options.get("verbose", False)))

    def _config(self, rest: str) -> None:
        changes = {}
        for word in split_words(rest):
            name, equals, text = word.partition("=")
            text = unquote(text)
            if not equals:
                raise UsageError(f"{word!r}: write NAME=VALUE, for example max_tokens=64; NAME= takes it back.")
            plain = name.lstrip("-").replace("-", "_")
            option = SETTINGS.get(plain)
            value: Any = None
            if text and option is not None:
                value = _truth(name, text) if not option.metavar else option.value(text)
                value = [value] if option.repeat else value
            changes[plain] = value
        self.session.settings.configure(changes)
        settings = self.session.settings
        shown = "\n".join(f"{name} = {value!r}" for name, value in sorted(settings.items()))
        self._print(shown or f"Nothing is set. Known: {', '.join(sorted(SETTINGS))}.")

    def _ps(self, _rest: str) -> "Work | None":
        from llmkernel.notebook.generation_table import generation_table  # lazy: see Session.start_load

        return self._print_when_asked(self.session.running(), lambda: generation_table(self.session.generations))

    def _stop(self, rest: str) -> None:
        options, id = parse_line(rest, STOP, command="%llm stop")
        running = self.session.running()
        if id:
            chosen = [self.session.generation(id)]
        elif options.get("all") or len(running) < 2:
            chosen = running
        else:
            raise UsageError(f"Several run ({', '.join(one.id for one in running)}); name one, or give --all.")
        stopped = [one.id for one in chosen if not one.done]
        for generation in chosen:
            generation.cancel()
        self._print(f"Stopped {', '.join(stopped)}." if stopped else "Nothing runs.")

    def _chat(self, rest: str) -> "Conversation | None":
        what, _, rest = rest.partition(" ")
        if what.startswith("-"):
            what, rest = "show", f"{what} {rest}"
        options, extra = parse_line(rest.strip(), TURNS, command="%llm chat")
        if extra or what not in ("", "show", "undo", "reset"):
            raise UsageError(f"{extra or what!r} is none of show, undo and reset.")
        conversation = self.session.chats.conversation(options.get("model"))
        if what in ("", "show"):
            return conversation
        count = conversation.reset() if what == "reset" else conversation.undo(options.get("turns", 1))
        turns = "1 turn" if count == 1 else f"{count} turns"
        left = "" if what == "reset" else f", {len(conversation)} left"
        self._print(f"{turns} of the chat with {conversation.model} taken back{left}.")
        return None

    def _show(self, rest: str) -> None:
        options, id = parse_line(rest, SHOW, command="%llm show")
        if id.endswith(" --view"):
            options, id = {"view": True}, id.removesuffix("--view").strip()
        if (stored := self.session.stored(id or None)) is not None:
            if self.session.journal is not None and stored.notebook != self.session.journal.notebook:
                when = time.strftime("%F %H:%M", time.localtime(stored.time))
                self._print(f"{stored.id} of another notebook, {when}:")
            stored.show()
            return
        if not self.session.generations and not id:
            raise UsageError("Nothing was asked yet; there is nothing to show.")
        generation = self.session.generation(id or None)
        generation.show(view=options.get("view", False) or not generation.done)

    def _trace(self, rest: str) -> "Work | None":
        from llmkernel.notebook.request_trace import trace_text  # lazy: see Session.start_load

        generation = self.session.generation(generation_id(rest) if rest else None)
        return self._print_when_asked([generation], lambda: trace_text(generation, rest))

    def _print_when_asked(self, generations: "Sequence[Generation]", tell: Callable[[], str]) -> "Work | None":
        """Print what `tell` says, when the engines have said where those requests stand that bring no tokens; at once
        where there is nobody to wait for that.
        """
        if not self.shell.autoawait:
            self._print(tell())
            return None

        async def ask() -> None:
            slots = {slot.name: slot for generation in generations if not generation.done for slot in generation.slots}
            await asyncio.gather(*(slot.queue.refresh(_PATIENCE) for slot in slots.values()))
            self._print(tell())

        task = asyncio.ensure_future(ask())
        return Work(task, self.session.cells, lambda: "nothing was changed.")

    def _dashboard(self, rest: str) -> "Dashboard | None":
        slot = self.session.slot(rest or None)
        if shows_widgets(self.shell):
            return self.views.dashboard(self.session, slot)
        self._print("No live views here; this is how it stands.")
        self._status("")
        return None

    def _logs(self, rest: str) -> None:
        name = ""
        if rest and not rest.startswith("-"):
            name, _, rest = rest.partition(" ")
        options, extra = parse_line(rest, LOGS, command="%llm logs")
        text = self.session.log_tail(name or extra or None, options.get("lines", 50))
        self._print(clean_text(text) or "The log is empty.")

    def _help(self, _rest: str) -> None:
        self._print(_LLM_HELP)

    def _print(self, text: str) -> None:
        print(text)  # noqa: T201 - the cell's output


def _truth(name: str, text: str) -> bool:
    if text.lower() in ("true", "on", "yes", "1"):
        return True
    if text.lower() in ("false", "off", "no", "0"):
        return False
    return _refuse_truth(name, text)


def _refuse_truth(name: str, text: str) -> NoReturn:
    raise UsageError(f"{name}={text}: write on or off.")


_GENERATE_HELP = f"""Ask the loaded model; the answer grows in the cell, which is done when the answer is.

    %%generate [options]          %generate [options] prompt
    the prompt, exactly as
    it is written

With no model loaded the default one is loaded. The result is a Generation: `_`, or the variable of -o, has
`.text`, `.outputs`, `.metrics`, `.cancel()`. Interrupt ends this cell's requests and keeps the text so far.

Options
{help_text(GENERATE)}

Defaults of most of them: %llm config. In quotes, \\n is a newline: --stop "\\n". A prompt that begins with a dash
goes after --. IPython replaces {{expression}} and $name in the line itself, never in the body, nor in --regex.
"""

_CHAT_HELP = f"""Go on talking with the loaded model: the cell is the next turn, what was said before goes with it.

    %%chat [options]              %chat [options] question
    the question

A cell that is run again asks its turn again; the turns after it are taken back. An answer that was stopped stays as far
as it came; one that failed is dropped with its question. %llm chat shows the conversation, undo and reset take it back.

Options
{help_text(CHAT)}
"""

_LLM_HELP = "\n".join(
    [
        "%llm VERB ...",
        *(f"  {verb:10}{words}" for verb, words in VERBS.items()),
        "",
        "Options of %llm load",
        help_text(LOAD),
    ]
)

LLMMagics.generate.__doc__ = _GENERATE_HELP
LLMMagics.chat.__doc__ = _CHAT_HELP
LLMMagics.llm.__doc__ = _LLM_HELP
