import type { Trace } from "../model";
import { h } from "../shared/dom";
import { seconds } from "../shared/format";

/** Most hops take less than a millisecond. */
const fine = (value: number): string => (value < 0.1 ? `${(value * 1000).toFixed(1)} ms` : seconds(value));

/** The way of one request on a time line: a hop per line, placed by its time, with the time since the hop before; the colour says where. */
export function timeline(trace: Trace): HTMLElement {
  const end = Math.max(...trace.hops.map((hop) => hop.at), 1e-6);
  const element = h("div", "llmk-timeline", { role: "list", "aria-label": `way of request ${trace.id}` });
  let before = 0;
  for (const hop of trace.hops) {
    const bar = h("span", "llmk-hop-bar");
    bar.style.left = `${(before / end) * 100}%`;
    bar.style.width = `${Math.max(((hop.at - before) / end) * 100, 0.4)}%`;
    element.append(
      h(
        "div",
        "llmk-hop",
        { role: "listitem", "data-where": hop.where ?? "kernel" },
        h("span", "llmk-dim", {}, hop.where ?? "kernel"),
        h("span", "llmk-hop-name", {}, hop.name),
        h("span", "llmk-hop-track", {}, bar),
        h("span", "llmk-number", {}, `+${fine(hop.at - before)}`),
        h("span", "llmk-number llmk-dim", {}, fine(hop.at)),
        h("span", "llmk-dim", { title: hop.detail ?? "" }, hop.detail ?? ""),
      ),
    );
    before = hop.at;
  }
  return element;
}
