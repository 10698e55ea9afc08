import type { Counters, State } from "../model";

const STATE_WORDS: Record<State, string> = {
  queued: "queued",
  prefill: "reading",
  decoding: "writing",
  done: "done",
  stopped: "stopped",
  failed: "failed",
};

export function stateWord(state: State): string {
  return STATE_WORDS[state];
}

export function count(value: number, noun: string): string {
  return `${value.toLocaleString("en")} ${noun}${value === 1 ? "" : "s"}`;
}

export function seconds(value: number): string {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
}

export function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit === 0 || value >= 100 ? 0 : 1)} ${units[unit]}`;
}

export function percent(share: number): string {
  return `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

/** The counters of a row in one line. */
export function summary(counters: Counters): string {
  const parts: string[] = [];
  if (counters.tokens) parts.push(count(counters.tokens, "token"));
  if (counters.rate) parts.push(`${counters.rate.toFixed(1)} tok/s`);
  if (counters.ttft !== undefined) parts.push(`first after ${seconds(counters.ttft)}`);
  if (counters.prompt_tokens) {
    const cached = counters.cached_tokens ? `, ${counters.cached_tokens} cached` : "";
    parts.push(`prompt ${counters.prompt_tokens}${cached}`);
  }
  if (counters.finish_reason === "length") parts.push("cut at max_tokens");
  return parts.join(" · ");
}
