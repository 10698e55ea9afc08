import { ENDED, type Frame, type RowSnapshot, type Snapshot, type StreamDown, type StreamUp } from "../model";
import { button, h, setText } from "../shared/dom";
import { count } from "../shared/format";
import { Sequence } from "../shared/sequence";
import { FirstPaints } from "./first_paints";
import { Parts } from "./parts";
import { type Reading, Row } from "./row";
import { Visibility } from "./visibility";

const MANY = 2;
const WORDS: Record<Reading, string> = { plain: "Text", markdown: "Markdown", tokens: "Tokens" };

export interface Door {
  send(message: StreamUp): void;
  stop(ids: string[]): void;
  logprobs: boolean;
}

/** All requests of one cell: a single answer, or a grid of them, with the totals above. */
export class StreamView {
  readonly element = h("div", "llmk llmk-stream");
  private readonly name = Math.random().toString(36).slice(2);
  private rows: Row[] = [];
  private reading: Reading = "plain";
  private readonly grid = h("div", "llmk-grid");
  private readonly totals = h("span", "llmk-totals", { role: "status", "aria-live": "off" });
  private readonly stopAll: HTMLButtonElement;
  private readonly bar: HTMLElement;
  private readonly group: HTMLElement;
  private readonly switches: Map<Reading, HTMLButtonElement>;
  private readonly sequence: Sequence;
  private readonly parts: Parts;
  private visibility: Visibility;
  private readonly firstPaints: FirstPaints;
  private readonly pending: Frame[] = [];
  private painting = 0;

  constructor(private readonly door: Door) {
    this.parts = new Parts((want) => door.send(want));
    this.sequence = new Sequence((have) => door.send({ t: "resync", have }));
    this.visibility = this.watchRows();
    this.firstPaints = new FirstPaints((rows) => door.send({ t: "shown", rows }));
    this.stopAll = button("Stop all", "Stop every request of this cell", () => door.stop(this.alive()));
    const readings: Reading[] = door.logprobs ? ["plain", "markdown", "tokens"] : ["plain", "markdown"];
    this.switches = new Map(
      readings.map((reading) => [reading, button(WORDS[reading], `Show as ${WORDS[reading]}`, () => this.read(reading))]),
    );
    this.group = h("span", "llmk-switch", { role: "group", "aria-label": "reading" }, ...this.switches.values());
    this.bar = h("div", "llmk-bar", {}, this.totals, this.group, this.stopAll);
    this.element.append(this.bar, this.grid);
    this.read("plain");
  }

  receive(message: StreamDown): void {
    if (message.t === "part") {
      this.parts.receive(message);
    } else if (message.t === "snapshot") {
      this.sequence.snapshot(message.seq);
      this.pending.length = 0;
      this.show(message);
      this.visibility.repeat();
    } else if (!this.sequence.accepts(message.seq)) {
      return;
    } else {
      this.pending.push(message);
      this.painting ||= requestAnimationFrame(this.paint);
    }
  }

  show(snapshot: Snapshot): void {
    if (snapshot.rows.length !== this.rows.length) this.build(snapshot.rows);
    snapshot.rows.forEach((row, index) => {
      this.rows[index]!.replace(row);
      if (row.text) this.firstPaints.drawn(index);
    });
    this.total();
  }

  dispose(): void {
    cancelAnimationFrame(this.painting);
    this.visibility.dispose();
    this.firstPaints.dispose();
    this.parts.dispose();
    this.door.send({ t: "visible", view: this.name, rows: [] });
    for (const row of this.rows) row.dispose();
  }

  private watchRows(): Visibility {
    return new Visibility((rows) => this.door.send({ t: "visible", view: this.name, rows }));
  }

  private build(snapshots: RowSnapshot[]): void {
    this.visibility.dispose();
    this.visibility = this.watchRows();
    for (const row of this.rows) row.dispose();
    this.rows = snapshots.map(() => new Row((id) => this.door.stop([id]), () => this.parts.markdown()));
    this.rows.forEach((row, index) => {
      row.read(this.reading);
      this.visibility.watch(row.element, index);
    });
    const many = snapshots.length >= MANY;
    this.element.classList.toggle("llmk-many", many);
    this.bar.hidden = !many;
    if (many) this.bar.insertBefore(this.group, this.stopAll);
    else this.rows[0]?.hold(this.group);
    this.grid.replaceChildren(...this.rows.map((row) => row.element));
  }

  private readonly paint = (): void => {
    cancelAnimationFrame(this.painting);
    this.painting = 0;
    const texts = new Map<number, string>();
    for (const frame of this.pending) {
      for (const [index, text] of frame.d ?? []) texts.set(index, (texts.get(index) ?? "") + text);
      for (const [index, views] of frame.k ?? []) this.rows[index]?.appendTokens(views);
      for (const [index, counters] of frame.c ?? []) this.rows[index]?.count(counters);
    }
    this.pending.length = 0;
    for (const [index, text] of texts) {
      this.rows[index]?.append(text);
      this.firstPaints.drawn(index);
    }
    this.total();
  };

  private read(reading: Reading): void {
    this.reading = reading;
    for (const [name, element] of this.switches) element.setAttribute("aria-pressed", String(name === reading));
    for (const row of this.rows) row.read(reading);
  }

  private alive(): string[] {
    return this.rows.filter((row) => !row.counters.state || !ENDED.has(row.counters.state)).map((row) => row.id);
  }

  private total(): void {
    const alive = this.alive().length;
    const tokens = this.rows.reduce((sum, row) => sum + (row.counters.tokens ?? 0), 0);
    const rate = this.rows.reduce(
      (sum, row) => sum + (row.counters.state === "decoding" ? (row.counters.rate ?? 0) : 0),
      0,
    );
    const parts = [count(this.rows.length, "request")];
    if (alive && this.rows.length > 1) parts.push(`${alive} running`);
    parts.push(count(tokens, "token"));
    if (rate) parts.push(`${rate.toFixed(1)} tok/s`);
    setText(this.totals, parts.join(" · "));
    this.stopAll.hidden = alive < MANY;
  }
}
