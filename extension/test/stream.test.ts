import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { RowSnapshot, Snapshot, StopUp, StreamUp } from "../src/model";
import stream from "../src/stream/index";
import * as markdown from "../src/stream/markdown";
import { FakeModel } from "./fake_model";

const row = (id: string, text = "", more: Partial<RowSnapshot> = {}): RowSnapshot => ({
  id,
  label: `answer ${id}`,
  state: "decoding",
  text,
  ...more,
});
const snapshot = (seq: number, ...rows: RowSnapshot[]): Snapshot => ({ t: "snapshot", seq, rows });

const page = globalThis as { llmkernelMarkdown?: Promise<typeof markdown> };
let stop: FakeModel<StopUp>;
let model: FakeModel<StreamUp>;
let element: HTMLElement;
let cleanUp: () => void;

function open(traits: Record<string, unknown> = {}): void {
  stop = new FakeModel<StopUp>({});
  model = new FakeModel<StreamUp>({ snapshot: null, stop: "IPY_MODEL_s", logprobs: false, ...traits }, { s: stop });
  element = document.createElement("div");
  document.body.append(element);
  cleanUp = stream.render({ model: model as never, el: element });
}

const frame = (): void => {
  vi.advanceTimersByTime(20);
};
const click = (label: string): void => element.querySelector<HTMLButtonElement>(`[aria-label="${label}"]`)!.click();

beforeEach(() => {
  vi.useFakeTimers({ toFake: ["requestAnimationFrame", "cancelAnimationFrame", "setTimeout", "clearTimeout"] });
});
afterEach(() => {
  cleanUp();
  page.llmkernelMarkdown = undefined;
  vi.useRealTimers();
  document.body.replaceChildren();
});

