/**
 * The contract with the kernel: every trait and message of the widgets.
 *
 * Python mirrors this file in llmkernel/notebook/widgets/messages.py; a test holds the two together.
 * Kernel to view is marked ">", view to kernel "<". Times are seconds, rates are tokens per second.
 */

export type State = "queued" | "prefill" | "decoding" | "done" | "stopped" | "failed";

/** States after which nothing more comes. */
export const ENDED: ReadonlySet<State> = new Set<State>(["done", "stopped", "failed"]);

/** What the counters of a row show. Absent = unchanged. */
export interface Counters {
  state?: State;
  /** Tokens generated so far. */
  tokens?: number;
  rate?: number;
  /** Time to first token. */
  ttft?: number;
  prompt_tokens?: number;
  /** Prompt tokens taken from the prefix cache. */
  cached_tokens?: number;
  /** Why it waits, in words: "needs 12 blocks, 9 free". */
  note?: string;
  finish_reason?: string;
  /** One line for a failed request. */
  error?: string;
}

/** An alternative at one position: id, text, natural logarithm of its probability, bytes when the text is not whole. */
export type Alternative = [id: number, text: string, logprob: number, bytes?: number[]];

/** A generated token with its alternatives, best first. */
export interface TokenView {
  chosen: Alternative;
  rank: number;
  top: Alternative[];
}

/** A row in full. */
export interface RowSnapshot extends Counters {
  id: string;
  label: string;
  state: State;
  text: string;
  token_views?: TokenView[];
}

/** > All there is; answer to Hello and Resync, and the value of the `snapshot` trait when all is done. */
export interface Snapshot {
  t: "snapshot";
  /** The next frame has seq + 1. */
  seq: number;
  rows: RowSnapshot[];
}

/**
 * > What is new since the last frame, at most every 40 ms. `d` and `k` append, for rows on screen only (a row that comes into view
 * gets all it missed in its next frame); `c` is for any row.
 */
export interface Frame {
  t: "frame";
  seq: number;
  d?: [row: number, text: string][];
  c?: [row: number, counters: Counters][];
  k?: [row: number, tokens: TokenView[]][];
}

/** < A view is mounted. The Snapshot that answers reaches every view of the model. */
export interface Hello {
  t: "hello";
}

/** < The view missed a frame. */
export interface Resync {
  t: "resync";
  /** Last seq that was applied; -1 = none. */
  have: number;
}

/** < Rows on screen in one view: only rows that some view shows get text. Sent on change, and after every Snapshot. */
export interface Visible {
  t: "visible";
  view: string;
  rows: number[];
}

/** < Rows whose first text is on screen, each told once; sent when it has been painted. */
export interface Shown {
  t: "shown";
  rows: number[];
}

/** < A part of the program that is needed now: "markdown". */
export interface Want {
  t: "want";
  part: string;
}

/** > The source of that part, a module. */
export interface Part {
  t: "part";
  part: string;
  source: string;
}

export type StreamDown = Snapshot | Frame | Part;
export type StreamUp = Hello | Resync | Visible | Shown | Want;

export interface StreamTraits {
  /** Written when all rows have ended; null while they run. */
  snapshot: Snapshot | null;
  /** The one StopChannel of the kernel, as a widget reference. */
  stop: string;
  /** Whether rows carry token_views. */
  logprobs: boolean;
}

/** < On the StopChannel's own comm: end these requests. */
export interface Stop {
  t: "stop";
  ids: string[];
}

/** < On the StopChannel's own comm: end the load of this model. */
export interface Cancel {
  t: "cancel";
  model: string;
}

/** > On the StopChannel's own comm, always from inside its handler. */
export interface Heard {
  t: "heard";
}

export type StopUp = Hello | Stop | Cancel;
export type StopDown = Heard;

/** How a load stands. */
export interface LoadState {
  /** What Cancel names. */
  model: string;
  /** "Loading smollm2" */
  title: string;
  /** "loading", or how it ended: "ready", "failed", "unloaded". */
  state: string;
  /** The newest step, or the end, in words. */
  words: string;
  /** All stages that this load has, in order. */
  stages?: string[];
  /** Which of them runs; those before it are over. */
  at?: number;
  /** How much of it is done, 0 to 1; absent = nobody knows. */
  share?: number;
  /** Since it began. */
  seconds?: number;
}

export interface LoadTraits {
  load: LoadState;
  /** The one StopChannel of the kernel, as a widget reference. */
  stop: string;
}

/** A row of the dashboard's table. */
export interface RequestRow extends Counters {
  id: string;
  /** Execution count of its cell, 0 outside a notebook. */
  cell: number;
  model: string;
  state: State;
  /** Place in the waiting queue, 1 = next; 0 = not waiting. */
  position?: number;
  /** Mean time between tokens. */
  itl?: number;
  preemptions?: number;
  prompt?: string;
}

/** One sample of an engine, at most 4 a second. */
export interface EngineSample {
  /** Seconds since the dashboard's start. */
  time: number;
  running: number;
  waiting: number;
  tokens_in: number;
  tokens_out: number;
  /** 0 to 1. */
  kv_usage: number;
  hit_rate: number;
  preemptions: number;
  step_time: number;
  /** Bytes. */
  memory: number;
  /** Cores in use: 1.5 = one and a half. */
  cpu: number;
  /** The engine's threads in its last step; 0 where they are not counted. */
  threads: number;
}

/** > A sample, and the rows that changed. */
export interface DashboardFrame {
  t: "stats";
  seq: number;
  model: string;
  engine_state: string;
  sample: EngineSample;
  rows: RequestRow[];
  log: string[];
}

/** > Everything that a dashboard shows; answer to Hello and Resync. */
export interface DashboardSnapshot {
  t: "all";
  seq: number;
  model: string;
  engine_state: string;
  samples: EngineSample[];
  rows: RequestRow[];
  log: string[];
}

/** < Show the way of this request. */
export interface TraceRequest {
  t: "trace";
  id: string;
}

/** A hop of a request's way; `at` is seconds after it was submitted. */
export interface Hop {
  name: string;
  at: number;
  detail?: string;
  /** Where it was passed; absent = "kernel". */
  where?: "kernel" | "engine" | "page";
}

/** > Answer to TraceRequest. */
export interface Trace {
  t: "trace";
  id: string;
  hops: Hop[];
}

export type DashboardDown = DashboardFrame | DashboardSnapshot | Trace;
export type DashboardUp = Hello | Resync | TraceRequest;

export interface DashboardTraits {
  stop: string;
}
