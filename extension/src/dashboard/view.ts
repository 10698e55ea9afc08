import type { DashboardDown, DashboardUp, EngineSample } from "../model";
import { h, setText } from "../shared/dom";
import { count } from "../shared/format";
import { Sequence } from "../shared/sequence";
import { Charts } from "./charts";
import { RequestTable } from "./table";
import { timeline } from "./timeline";

const KEPT_SAMPLES = 480;

export interface Door {
  send(message: DashboardUp): void;
  stop(ids: string[]): void;
}

/** What an engine does now: charts, requests with their reasons to wait, one request's way, the end of the log. */
export class DashboardView {
  readonly element = h("div", "llmk llmk-dashboard");
  private samples: EngineSample[] = [];
  private charts: Charts | undefined;
  private readonly title = h("b", "");
  private readonly status = h("span", "llmk-totals", { role: "status", "aria-live": "off" });
  private readonly table: RequestTable;
  private readonly trace = h("div", "llmk-trace");
  private readonly log = h("pre", "llmk-log");
  private readonly sequence: Sequence;
  private traced = "";

  constructor(private readonly door: Door) {
    this.sequence = new Sequence((have) => door.send({ t: "resync", have }));
    this.table = new RequestTable({ stop: (id) => door.stop([id]), trace: (id) => this.follow(id) });
    const log = h("details", "llmk-details", {}, h("summary", "", {}, "Engine log"), this.log);
    this.element.append(h("div", "llmk-bar", {}, this.title, this.status), this.table.element, this.trace, log);
  }

  /** Charts read their colours from the page: call when the element is in it. */
  mount(): void {
    this.charts = new Charts(this.element);
    this.element.insertBefore(this.charts.element, this.table.element);
  }

  receive(message: DashboardDown): void {
    if (message.t === "trace") {
      this.trace.replaceChildren(h("div", "llmk-dim", {}, `Request ${message.id}`), timeline(message));
      return;
    }
    if (message.t === "all") {
      this.sequence.snapshot(message.seq);
      this.samples = message.samples.slice(-KEPT_SAMPLES);
    } else {
      if (!this.sequence.accepts(message.seq)) return;
      this.samples.push(message.sample);
      if (this.samples.length > KEPT_SAMPLES) this.samples.shift();
    }
    this.table.update(message.rows, message.t === "all");
    if (message.rows.some((row) => row.id === this.traced)) this.door.send({ t: "trace", id: this.traced });
    this.charts?.draw(this.samples);
    this.log.textContent = message.log.join("\n");
    const last = this.samples.at(-1);
    const preempted = last?.preemptions ? ` · ${count(last.preemptions, "preemption")}` : "";
    setText(this.title, message.model);
    setText(this.status, `${message.engine_state}${preempted}`);
  }

  dispose(): void {
    this.charts?.dispose();
  }

  /** Show the way of this request, and go on doing so while it changes. */
  private follow(id: string): void {
    this.traced = id;
    this.table.select(id);
    this.door.send({ t: "trace", id });
  }
}
