import uPlot from "uplot";
import type { EngineSample } from "../model";
import { h } from "../shared/dom";
import { bytes, percent, seconds } from "../shared/format";

interface Line {
  label: string;
  color: string;
  value: (sample: EngineSample) => number;
}

interface ChartKind {
  title: string;
  lines: Line[];
  show: (value: number) => string;
  /** What the axis reaches at least, so that little looks like little. */
  reach: number;
}

const plain = (value: number): string => (value >= 100 ? value.toFixed(0) : value.toFixed(1).replace(/\.0$/, ""));
const A = "--llmk-accent";
const B = "--llmk-second";

/** What the dashboard plots over time; a new figure is a new entry here. */
const KINDS: ChartKind[] = [
  {
    title: "Requests",
    reach: 4,
    show: plain,
    lines: [
      { label: "running", color: A, value: (s) => s.running },
      { label: "waiting", color: B, value: (s) => s.waiting },
    ],
  },
  {
    title: "Tokens per second",
    reach: 10,
    show: plain,
    lines: [
      { label: "out", color: A, value: (s) => s.tokens_out },
      { label: "in", color: B, value: (s) => s.tokens_in },
    ],
  },
  {
    title: "KV cache",
    reach: 1,
    show: percent,
    lines: [
      { label: "used", color: A, value: (s) => s.kv_usage },
      { label: "hits", color: B, value: (s) => s.hit_rate },
    ],
  },
  { title: "Step", reach: 0.001, show: seconds, lines: [{ label: "time", color: A, value: (s) => s.step_time }] },
  { title: "Memory", reach: 1, show: bytes, lines: [{ label: "engine", color: A, value: (s) => s.memory }] },
  {
    title: "Cores",
    reach: 1,
    show: plain,
    lines: [
      { label: "used", color: A, value: (s) => s.cpu },
      { label: "threads", color: B, value: (s) => s.threads },
    ],
  },
];

const HEIGHT = 90;
const MIN_WIDTH = 160;

/** One small chart per kind, over the samples it is given. */
export class Charts {
  readonly element = h("div", "llmk-charts");
  private readonly plots: { kind: ChartKind; box: HTMLElement; figure: HTMLElement; plot: uPlot }[];
  private readonly resizer = new ResizeObserver(() => this.resize());

  constructor(styleOf: Element) {
    // Asked at every draw: the style sheet may come after the element, and the theme may change.
    const color = (name: string): string => getComputedStyle(styleOf).getPropertyValue(name).trim() || "#0969da";
    this.plots = KINDS.map((kind) => {
      const figure = h("span", "llmk-figure");
      const box = h("figure", "llmk-chart", {}, h("figcaption", "", {}, h("b", "", {}, kind.title), figure));
      this.element.append(box);
      const options: uPlot.Options = {
        width: MIN_WIDTH,
        height: HEIGHT,
        legend: { show: false },
        cursor: { show: false },
        scales: { x: { time: false }, y: { range: (_u, _min, max) => [0, Math.max(max * 1.15, kind.reach)] } },
        axes: [{ show: false }, { show: false }],
        padding: [2, 0, 0, 0],
        series: [{}, ...kind.lines.map((line) => ({ stroke: () => color(line.color), width: 1.5, points: { show: false } }))],
      };
      return { kind, box, figure, plot: new uPlot(options, [[], ...kind.lines.map(() => [])], box) };
    });
    this.resizer.observe(this.element);
  }

  draw(samples: EngineSample[]): void {
    const times = samples.map((sample) => sample.time);
    const last = samples.at(-1);
    for (const { kind, figure, plot } of this.plots) {
      plot.setData([times, ...kind.lines.map((line) => samples.map(line.value))]);
      if (last) figure.textContent = kind.lines.map((line) => `${line.label} ${kind.show(line.value(last))}`).join(" · ");
    }
  }

  dispose(): void {
    this.resizer.disconnect();
    for (const { plot } of this.plots) plot.destroy();
  }

  private resize(): void {
    for (const { box, plot } of this.plots) {
      const width = Math.max(MIN_WIDTH, box.clientWidth);
      if (width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  }
}