describe("a stream view", () => {
  it("says hello when it is mounted, and shows the snapshot that answers", () => {
    open();
    expect(model.sent).toEqual([{ t: "hello" }]);
    model.say(snapshot(3, row("a", "Hello")));
    expect(element.querySelector(".llmk-plain")!.textContent).toBe("Hello");
  });

  it("appends deltas in order, several frames in one paint", () => {
    open();
    model.say(snapshot(0, row("a"), row("b")));
    model.say({ t: "frame", seq: 1, d: [[0, "one "], [1, "eins "]] });
    model.say({ t: "frame", seq: 2, d: [[0, "two"]], c: [[0, { state: "done", tokens: 2 }]] });
    frame();
    const texts = [...element.querySelectorAll(".llmk-plain")].map((node) => node.textContent);
    expect(texts).toEqual(["one two", "eins "]);
    expect(element.querySelector(".llmk-state")!.textContent).toBe("done");
  });

  it("tells once which rows show their first text, after it was painted", () => {
    open();
    model.say(snapshot(0, row("a", "here"), row("b")));
    model.say({ t: "frame", seq: 1, d: [[1, "one "]] });
    frame();
    model.say({ t: "frame", seq: 2, d: [[0, "two"], [1, "two"]] });
    frame();
    const rows = model.sent.flatMap((message) => (message.t === "shown" ? message.rows : []));
    expect(rows).toEqual([0, 1]);
  });

  it("asks once for all there is when a frame is missing, and ignores frames until it comes", () => {
    open();
    model.say(snapshot(0, row("a")));
    model.say({ t: "frame", seq: 1, d: [[0, "x"]] });
    model.say({ t: "frame", seq: 3, d: [[0, "LOST"]] });
    model.say({ t: "frame", seq: 4, d: [[0, "LOST"]] });
    frame();
    expect(model.sent.filter((message) => message.t === "resync")).toEqual([{ t: "resync", have: 1 }]);
    model.say(snapshot(4, row("a", "xyz")));
    model.say({ t: "frame", seq: 5, d: [[0, "!"]] });
    frame();
    expect(element.querySelector(".llmk-plain")!.textContent).toBe("xyz!");
  });

  it("never counts old frames twice", () => {
    open();
    model.say(snapshot(2, row("a", "ab")));
    model.say({ t: "frame", seq: 2, d: [[0, "b"]] });
    frame();
    expect(element.querySelector(".llmk-plain")!.textContent).toBe("ab");
    expect(model.sent.filter((message) => message.t === "resync")).toEqual([]);
  });

  it("treats model text as text in every reading", async () => {
    open();
    const hostile = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">[a](javascript:alert(1)) ![i](http://x.test/i.png)';
    model.say(snapshot(0, row("a", hostile)));
    expect(element.querySelector(".llmk-plain")!.textContent).toBe(hostile);
    page.llmkernelMarkdown = Promise.resolve(markdown);
    click("Show as Markdown");
    await vi.advanceTimersByTimeAsync(0);
    expect(element.querySelector("script, img")).toBeNull();
    expect([...element.querySelectorAll("a")].map((link) => link.getAttribute("href"))).toEqual(["http://x.test/i.png"]);
    expect((window as unknown as Record<string, unknown>).hacked).toBeUndefined();
  });

  it("stops one, or all that still run, over the stop channel only", async () => {
    open();
    await vi.advanceTimersByTimeAsync(0);
    model.say(snapshot(0, row("a"), row("b"), row("c", "", { state: "done" })));
    element.querySelectorAll<HTMLButtonElement>('[aria-label="Stop this request"]')[1]!.click();
    click("Stop every request of this cell");
    await vi.advanceTimersByTimeAsync(0);
    expect(stop.sent).toEqual([{ t: "hello" }, { t: "stop", ids: ["b"] }, { t: "stop", ids: ["a", "b"] }]);
    expect(model.sent.map((message) => message.t)).toEqual(["hello"]);
  });

  it("tells which rows are on screen as soon as it is known, and not before: no row would mean no text", () => {
    let seen: (entries: unknown[]) => void = () => undefined;
    class Observer {
      constructor(callback: (entries: unknown[]) => void) {
        seen = callback;
      }
      observe(): void {}
      disconnect(): void {}
    }
    vi.stubGlobal("IntersectionObserver", Observer);
    open();
    model.say(snapshot(0, row("a"), row("b")));
    const told = () => model.sent.flatMap((message) => (message.t === "visible" ? [message.rows] : []));
    const [first, second] = [...element.querySelectorAll(".llmk-row")];
    expect(told()).toEqual([]);
    seen([{ target: first, isIntersecting: true }, { target: second, isIntersecting: false }]);
    expect(told()).toEqual([[0]]);
    seen([{ target: second, isIntersecting: true }]);
    expect(told()).toEqual([[0]]);
    vi.advanceTimersByTime(100);
    expect(told()).toEqual([[0], [0, 1]]);
    model.say(snapshot(1, row("a"), row("b")));
    expect(told()).toEqual([[0], [0, 1], [0, 1]]);
    vi.unstubAllGlobals();
  });

  it("asks the kernel once for the Markdown part, and shows text until it is there", async () => {
    open();
    model.say(snapshot(0, row("a", "*one*"), row("b", "*two*")));
    click("Show as Markdown");
    await vi.advanceTimersByTimeAsync(0);
    expect(model.sent.filter((message) => message.t === "want")).toEqual([{ t: "want", part: "markdown" }]);
    expect(element.querySelector(".llmk-plain")!.textContent).toBe("*one*");
  });

  it("shows tokens with their alternatives", () => {
    open({ logprobs: true });
    model.say(snapshot(0, row("a")));
    click("Show as Tokens");
    const view = { chosen: [5, " yes", -0.1], rank: 1, top: [[5, " yes", -0.1], [7, " no", -2.4]] };
    model.say({ t: "frame", seq: 1, k: [[0, [view]]] });
    frame();
    const token = element.querySelector<HTMLElement>(".llmk-token")!;
    expect(token.textContent).toBe(" yes");
    token.dispatchEvent(new FocusEvent("focusin", { bubbles: true }));
    const panel = element.querySelector<HTMLElement>(".llmk-panel")!;
    expect(panel.hidden).toBe(false);
    expect(panel.textContent).toContain("␣no");
    expect(panel.textContent).toContain("90.5 %");
  });

  it("goes from token to token by keys, and tells the bytes of what is no text", () => {
    open({ logprobs: true });
    const half = { chosen: [9, "", -0.5, [0xf0, 0x9f]], rank: 1, top: [[9, "", -0.5, [0xf0, 0x9f]]] };
    const rest = { chosen: [8, "🙂", 0, [0x99, 0x82]], rank: 1, top: [[8, "🙂", 0, [0x99, 0x82]]] };
    const line = { chosen: [3, "\n\u001b", 0], rank: 1, top: [[3, "\n\u001b", 0], [4, "<img src=x>", -9]] };
    model.say(snapshot(0, row("a", "", { token_views: [half, rest, line] as never })));
    click("Show as Tokens");
    const tokens = [...element.querySelectorAll<HTMLElement>(".llmk-token")];
    expect(tokens.map((token) => token.textContent)).toEqual(["·", "🙂", "⏎\n␛"]);
    expect(tokens.map((token) => token.tabIndex)).toEqual([0, -1, -1]);
    tokens[0]!.focus();
    const press = (key: string) => document.activeElement!.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    const panel = element.querySelector<HTMLElement>(".llmk-panel")!;
    expect(panel.textContent).toContain("<f0 9f>");
    press("ArrowRight");
    expect([document.activeElement, panel.hidden]).toEqual([tokens[1], false]);
    expect(panel.textContent).toContain("🙂 <99 82>");
    press("End");
    press("ArrowRight");
    expect([document.activeElement, tokens[2]!.tabIndex, tokens[0]!.tabIndex]).toEqual([tokens[2], 0, -1]);
    expect(panel.textContent).toContain("⏎␛");
    expect(panel.textContent).toContain("<img␣src=x>");
    expect(element.querySelector("img")).toBeNull();
    press("Escape");
    expect(panel.hidden).toBe(true);
  });

  it("shows the stored snapshot when no kernel answers", () => {
    open({ snapshot: snapshot(9, row("a", "kept", { state: "done" })) });
    expect(element.querySelector(".llmk-plain")!.textContent).toBe("kept");
  });

  it("leaves no listener behind", () => {
    open();
    expect(model.listening).toBe(1);
    cleanUp();
    expect(model.listening).toBe(0);
  });
});
