import type { Alternative, TokenView } from "../model";
import { h } from "../shared/dom";

const MARKS: Record<string, string> = { " ": "␣", "\n": "⏎", "\t": "⇥" };
const CONTROL_PICTURES = 0x2400;

function mark(letter: string): string {
  return MARKS[letter] ?? String.fromCharCode(CONTROL_PICTURES + letter.charCodeAt(0));
}

/** An alternative in a list: every letter of it is seen, bytes where it is a part of a character. */
function shown([id, text, , bytes]: Alternative): string {
  const seen = text.replace(/[\x00-\x20]/g, mark);
  if (!bytes) return seen || `#${id}`;
  const spelled = bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
  return `${seen} <${spelled}>`.trim();
}

/** A token in its text, where lines break and spaces are spaces. */
function running(token: Alternative): string {
  const [, text, , bytes] = token;
  if (text === "") return bytes ? "·" : shown(token);
  return text.replace(/[\x00-\x1f]/g, (letter) => (letter === "\n" ? "⏎\n" : letter === "\t" ? letter : mark(letter)));
}

function percent(logprob: number): string {
  const share = Math.exp(logprob) * 100;
  return share >= 0.1 ? `${share.toFixed(1)} %` : share.toExponential(1) + " %";
}

const GAP = 3;

/** The alternatives at one position, as a small table. */
function alternatives(view: TokenView): HTMLElement {
  const table = h("table", "llmk-alternatives");
  for (const alternative of view.top) {
    const chosen = alternative[0] === view.chosen[0];
    table.append(
      h(
        "tr",
        chosen ? "llmk-chosen" : "",
        {},
        h("td", "llmk-token-text", {}, shown(alternative)),
        h("td", "llmk-number", {}, percent(alternative[2])),
        h("td", "llmk-number llmk-dim", {}, String(alternative[0])),
      ),
    );
  }
  return table;
}

/**
 * Each token tinted by its probability; hover or focus shows what else stood to choose. One stop of the Tab key: the
 * arrow keys, Home and End go from token to token.
 */
export class TokenList {
  readonly element = h("div", "llmk-tokens", {
    role: "list",
    "aria-label": "tokens with their probabilities",
    "data-lm-suppress-shortcuts": "true", // else the notebook takes the arrow keys
  });
  private readonly panel = h("div", "llmk llmk-panel", { role: "tooltip", popover: "manual", hidden: "" });
  private readonly views: TokenView[] = [];

  constructor() {
    this.element.append(this.panel);
    for (const event of ["pointerover", "focusin"] as const) this.element.addEventListener(event, this.onEnter);
    for (const event of ["pointerleave", "focusout"] as const) this.element.addEventListener(event, this.onLeave);
    this.element.addEventListener("keydown", this.onKey);
  }

  append(views: TokenView[]): void {
    const added = document.createDocumentFragment();
    for (const view of views) {
      const [, , logprob] = view.chosen;
      const token = h("span", "llmk-token", {
        role: "listitem",
        tabindex: this.views.length === 0 ? "0" : "-1",
        "data-index": String(this.views.length),
        "aria-label": `${shown(view.chosen)}, ${percent(logprob)}, rank ${view.rank}`,
      });
      token.textContent = running(view.chosen);
      token.style.setProperty("--llmk-p", Math.exp(logprob).toFixed(3));
      added.append(token);
      this.views.push(view);
    }
    this.element.insertBefore(added, this.panel);
  }

  clear(): void {
    this.views.length = 0;
    this.element.replaceChildren(this.panel);
    this.onLeave();
  }

  private readonly onEnter = (event: Event): void => {
    const token = event.target instanceof HTMLElement ? event.target.closest<HTMLElement>(".llmk-token") : null;
    const view = token ? this.views[Number(token.dataset.index)] : undefined;
    if (!token || !view) return;
    this.panel.replaceChildren(alternatives(view), h("div", "llmk-dim", {}, `rank ${view.rank} · id ${view.chosen[0]}`));
    this.panel.hidden = false;
    this.panel.showPopover?.(); // above everything: no scrolling box cuts it off
    const { left, bottom, top } = token.getBoundingClientRect();
    const { offsetWidth, offsetHeight } = this.panel;
    const below = bottom + GAP + offsetHeight <= window.innerHeight;
    this.panel.style.left = `${Math.max(0, Math.min(left, window.innerWidth - offsetWidth - GAP))}px`;
    this.panel.style.top = `${below ? bottom + GAP : top - GAP - offsetHeight}px`;
  };

  private readonly onKey = (event: KeyboardEvent): void => {
    const from = (event.target as HTMLElement).closest<HTMLElement>(".llmk-token");
    const last = this.views.length - 1;
    if (!from) return;
    if (event.key === "Escape") return this.onLeave();
    const at = Number(from.dataset.index);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const next = this.element.querySelector<HTMLElement>(`[data-index="${Math.max(0, Math.min(last, to))}"]`)!;
    from.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  };

  private readonly onLeave = (): void => {
    if (!this.panel.hidden && this.panel.isConnected) this.panel.hidePopover?.();
    this.panel.hidden = true;
  };
}
