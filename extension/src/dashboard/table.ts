import { ENDED, type RequestRow } from "../model";
import { button, h, setText } from "../shared/dom";
import { seconds, stateWord } from "../shared/format";

const ROW_HEIGHT = 24;
const OVERSCAN = 6;

interface Column {
  title: string;
  name: string;
  text: (row: RequestRow) => string;
}

const number = (value: number | undefined): string => (value ? value.toLocaleString("en") : "");
const time = (value: number | undefined): string => (value === undefined ? "" : seconds(value));

const COLUMNS: Column[] = [
  { title: "Id", name: "id", text: (row) => row.id },
  { title: "Cell", name: "cell-number", text: (row) => (row.cell ? `[${row.cell}]` : "") },
  { title: "State", name: "state", text: (row) => (row.position ? `${stateWord("queued")} #${row.position}` : stateWord(row.state)) },
  { title: "Prompt", name: "number", text: (row) => number(row.prompt_tokens) },
  { title: "Cached", name: "number", text: (row) => number(row.cached_tokens) },
  { title: "Why", name: "why", text: (row) => row.error ?? (ENDED.has(row.state) ? (row.finish_reason ?? "") : (row.note ?? "")) },
  { title: "Tokens", name: "number", text: (row) => number(row.tokens) },
  { title: "First", name: "number", text: (row) => time(row.ttft) },
  { title: "Between", name: "number", text: (row) => time(row.itl) },
  { title: "Tok/s", name: "number", text: (row) => row.rate?.toFixed(1) ?? "" },
  { title: "Preempt", name: "number", text: (row) => number(row.preemptions) },
];

const WHY = COLUMNS.findIndex((column) => column.name === "why");

export interface TableDoor {
  stop(id: string): void;
  trace(id: string): void;
}

/** Live and recent requests. Only the rows in sight exist in the page, so a thousand cost what twenty do. */
export class RequestTable {
  readonly element = h("div", "llmk-table", { role: "table", "aria-label": "requests", tabindex: "0" });
  private readonly rows = new Map<string, RequestRow>();
  private order: string[] = [];
  private selected = "";
  private readonly space = h("div", "llmk-space", { role: "rowgroup" });
  private readonly shown: HTMLElement[] = [];

  constructor(private readonly door: TableDoor) {
    const heads = COLUMNS.map((column) => h("span", `llmk-cell llmk-${column.name}`, { role: "columnheader" }, column.title));
    this.element.append(h("div", "llmk-tr llmk-th", { role: "row" }, ...heads, h("span", "llmk-cell")), this.space);
    this.element.addEventListener("scroll", this.draw, { passive: true });
  }

  update(rows: RequestRow[], all: boolean): void {
    if (all) this.rows.clear();
    for (const row of rows) this.rows.set(row.id, { ...this.rows.get(row.id), ...row });
    // Live ones first; of the ended ones the newest first: a Map keeps the order of arrival.
    const ids = [...this.rows.keys()].reverse();
    const live = (id: string): boolean => !ENDED.has(this.rows.get(id)!.state);
    this.order = [...ids.filter(live), ...ids.filter((id) => !live(id))];
    this.space.style.height = `${this.order.length * ROW_HEIGHT}px`;
    this.draw();
  }

  /** Mark the row of this request. */
  select(id: string): void {
    this.selected = id;
    this.draw();
  }

  private readonly draw = (): void => {
    const first = Math.max(0, Math.floor(this.element.scrollTop / ROW_HEIGHT) - OVERSCAN);
    const room = Math.ceil((this.element.clientHeight || 300) / ROW_HEIGHT) + 2 * OVERSCAN;
    const visible = this.order.slice(first, first + room);
    while (this.shown.length < visible.length) this.shown.push(this.makeRow());
    this.shown.forEach((element, offset) => {
      const id = visible[offset];
      element.hidden = id === undefined;
      if (id !== undefined) this.fillRow(element, this.rows.get(id)!, first + offset);
    });
  };

  private makeRow(): HTMLElement {
    const element = h("div", "llmk-tr", { role: "row" });
    for (const column of COLUMNS) element.append(h("span", `llmk-cell llmk-${column.name}`, { role: "cell" }));
    const id = (): string => element.dataset.id!;
    const actions = h(
      "span",
      "llmk-cell llmk-actions",
      { role: "cell" },
      button("Trace", "Show the way of this request", () => this.door.trace(id())),
      button("Stop", "Stop this request", () => this.door.stop(id())),
    );
    actions.addEventListener("click", (event) => event.stopPropagation());
    element.append(actions);
    element.addEventListener("click", () => this.door.trace(id()));
    this.space.append(element);
    return element;
  }

  private fillRow(element: HTMLElement, row: RequestRow, index: number): void {
    element.dataset.id = row.id;
    element.dataset.state = row.state;
    element.setAttribute("aria-selected", String(row.id === this.selected));
    element.style.transform = `translateY(${index * ROW_HEIGHT}px)`;
    COLUMNS.forEach((column, at) => setText(element.children[at]!, column.text(row)));
    const why = element.children[WHY] as HTMLElement;
    why.title = why.textContent ?? "";
    const stop = element.lastElementChild!.lastElementChild as HTMLButtonElement;
    stop.hidden = ENDED.has(row.state);
    element.title = row.prompt ?? "";
  }
}
