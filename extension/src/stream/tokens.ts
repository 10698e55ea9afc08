import type { Alternative, TokenView } from "../model";
import { h } from "../shared/dom";

const VISIBLE_SPACES: Record<string, string> = { " ": "␣", "\n": "⏎", "\t": "⇥" };

function shown([id, text, , bytes]: Alternative): string {
  if (bytes) return bytes.map((byte) => `0x${byte.toString(16).padStart(2, "0")}`).join(" ");
  if (text === "") return `#${id}`;
  return text.replace(/[ \n\t]/g, (space) => VISIBLE_SPACES[space]!);
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

/** Each token tinted by its probability; hover or focus shows what else stood to choose. */
export class TokenList {
  readonly element = h("div", "llmk-tokens", { role: "list", "aria-label": "tokens with their probabilities" });
  private readonly panel = h("div", "llmk llmk-panel", { role: "tooltip", popover: "manual", hidden: "" });
  private readonly views: TokenView[] = [];

  constructor() {
    this.element.append(this.panel);
    for (const event of ["pointerover", "focusin"] as const) this.element.addEventListener(event, this.onEnter);
    for (const event of ["pointerleave", "focusout"] as const) this.element.addEventListener(event, this.onLeave);
  }

  append(views: TokenView[]): void {
    const added = document.createDocumentFragment();
    for (const view of views) {
      const [, text, logprob] = view.chosen;
      const token = h("span", "llmk-token", {
        role: "listitem",
        tabindex: "0",
        "data-index": String(this.views.length),
        "aria-label": `${shown(view.chosen)}, ${percent(logprob)}, rank ${view.rank}`,
      });
      token.textContent = text === "" || text === "\n" ? shown(view.chosen) : text;
      token.style.setProperty("--llmk-p", Math.exp(logprob).toFixed(3));
      added.append(token);
      if (text.includes("\n")) added.append(h("br", ""));
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

  private readonly onLeave = (): void => {
    if (!this.panel.hidden && this.panel.isConnected) this.panel.hidePopover?.();
    this.panel.hidden = true;
  };
}
