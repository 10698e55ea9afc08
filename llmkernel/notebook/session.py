"""Session: the models that a notebook has loaded, and what it has asked them. The magics are a thin skin over it."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmkernel.config import DEFAULT_MODEL, EngineArgs, format_bytes
from llmkernel.errors import EngineDeadError, InvalidRequestError
from llmkernel.notebook.brief_errors import brief
from llmkernel.notebook.cells import Cells
from llmkernel.notebook.chats import Chats
from llmkernel.notebook.prompts import Prompt
from llmkernel.notebook.settings import Settings, completed
from llmkernel.notebook.work import Work

if TYPE_CHECKING:
    from llmkernel.client.keep_alive import KeepAlive
    from llmkernel.client.kept_engines import KeptEngine
    from llmkernel.notebook.generation import AnswerView, Generation
    from llmkernel.notebook.journal import Journal, JournalEntry
    from llmkernel.notebook.kernel_life import KernelLife
    from llmkernel.notebook.model_slot import ModelSlot

__all__ = ["Session"]

REMEMBERED = 64
"""Generations that `%llm show` and `%llm ps` still know."""


class Session:
    """Models by name, the default among them, the settings of `%llm config`, and the newest generations.

    All of it belongs to the event loop on which the first model was loaded. `close` (or `with`) ends every engine.
    models: name -> ModelSlot (`.llm` is the AsyncLLM). default: name of the model loaded last. settings: see Settings.
    generations: the newest 64. chats: the conversations. Session.current is the one of `%load_ext`, if there is one.
    auto_restart: see ModelSlot; for models that are loaded from now on. open_view: shows a generation as a live view in
    the cell that runs, False where that cannot be; None without a shell.
    """

    current: "Session | None" = None

    def __init__(
        self,
        cells: Cells | None = None,
        *,
        auto_restart: bool = False,
        journal: "Journal | None" = None,
        life: "KernelLife | None" = None,
    ) -> None:
        """`cells`: those of the shell that the session belongs to, None in a script. `journal`: keeps answers. `life`:
        of the kernel, for keep_alive; None in a script, where that is refused: the next run would not find its engine.
        """
        self.auto_restart = auto_restart
        self.journal = journal
        self.open_view: Callable[[Generation], bool] | None = None
        self.models: dict[str, ModelSlot] = {}
        self.default: str | None = None
        self._failed: ModelSlot | None = None
        self.life = life
        self.settings = Settings()
        self.generations: deque[Generation] = deque(maxlen=REMEMBERED)
        self.chats = Chats(self)
        self.cells = cells
        self._count = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def load(
        self,
        model: str = DEFAULT_MODEL,
        *,
        name: str | None = None,
        executor_class: str | None = None,
        auto_restart: bool | None = None,
        **options: Any,
    ) -> Work:
        """Start to load `model`; await the result for its AsyncLLM. options: those of EngineArgs.

        The model becomes the default. Loading what is loaded already gives what is there. executor_class: see AsyncLLM.
        auto_restart: see ModelSlot; None = what the session says.
        """
        args = EngineArgs.from_options(model, **options)
        slot = self.start_load(args, name or args.model, executor_class, auto_restart)
        slot.auto_restart = slot.auto_restart if auto_restart is None else auto_restart
        return self._loading(slot)

    def restart(self, name: str | None = None) -> Work:
        """End the engine of a model, dead, stuck or well, and load it anew; await the result for its AsyncLLM.

        The ModelSlot and the AsyncLLM stay the same objects. What the engine works on fails and says so, its text so
        far kept. name: may be left out where one model is loaded.
        """
        slot = self.slot(name, only=True)
        if slot.loading:
            raise brief(InvalidRequestError(f"{slot.name} is still loading; wait for it, or %llm unload {slot.name}."))
        lost = EngineDeadError(f"{slot.name} was restarted before this was finished; ask again.")
        for generation in self.running():
            generation.fail_at(slot, lost)
        slot.restart()
        return self._loading(slot)

    def _loading(self, slot: "ModelSlot") -> Work:
        task = asyncio.ensure_future(slot.ready())
        task.set_name(f"llmkernel-load-{slot.name}")
        return Work(task, self.cells, lambda: self._end_load(slot))

    def start_load(
        self, args: EngineArgs, name: str, executor_class: str | None = None, auto_restart: bool | None = None
    ) -> "ModelSlot":
        """The slot called `name`: the one that is there if it was loaded with the same `args`, else a new one."""
        slot = self.models.get(name)
        if slot is not None and slot.state in ("loading", "ready"):
            if slot.args != args:
                raise brief(
                    InvalidRequestError(
                        f"{name} is loaded with other options; %llm unload {name} first, or give the new one a --name."
                    )
                )
        else:
            if slot is not None:
                slot.shutdown()
            # lazy: numpy, tokenizers and jinja2 take 0.13 s that %load_ext need not take
            from llmkernel.notebook.model_slot import ModelSlot

            restarts = self.auto_restart if auto_restart is None else auto_restart
            keep = self.life.keep(name, auto_restart=restarts) if self.life and args.keep_alive is not None else None
            slot = ModelSlot(name, args, executor_class, auto_restart=restarts, keep=keep)
            self._add(slot)
        self.default = name
        return slot

    def adopt(self, kept: "KeptEngine", keep: "KeepAlive") -> "ModelSlot":
        """Take up an engine that this kernel has left when it was restarted or died; the slot it has from now on.

        keep: with the name that it had. EngineDeadError if it has just ended.
        """
        from llmkernel.notebook.model_slot import ModelSlot  # lazy: see start_load

        args, executor_class = kept.init.engine_args, kept.init.executor_class
        restarts = keep.auto_restart
        slot = ModelSlot(keep.name, args, executor_class, auto_restart=restarts, engine=kept.engine, keep=keep)
        self._add(slot)
        self.default = slot.name
        return slot

    def give_up_leases(self) -> None:
        """This kernel will not come back: its engines end with it, keep_alive or not. From any thread."""
        for slot in list(self.models.values()):
            slot.give_up_lease()

    def _add(self, slot: "ModelSlot") -> None:
        self.models[slot.name] = slot
        slot.listeners.append(lambda: self._forget_failed(slot))

    def unload(self, *names: str) -> Work:
        """End engines (without a name the only one); await the result for the bytes given back, by name."""
        slots = [self.slot(name) for name in names] or [self.slot(None, only=True)]
        for slot in slots:
            self._remove(slot)
        task = asyncio.ensure_future(_shut_down(slots))
        task.set_name(f"llmkernel-unload-{'-'.join(slot.name for slot in slots)}")
        return Work(task, self.cells, lambda: "the unloading goes on.")

    def slot(self, name: str | None = None, *, only: bool = False) -> "ModelSlot":
        """The model called `name`, or the default one. only: without a name there must not be several."""
        if name is not None:
            if name not in self.models:
                loaded = f"loaded: {', '.join(self.models)}" if self.models else "nothing is loaded"
                raise brief(
                    InvalidRequestError(
                        f"No model is called {name!r} ({loaded}); %llm load MODEL --name {name}.", parameter="model"
                    )
                )
            return self.models[name]
        if not self.models:
            raise brief(InvalidRequestError("No model is loaded; %llm load MODEL loads one."))
        if only and len(self.models) > 1:
            raise brief(InvalidRequestError(f"Several models are loaded; name one of {', '.join(self.models)}."))
        return self.models[self.default or next(iter(self.models))]

    def generate(self, prompts: str | Prompt | Sequence[str | Prompt], **options: Any) -> "Generation":
        """Submit one request per prompt; a handle at once. options: those of `%%generate`, with underscores.

        With no model loaded the default one is loaded.
        """
        return self.submit(prompts, self.settings.merged(options))

    def chat(self, question: str, **options: Any) -> "Generation":
        """The next turn of the conversation with a model; a handle at once. options: those of `%%chat`.

        `chats.conversation()` has what was said, `undo` and `reset`.
        """
        for name, plain in (("n", 1), ("raw", False)):
            if options.get(name) is not None and options[name] != plain:
                raise brief(InvalidRequestError(f"A chat has one answer a turn, by its template; leave {name} out."))
        return self.chats.ask(question, self.settings.merged(options))

    def submit(
        self,
        prompts: str | Prompt | Sequence[str | Prompt],
        options: Mapping[str, Any],
        view: "Callable[[Generation], AnswerView | None] | None" = None,
    ) -> "Generation":
        """As `generate`, with settings that are merged already and something that shows the answer."""
        rows = [prompts] if isinstance(prompts, str | Prompt) else list(prompts)
        made = [row if isinstance(row, Prompt) else Prompt(row) for row in rows]
        if not made:
            raise brief(InvalidRequestError("There is no prompt; give at least one.", parameter="prompt"))
        if len(made) == 1 and not made[0].text and made[0].error is None:
            raise brief(InvalidRequestError("The prompt is empty; write one.", parameter="prompt"))
        options = completed(options)  # mistakes are told before anything is loaded
        slots = self._slots(options.get("model"))
        from llmkernel.notebook.generation import Generation  # lazy: see start_load

        with contextlib.suppress(RuntimeError):  # no loop runs here: nothing starts before it is awaited
            self._loop = asyncio.get_running_loop()
        self._count += 1
        generation = Generation(f"g{self._count}", slots, made, options, cells=self.cells, view=view)
        generation.resubmit = self.rerun
        generation.open_view = self.open_view
        if self.journal is not None:
            generation.on_end.append(self.journal.add)
        self.generations.append(generation)
        return generation

    def rerun(self, generation: "Generation") -> "Generation":
        """See Generation.rerun."""
        names = [slot.name for slot in generation.slots]
        return self.submit(generation.sent_prompts(), {**generation.options, "model": names})

    def slot_or_default(self, name: str | None = None) -> "ModelSlot":
        """As `slot`; with nothing loaded and no name, the default model is loaded."""
        if name is None and not self.models:
            return self.start_load(EngineArgs(model=DEFAULT_MODEL), DEFAULT_MODEL)
        return self.slot(name)

    def stop_requests(self, ids: Sequence[str]) -> None:
        """End these requests, whatever they are at; what they have brought stays. From any thread.

        The engines hear of it at once, over their control channels; the answers end when the loop turns.
        """
        for slot in list(self.models.values()):
            if slot.facts is not None:
                slot.llm.stop_requests(ids)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop_unsent, list(ids))

    def cancel_load(self, name: str) -> None:
        """End the load of a model, as Interrupt of its cell does. From any thread: the engine process ends at once, the
        rest is told when the loop turns.
        """
        slot = self.models.get(name)
        if slot is not None and slot.loading:
            slot.shutdown()
            slot.loop.call_soon_threadsafe(self._forget_ended, slot)

    def _forget_ended(self, slot: "ModelSlot") -> None:
        self._remove(slot)
        slot.tell()

    def _stop_unsent(self, ids: list[str]) -> None:
        for generation in self.running():
            generation.stop_unsent(ids)

    def _slots(self, names: str | Sequence[str] | None) -> "list[ModelSlot]":
        """The models that an option names, each once; the default one without a name."""
        if names is None:
            return [self.slot_or_default()]
        return [self.slot_or_default(name) for name in dict.fromkeys([names] if isinstance(names, str) else names)]

    def running(self) -> "list[Generation]":
        """Generations that have not ended, oldest first."""
        return [generation for generation in self.generations if not generation.done]

    def generation(self, id: str | None = None) -> "Generation":
        """The generation called `id`, or the newest."""
        found = [one for one in self.generations if id is None or one.id == id]
        if not found:
            known = ", ".join(one.id for one in self.generations) or "none yet"
            raise brief(InvalidRequestError(f"No generation is called {id!r} (known: {known})."))
        return found[-1]

    def stored(self, id: str | None = None) -> "JournalEntry | None":
        """What the journal has of a generation that is not remembered here: `id`, or this notebook's newest."""
        known = any(id is None or one.id == id for one in self.generations)
        return None if known or self.journal is None else self.journal.find(id)

    def log_tail(self, name: str | None = None, lines: int = 50) -> str:
        """The last lines of an engine's log; of the load that failed last, if it has the name or no model is loaded."""
        failed = self._failed
        if failed is not None and name not in self.models and (name == failed.name or (not name and not self.models)):
            slot = failed
        else:
            slot = self.slot(name, only=True)
        return str(slot.process.log_tail(lines)) if slot.process is not None else ""

    def close(self) -> dict[str, int]:
        """Abort what runs and end every engine; idempotent. Bytes given back, by name."""
        slots = list(self.models.values())
        for slot in slots:
            self._remove(slot)
        return {slot.name: slot.shutdown() for slot in slots}

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session: {', '.join(map(repr, self.models.values())) or 'no model'}>"

    def _cancel_generations(self, slot: "ModelSlot") -> None:
        for generation in self.running():
            generation.cancel(slot)

    def _remove(self, slot: "ModelSlot") -> None:
        self._cancel_generations(slot)
        slot.cancel_load()
        self._drop(slot)

    def _drop(self, slot: "ModelSlot") -> None:
        if self.models.get(slot.name) is slot:
            del self.models[slot.name]
        if self.default == slot.name:
            self.default = next(reversed(self.models), None)

    def _forget_failed(self, slot: "ModelSlot") -> None:
        if slot.state == "failed":
            self._failed = slot
            self._drop(slot)

    def _end_load(self, slot: "ModelSlot") -> str:
        """Interrupt of a load ends the engine process and frees everything."""
        if not slot.loading:
            return f"{slot.name} is loaded."
        given_back = slot.shutdown()
        self._forget_ended(slot)
        return f"the load of {slot.name} was ended, {format_bytes(given_back)} given back."


async def _shut_down(slots: "Sequence[ModelSlot]") -> dict[str, int]:
    given_back = await asyncio.gather(*(asyncio.to_thread(slot.shutdown) for slot in slots))
    return {slot.name: held for slot, held in zip(slots, given_back, strict=True)}
