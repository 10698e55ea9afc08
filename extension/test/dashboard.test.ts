import { describe, expect, it, vi } from "vitest";
import type { RequestRow } from "../src/model";
import { RequestTable } from "../src/dashboard/table";
import { timeline } from "../src/dashboard/timeline";
import { summary } from "../src/shared/format";

const request = (id: string, more: Partial<RequestRow> = {}): RequestRow => ({ id, cell: 3, model: "m", state: "decoding", ...more });

describe("the request table", () => {
  it("keeps a page-sized number of rows for a thousand requests, live ones first", () => {
    const table = new RequestTable({ stop: vi.fn(), trace: vi.fn() });
    table.update(Array.from({ length: 1000 }, (_, at) => request(`r${at}`, { state: at === 5 ? "decoding" : "done" })), true);
    const rows = table.element.querySelectorAll(".llmk-space .llmk-tr");
    expect(rows.length).toBeLessThan(60);
    expect((rows[0] as HTMLElement).dataset.id).toBe("r5");
  });

  it("merges what changed and says why a request waits", () => {
    const table = new RequestTable({ stop: vi.fn(), trace: vi.fn() });
    table.update([request("a", { state: "queued", position: 2, note: "needs 12 blocks, 9 free" })], true);
    expect(table.element.textContent).toContain("needs 12 blocks, 9 free");
    expect(table.element.textContent).toContain("queued #2");
    table.update([{ ...request("a"), tokens: 7, position: 0 }], false);
    expect(table.element.textContent).toContain("writing");
  });

  it("stops and traces the request of its own row", () => {
    const stop = vi.fn();
    const trace = vi.fn();
    const table = new RequestTable({ stop, trace });
    table.update([request("a"), request("b")], true);
    const rows = [...table.element.querySelectorAll<HTMLElement>(".llmk-space .llmk-tr")];
    const second = rows.find((row) => row.dataset.id === "b")!;
    second.querySelector<HTMLButtonElement>('[aria-label="Stop this request"]')!.click();
    second.querySelector<HTMLButtonElement>('[aria-label="Show the way of this request"]')!.click();
    expect(stop).toHaveBeenCalledWith("b");
    expect(trace).toHaveBeenCalledTimes(1);
    expect(trace).toHaveBeenCalledWith("b");
  });

  it("traces the request whose row is clicked, marks it, and names its cell", () => {
    const trace = vi.fn((id: string) => table.select(id));
    const table = new RequestTable({ stop: vi.fn(), trace });
    table.update([request("a"), request("b", { cell: 12 })], true);
    const row = table.element.querySelector<HTMLElement>('[data-id="b"]')!;
    row.querySelector<HTMLElement>(".llmk-number")!.click();
    expect(trace).toHaveBeenCalledWith("b");
    expect(row.getAttribute("aria-selected")).toBe("true");
    expect(row.textContent).toContain("[12]");
  });
});

describe("words and figures", () => {
  it("draws one line per hop", () => {
    const element = timeline({ t: "trace", id: "a", hops: [{ name: "submitted", at: 0 }, { name: "queued", at: 0.0004, where: "engine" }, { name: "first token", at: 0.5004, where: "engine" }] });
    expect([...element.children].map((hop) => (hop as HTMLElement).dataset.where)).toEqual(["kernel", "engine", "engine"]);
    expect(element.textContent).toContain("+0.4 ms");
    expect(element.textContent).toContain("+500 ms");
  });

  it("sums a row up in one line", () => {
    expect(summary({ tokens: 1, rate: 12.34, ttft: 0.25, prompt_tokens: 30, cached_tokens: 16 })).toBe(
      "1 token · 12.3 tok/s · first after 250 ms · prompt 30, 16 cached",
    );
  });
});
