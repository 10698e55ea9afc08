import { type Counters, ENDED, type RowSnapshot, type TokenView } from "../model";
import { button, h, setText } from "../shared/dom";
import { Follow } from "../shared/follow";
import { stateWord, summary } from "../shared/format";
import type { MarkdownPart } from "./parts";
import { TokenList } from "./tokens";

export type Reading = "plain" | "markdown" | "tokens";

/** One request on screen: its text, its counters, Stop and Copy. */
export class Row {
  readonly element: HTMLElement;
  readonly counters: Counters = {};
  id = "";
  private text = "";
  private reading: Reading = "plain";
  private stale = false;
  private part: MarkdownPart | undefined;
  private readonly textNode = document.createTextNode("");
  private readonly plain = h("div", "llmk-plain", {}, this.textNode);
  private readonly markdown = h("div", "llmk-markdown");
  private readonly tokens = new TokenList();
  private readonly body = h("div", "llmk-body", { tabindex: "0", role: "region" });
  private readonly label = h("span", "llmk-label");
  private readonly state = h("span", "llmk-state");
  private readonly numbers = h("span", "llmk-numbers");
  private readonly note = h("div", "llmk-note");
  private readonly follow = new Follow(this.body);
  private readonly stopButton: HTMLButtonElement;
  private readonly head: HTMLElement;

  constructor(
    onStop: (id: string) => void,
    private readonly loadMarkdown: () => Promise<MarkdownPart>,
  ) {
    this.stopButton = button("Stop", "Stop this request", () => onStop(this.id));
    const copy = button("Copy", "Copy the text of this answer", () => void navigator.clipboard.writeText(this.text));
    this.body.append(this.plain);
    this.head = h("header", "llmk-head", {}, this.label, this.state, this.numbers, this.stopButton, copy);
    this.element = h("section", "llmk-row", {}, this.head, this.body, this.note);
  }

  /** Put `tools` into the header, before Stop. */
  hold(tools: HTMLElement): void {
    this.head.insertBefore(tools, this.stopButton);
  }

  /** Show all of `row`, whatever stood here before. */
  replace(row: RowSnapshot): void {
    this.id = row.id;
    this.text = row.text;
    this.textNode.data = row.text;
    setText(this.label, row.label);
    this.body.setAttribute("aria-label", row.label || "answer");
    this.tokens.clear();
    if (row.token_views) this.tokens.append(row.token_views);
    const { text: _text, token_views: _views, label: _label, id: _id, ...counters } = row;
    for (const name of Object.keys(this.counters)) delete this.counters[name as keyof Counters];
    this.count(counters);
    this.stale = true;
    this.draw();
  }

  append(text: string): void {
    this.text += text;
    this.textNode.appendData(text);
    this.stale = true;
    this.draw();
  }

  appendTokens(views: TokenView[]): void {
    this.tokens.append(views);
    this.follow.grown();
  }

  count(counters: Counters): void {
    Object.assign(this.counters, counters);
    const { state, note, error } = this.counters;
    if (state) {
      this.element.dataset.state = state;
      setText(this.state, stateWord(state));
      this.stopButton.hidden = ENDED.has(state);
    }
    setText(this.numbers, summary(this.counters));
    this.numbers.title = this.numbers.textContent ?? "";
    setText(this.note, error ?? (state && ENDED.has(state) ? "" : (note ?? "")));
    this.note.hidden = this.note.textContent === "";
  }

  read(reading: Reading): void {
    if (reading === this.reading) return;
    this.reading = reading;
    this.stale = true;
    if (reading === "markdown" && !this.part) {
      void this.loadMarkdown().then((part) => {
        this.part = part;
        this.showReading();
      });
    } else this.showReading();
  }

  dispose(): void {
    this.follow.dispose();
  }

  /** The text stays until the Markdown part is there. */
  private showReading(): void {
    const reading = this.reading === "markdown" && !this.part ? "plain" : this.reading;
    this.body.replaceChildren({ plain: this.plain, markdown: this.markdown, tokens: this.tokens.element }[reading]);
    this.draw();
  }

  private draw(): void {
    if (this.reading === "markdown" && this.stale && this.part) {
      this.part.renderMarkdown(this.markdown, this.text);
      this.stale = false;
    }
    this.follow.grown();
  }
}
